"""Recall, NLL and distance from dense of one batch of examples."""

import numpy as np
import torch

from tasks import example as example_module
from tasks import registry

_ROWS = 1 << 16  # tokens whose logits are held at once


class Batch:
    """Examples of one task and length, seeds first .. first + count - 1."""

    def __init__(self, task, length, first, count, device, **params):
        self.examples = [registry.make(task, length, seed, **params)
                         for seed in range(first, first + count)]
        tokens = np.stack([e.tokens for e in self.examples])
        self.tokens = torch.from_numpy(tokens).long().to(device)
        places = [np.concatenate([np.arange(a.start, a.end) for a in e.answers])
                  for e in self.examples]
        answer = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, where in enumerate(places):
            answer[row, where] = True
        self.answer = answer.to(device)


@torch.no_grad()
def measure(batch, model, hidden, dense=None):
    """One dict per example: recall, nll (of all but the answers), and with `dense`, the hidden
    states of the dense run, kl (dense to this, nats a token) and top1 (same most likely token)."""
    out = []
    for row, example in enumerate(batch.examples):
        tokens, length = batch.tokens[row], batch.tokens.shape[1]
        nll, kl, top1 = (torch.zeros((), dtype=torch.float64, device=tokens.device)
                         for _ in range(3))
        predicted = torch.full((length,), -1, device=tokens.device)
        prose = ~batch.answer[row, 1:]
        for start in range(0, length - 1, _ROWS):
            part = slice(start, min(start + _ROWS, length - 1))
            logp = model.logits(hidden[row, part]).log_softmax(-1)
            target = tokens[part.start + 1:part.stop + 1]
            each = -logp.gather(-1, target[:, None])[:, 0]
            nll += each[prose[part]].double().sum()
            predicted[part.start + 1:part.stop + 1] = logp.argmax(-1)
            if dense is not None:
                reference = model.logits(dense[row, part]).log_softmax(-1)
                kl += (reference.exp() * (reference - logp)).sum(-1).double().sum()
                top1 += (reference.argmax(-1) == logp.argmax(-1)).double().sum()
        line = {"recall": example_module.score_teacher_forced(example, predicted.cpu().numpy()),
                "nll": float(nll / prose.sum())}
        if dense is not None:
            line.update(kl=float(kl / (length - 1)), top1=float(top1 / (length - 1)))
        out.append(line)
    return out


def summary(lines, groups=3):
    """{name: (mean, spread)}: spread is the largest distance of a group's mean from the mean."""
    found = {}
    for name in lines[0]:
        values = np.array([line[name] for line in lines])
        means = [part.mean() for part in np.array_split(values, min(groups, len(values)))]
        found[name] = (float(values.mean()), float(np.abs(np.array(means) - values.mean()).max()))
    return found
