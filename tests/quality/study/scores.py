"""Candidates for the score of an event: what a token's write into a head pair's state is worth.

Each takes a Window and gives [B, n, Hk], larger is kept first. Hv / Hk value heads share a pair and
the largest of them counts. `COST` is the arithmetic a token and value head costs beyond dense GDN
(multiply-adds), and what must be known: "gates" needs beta and log_gate only, so that the mask is
known before k and v exist; "k", "v" those rows; "state" the state before the window.
"""

import dataclasses

import torch

from train import delta_rule

NEAR = 16  # recent keys that novelty looks at
SKETCH = 8  # columns of the sketched state


@dataclasses.dataclass
class Window:
    """q, k [B, n, Hk, Dk]; v [B, n, Hv, Dv]; beta, log_gate [B, n, Hv] of a window's tokens; before
    [B, 64, Hk, Dk], the keys before them (zeros at the start); state [B, Hv, Dk, Dv] before them;
    weights: of the learned score, [Hk, features] of this layer; generator: of the random score."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    log_gate: torch.Tensor
    before: torch.Tensor
    state: torch.Tensor
    generator: torch.Generator
    weights: torch.Tensor = None

    @property
    def pairs(self):
        return self.k.shape[2]


def _pair_max(w, x):
    return x.unflatten(-1, (w.pairs, -1)).amax(-1)


def _value_norm(w):
    return w.v.norm(dim=-1)


def _survives(w):
    """Share of a write that decay leaves at the end of the window."""
    total = w.log_gate.double().cumsum(1)
    return (total[:, -1:] - total).exp().float()


def _novel(w):
    """[B, n, Hk]: 1 - the largest squared cosine with one of the NEAR keys before."""
    keys = torch.cat([w.before[:, -NEAR:], w.k], dim=1)
    count = w.k.shape[1]
    most = torch.zeros_like(w.k[..., 0])
    for lag in range(1, NEAR + 1):
        most = torch.maximum(most, (w.k * keys[:, NEAR - lag:NEAR - lag + count]).sum(-1).square())
    return 1 - most.clamp_max(1)


def _to_value_heads(w, x):
    return x.repeat_interleave(w.v.shape[2] // w.pairs, dim=2)


def _write_norm_heads(w):
    return w.beta * _value_norm(w)


def beta(w):
    return _pair_max(w, w.beta)


def write_norm(w):
    return _pair_max(w, _write_norm_heads(w))


def novelty(w):
    return beta(w) * _novel(w)


def novelty_norm(w):
    return write_norm(w) * _novel(w)


def lifetime(w):
    return _pair_max(w, w.beta * _survives(w))


def lifetime_norm(w):
    return _pair_max(w, _write_norm_heads(w) * _survives(w))


def _residual(w, sketch=None):
    """beta |v - e^G S^T k| [B, n, Hv], S the state before the window, e^G its decay since then."""
    kept = w.log_gate.double().cumsum(1).exp().float()[..., None]
    state, value = w.state, w.v
    if sketch is not None:
        state, value = state @ sketch, value @ sketch
    k = _to_value_heads(w, w.k)
    return w.beta * (value - kept * torch.einsum("bthk,bhkv->bthv", k, state)).norm(dim=-1)


def window_surprise(w):
    return _pair_max(w, _residual(w))


def window_sketch(w):
    source = torch.Generator().manual_seed(1)
    dim = w.v.shape[-1]
    sketch = torch.randn(dim, SKETCH, generator=source) / SKETCH ** 0.5
    return _pair_max(w, _residual(w, sketch.to(w.v)))


def chunk_surprise(w):
    """|u| of the delta rule within chunks of 64 that start from nothing."""
    batch, count, heads, dim = w.v.shape
    short = -count % 64
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short)) for x in (w.q, w.k, w.v))
    b, g = (torch.nn.functional.pad(x, (0, 0, 0, short)) for x in (w.beta, w.log_gate))
    q, k, v, b, g = (x.reshape(batch * (count + short) // 64, 64, *x.shape[2:])
                     for x in (q, k, v, b, g))
    _, _, update = delta_rule.chunked(q, k, v, b, g, updates=True)
    update = update.reshape(batch, count + short, heads, dim)[:, :count]
    return _pair_max(w, update.norm(dim=-1))


def oracle_surprise(w):
    """|u|, the true write: beta |v - e^g S^T k|. Costs the dense delta rule itself."""
    _, _, update = delta_rule.chunked(w.q, w.k, w.v, w.beta, w.log_gate, w.state, updates=True)
    return _pair_max(w, update.norm(dim=-1))


def features(w):
    """[B, n, Hk, 8] of the learned score: all from beta, log_gate, |v| and NEAR key products."""
    tiny = 1e-4
    b, norm, life, new = beta(w), write_norm(w), lifetime(w), _novel(w)
    columns = (torch.ones_like(b), b, (b + tiny).log(), norm, (norm + tiny).log(),
               life, (life + tiny).log(), (new + tiny).log())
    return torch.stack(columns, dim=-1)


def learned(w):
    """e^(features . weights), fitted to log |u| on calibration prompts."""
    return torch.einsum("bthf,hf->bth", features(w), w.weights).clamp(-12, 5).exp()


def random(w):
    """Control."""
    return torch.rand(w.k.shape[:3], generator=w.generator, device=w.k.device)


def shuffled(w):
    """Control: BETA's scores, each at the place of another token of the window."""
    order = torch.randperm(w.k.shape[1], generator=w.generator, device=w.k.device)
    return beta(w)[:, order]


SCORES = {f.__name__: f for f in (
    beta, write_norm, novelty, novelty_norm, lifetime, lifetime_norm, chunk_surprise,
    window_surprise, window_sketch, learned, oracle_surprise, random, shuffled)}

# name -> (multiply-adds a token and value head at Dk = Dv = 128, Hv / Hk = 2; what must be known)
COST = {
    "beta": (0, "gates"),
    "write_norm": (128, "v"),
    "novelty": (NEAR * 128 // 2, "k"),
    "novelty_norm": (NEAR * 128 // 2 + 128, "k, v"),
    "lifetime": (1, "gates"),
    "lifetime_norm": (129, "v"),
    "chunk_surprise": (64 * 128, "k, v"),
    "window_surprise": (128 * 128, "k, v, state"),
    "window_sketch": (2 * 128 * SKETCH, "k, v, state"),
    "learned": (NEAR * 128 // 2 + 137, "k, v"),
    "oracle_surprise": (3 * 128 * 128, "everything"),
    "random": (0, "nothing"),
    "shuffled": (0, "gates"),
}
