"""Dense accuracy of a checkpoint folder, teacher-forced, by task and length."""

import numpy as np
import torch

from tasks import example as example_module
from tasks import registry


@torch.no_grad()
def predictions(model, tokens, answers):
    """int [T]: the most likely token at the places of the answers, -1 elsewhere. tokens [T]."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden, _ = model.hidden(torch.from_numpy(tokens).long().to(device)[None])
    places = np.concatenate([np.arange(answer.start, answer.end) for answer in answers])
    index = torch.from_numpy(places).to(device) - 1
    found = np.full(len(tokens), -1)
    found[places] = model.logits(hidden[0, index]).argmax(-1).cpu().numpy()
    return found


def accuracy(model, task, length, examples, first_seed=0, **params):
    """Mean score_teacher_forced over `examples` seeds."""
    scores = []
    for seed in range(first_seed, first_seed + examples):
        example = registry.make(task, length, seed, **params)
        found = predictions(model, example.tokens, example.answers)
        scores.append(example_module.score_teacher_forced(example, found))
    return float(np.mean(scores))


def table(model, lengths, examples):
    """{task: {length: accuracy}} for every task; fewer examples where all needles are asked."""
    return {task: {length: accuracy(model, task, length,
                                    max(1, examples // 8) if task == "needle_recall" else examples)
                   for length in lengths}
            for task in registry.TASKS}
