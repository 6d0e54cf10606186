"""The budget of a window (docs/algorithm.md, "retention"), batched over examples, in torch."""

import functools
import math

import torch

WINDOW = 2048
_BITS = 11


def _reversed_offsets(count):
    offsets = torch.arange(count)
    out = torch.zeros_like(offsets)
    for bit in range(_BITS):
        out = 2 * out + ((offsets >> bit) & 1)
    return out


@functools.lru_cache(maxsize=64)
def _turned(count, device):
    """Offsets in the order of their reversed bits."""
    return _reversed_offsets(count).argsort().to(device)


def _ranks(order):
    """Inverse permutations along the last axis."""
    ranks = torch.empty_like(order)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return ranks.scatter_(-1, order, places)


def select(score, retention, spread=True):
    """bool [B, n, Hk]: the events of the first n tokens of a window, none of them forced.

    score [B, n, Hk], larger first. retention: share of B's n * Hk candidates that is taken, between
    retention / 4 and 2 retention per head pair, or with spread=False exactly that for each pair.
    """
    batch, count, pairs = score.shape
    if retention >= 1 or count == 0:
        return torch.ones_like(score, dtype=torch.bool)
    z = torch.round(score.double() * 65536).clamp(0, 2**25).long()
    total = z.sum(1, keepdim=True)
    normalised = z * torch.where(total > 0, count / total.clamp_min(1), 0.0).double()
    low, high = retention / 4, min(1.0, 2 * retention)
    if not spread:
        low = high = retention
    lo = math.ceil(low * count)
    hi = max(lo, math.floor(high * count))
    wanted = min(max(round(retention * count * pairs), lo * pairs), hi * pairs)
    # In the order of reversed offsets a stable sort breaks ties as the definition does.
    turned = _turned(count, score.device)
    normalised = normalised[:, turned]
    rank = _ranks(normalised.transpose(1, 2).argsort(dim=-1, descending=True, stable=True))
    rank = rank.transpose(1, 2)
    first = rank < lo
    key = normalised.masked_fill(first, torch.inf).masked_fill(rank >= hi, -1.0)
    flat = key.reshape(batch, -1).argsort(dim=-1, descending=True, stable=True)
    taken = (_ranks(flat) < wanted).view_as(key) & (rank < hi)
    mask = torch.empty_like(taken)
    mask[:, turned] = taken
    return mask
