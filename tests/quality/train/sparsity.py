"""The sparse forward pass of training: the events that a server would drop are dropped.

Every other row of a batch runs as a sparse prefill does (docs/algorithm.md): beta scores, windows of
2048 tokens, self term; the last 64 tokens before the first answer and all after it are dense, as with
keep_last and dense decoding. The mask has no gradient; a dropped write still has one through the
self term. So a model learns to put what it needs later into few writes with a large beta.
"""

import dataclasses

import numpy as np
import torch

from study import budget
from tasks import registry

KEEP_LAST = 64
_PURPOSE = 5  # of the random numbers here: none of data.py's has a fourth word 5 and three others


@dataclasses.dataclass
class Sparsity:
    """rows bool [B]: run sparsely; free int64 [B]: from this token on a row is dense; retention:
    the share kept. written: mean beta of every layer that ran, in order."""

    rows: torch.Tensor
    free: torch.Tensor
    retention: float
    written: list = dataclasses.field(default_factory=list)

    @torch.no_grad()
    def mask(self, beta, pairs):
        """bool [B, T, Hv], the same for all value heads of a pair, from beta [B, T, Hv]."""
        batch, tokens, heads = beta.shape
        candidate = torch.arange(tokens, device=beta.device) < self.free[:, None]
        score = beta.unflatten(-1, (pairs, -1)).amax(-1) * candidate[..., None]
        whole = tokens - tokens % budget.WINDOW
        parts = [budget.select(part.reshape(-1, min(budget.WINDOW, part.shape[1]), pairs),
                               self.retention).reshape(batch, -1, pairs)
                 for part in (score[:, :whole], score[:, whole:]) if part.shape[1]]
        kept = torch.cat(parts, dim=1) | ~(candidate & self.rows[:, None])[..., None]
        return kept.repeat_interleave(heads // pairs, dim=2)


def of_batch(batch, seed, retentions, device):
    """The Sparsity of a data.Batch: a function of (seed, step) as the batch is."""
    rng = np.random.default_rng([registry.TRAINING, seed, batch.step, 0, _PURPOSE])
    rows, tokens = batch.tokens.shape
    first = batch.answers.argmax(1)
    free = np.where(batch.answers.any(1), np.maximum(first - KEEP_LAST, 0), tokens)
    return Sparsity(torch.arange(rows, device=device) % 2 == 0,
                    torch.from_numpy(free).to(device), float(rng.choice(retentions)))
