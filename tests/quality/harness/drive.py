"""One example and budget on a running server: accuracy, NLL, logits to compare, retained share.

The prompt is one sparse prefill. Answers are decoded greedily, one token a call, from the snapshot
that it left: what a decode worker sees. Further questions of an example follow the answers given.
"""

import dataclasses
import time

import numpy as np
from sparsegdn_client import Budget, Outputs

from tasks import example as example_module
from tasks import text as text_module

_LOGITS_BYTES = 64 << 20  # of one call: bounds the positions at which distributions are compared
_POSITIONS = 1024
DENSE = Budget(mode="dense")
_NOTHING = Outputs(state=False, conv_state=False, kv=False)


@dataclasses.dataclass
class Outcome:
    """score in [0, 1]; nll: nats a prompt token; logp [P, V]: log-probabilities at positions spread
    over the prompt; retained {layer: shares of its head pairs}; seconds: the prefill, as the server
    timed it."""

    score: float
    nll: float
    logp: np.ndarray
    retained: dict
    seconds: float
    events: tuple


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def positions(count, vocab_size):
    """Where distributions are compared: at most 1024 places, evenly over a prompt of count."""
    most = max(1, min(_POSITIONS, count, _LOGITS_BYTES // (4 * vocab_size)))
    return np.unique(np.linspace(0, count - 1, most).astype(int))


class _Decoder:
    """Greedy tokens after a kept snapshot."""

    def __init__(self, client, result):
        self.client, self.kept, self.next = client, result.snapshot_id, result.next_token

    def feed(self, tokens):
        done = self.client.prefill(tokens, resume_from=self.kept, budget=DENSE, keep=True,
                                   snapshot_at="after_last", outputs=_NOTHING).result
        self.client.release(self.kept)
        self.kept, self.next = done.snapshot_id, done.next_token

    def take(self, count):
        """`count` tokens; the last is not fed."""
        found = [self.next]
        while len(found) < count:
            self.feed([self.next])
            found.append(self.next)
        return found

    def close(self):
        self.client.release(self.kept)


def _answers(decoder, example):
    outputs = []
    for index, answer in enumerate(example.answers):
        if index:
            decoder.feed([outputs[-1][-1], *(int(t) for t in example.question(index))])
        outputs.append(decoder.take(answer.new_tokens))
    return outputs


def run(client, info, example, budget, tokenizer=None):
    """The Outcome of an Example, or of a TextExample with its tokenizer, under a Budget."""
    ids = [int(t) for t in (example.ids if tokenizer else example.prompt)]
    places = positions(len(ids), info.vocab_size)
    began = time.monotonic()
    done = client.prefill(ids, budget=budget, keep=True, snapshot_at="after_last", outputs=Outputs(
        state=False, conv_state=False, kv=False, logits_positions=places.tolist(),
        prompt_logprobs_from=1))
    seconds = done.result.timings.engine_seconds or time.monotonic() - began
    decoder = _Decoder(client, done.result)
    try:
        if tokenizer:
            found = tokenizer.decode(decoder.take(example.new_tokens))
            score = text_module.score(example, found)
        else:
            score = example_module.score(example, _answers(decoder, example))
    finally:
        decoder.close()
    usage = done.result.usage
    return Outcome(score, -float(np.mean(done.snapshot["prompt_logprobs"])),
                   log_softmax(done.snapshot["logits"]), dict(done.result.retained), seconds,
                   (usage.events_selected, usage.events_total))


def distance(dense, other):
    """(KL of dense to other in nats, share of places with the same most likely token)."""
    kl = (np.exp(dense) * (dense - other)).sum(axis=1).mean()
    return float(kl), float((dense.argmax(axis=1) == other.argmax(axis=1)).mean())
