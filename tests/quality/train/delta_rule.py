"""The gated delta rule for training: chunk-parallel, differentiable, with a reference beside it.

Per value head, with its key head k, q (unit rows), log_gate <= 0, beta in [0, 1], state S [Dk, Dv]:

    S_t = e^{log_gate_t} S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - e^{log_gate_t} S_{t-1}^T k_t)
    o_t = S_t^T q_t

(Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024.) In a chunk of C tokens that starts from S,
with G the running sum of log_gate in the chunk and A_ij = beta_i e^{G_i - G_j} (k_i . k_j), i > j:

    (I + A) U = diag(beta) (V - diag(e^G) K S)   =>   U = U0 - W S,  T = (I + A)^-1,
        U0 = T diag(beta) V,   W = T diag(beta e^G) K
    O = diag(e^G) Q S + (e^{G_i - G_j} q_i . k_j, i >= j) U
    S' = e^{G_C} S + (diag(e^{G_C - G}) K)^T U = d S + N + P S
        d = e^{G_C},   N = K^T diag(e^{G_C - G}) U0,   P = -K^T diag(e^{G_C - G}) W

All but S' is batched over chunks; the chain S -> S' is two launches a chunk (DecayScan). d S is
kept apart from P S so that TF32, if it is allowed, rounds only the correction and never the state.
"""

import contextlib

import torch

CHUNK = 64


@contextlib.contextmanager
def _full_precision():
    """fp32 products without TF32, whatever the process allows elsewhere."""
    if not torch.cuda.is_available():
        yield
        return
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _small_product(a, b):
    """a @ b; blocks below 8 x 8 elementwise: batched products of that size crawl on a GPU."""
    if a.shape[-1] >= 8:
        return a @ b
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def _invert(lower):
    """(I + lower)^-1 of strictly lower [..., C, C], C a power of two: inverts 1, 2, 4, ... blocks.

    From inverses of two neighbouring diagonal blocks of size s follows that of the block of 2 s:
    its lower left part is -T22 A21 T11. Exact substitution, no powers of A: keys that are nearly
    parallel do not hurt.
    """
    size = lower.shape[-1]
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower).clone()
    half = 1
    while half < size:
        count = size // (2 * half)
        blocks = (*lower.shape[:-2], count, 2 * half, count, 2 * half)
        # Diagonal blocks [..., count, 2 half, 2 half], a view of `inverse`.
        pairs = inverse.view(blocks).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        below = lower.view(blocks).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., half:, :half]
        right = _small_product(below, pairs[..., :half, :half])
        pairs[..., half:, :half] = -_small_product(pairs[..., half:, half:], right)
        half *= 2
    return inverse


class UnitLowerInverse(torch.autograd.Function):
    """T = (I + A)^-1; dA = -T^T dT T^T, of which the strictly lower part is kept."""

    @staticmethod
    def forward(ctx, lower):
        with _full_precision():
            inverse = _invert(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        inverse, = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


class DecayScan(torch.autograd.Function):
    """S_{n+1} = decay_n S_n + add_n + mix_n S_n for n = 0 .. N - 1; gives S_0 .. S_N.

    mix [N, M, D, D], add [N, M, D, E], decay [N, M], first [M, D, E] -> [N + 1, M, D, E]. The chain
    is the only serial part of training: two launches a step, forward and backward.
    """

    @staticmethod
    def forward(ctx, mix, add, decay, first):
        states = torch.empty(len(add) + 1, *first.shape, dtype=first.dtype, device=first.device)
        states[0] = first
        factor = decay[..., None, None]
        for n in range(len(add)):
            torch.addcmul(add[n], factor[n], states[n], out=states[n + 1])
            states[n + 1].baddbmm_(mix[n], states[n])
        ctx.save_for_backward(mix, decay, states)
        return states

    @staticmethod
    def backward(ctx, grad):
        mix, decay, states = ctx.saved_tensors
        total = torch.empty_like(states)
        total[-1] = grad[-1]
        factor, turned = decay[..., None, None], mix.mT
        for n in range(len(mix) - 1, -1, -1):
            torch.addcmul(grad[n], factor[n], total[n + 1], out=total[n])
            total[n].baddbmm_(turned[n], total[n + 1])
        after, before = total[1:], states[:-1]
        return after @ before.mT, after, (after * before).sum((-2, -1)), total[0]


def _gated(total, products, beta):
    """(e^{G_i - G_j} for i >= j, else 0; A): [..., C, C] from the sums G, k_i . k_j and beta."""
    size = total.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf)
    decay = gap.exp()
    return decay, (products * decay * beta[..., None]).tril(-1)


def _chunks(x, chunk):
    """[B, T, H, ...] -> [N, B, H, chunk, ...], contiguous: a step of the scan is one block."""
    batch, tokens, heads = x.shape[:3]
    x = x.reshape(batch, tokens // chunk, chunk, heads, *x.shape[3:])
    return x.permute(1, 0, 3, 2, *range(4, x.dim())).contiguous()


def chunked(q, k, v, beta, log_gate, initial=None, chunk=CHUNK, updates=False):
    """(o [B, T, Hv, Dv], final state [B, Hv, Dk, Dv]), and u [B, T, Hv, Dv] with `updates`.

    q, k [B, T, Hk, Dk] normalised, q scaled; v [B, T, Hv, Dv]; beta, log_gate [B, T, Hv]; all of
    one dtype, fp32 or fp64. initial [B, Hv, Dk, Dv] or None for zeros. Any T >= 1: the tail is padded
    with tokens of beta 0 and log_gate 0, which change nothing.
    """
    batch, tokens, k_heads, k_dim = k.shape
    v_heads, v_dim = v.shape[2:]
    shared = v_heads // k_heads
    short = -tokens % chunk
    if short:
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short)) for x in (q, k, v))
        beta, log_gate = (torch.nn.functional.pad(x, (0, 0, 0, short)) for x in (beta, log_gate))
    q, k, v, beta, log_gate = (_chunks(x, chunk) for x in (q, k, v, beta, log_gate))
    count = len(q)

    def per_value_head(x):  # [N, B, Hk, a, b] -> [N, B, Hv, a, b]
        return x.repeat_interleave(shared, dim=2) if shared > 1 else x

    total = log_gate.cumsum(-1)
    decay, lower = _gated(total, per_value_head(k @ k.mT), beta)
    inverse = UnitLowerInverse.apply(lower)
    k_all = per_value_head(k)
    own = inverse @ (v * beta[..., None])
    seen = inverse @ (k_all * (beta * total.exp())[..., None])
    k_left = (k_all * (total[..., -1:] - total).exp()[..., None]).mT
    if initial is None:
        initial = v.new_zeros(batch, v_heads, k_dim, v_dim)
    flat = batch * v_heads
    states = DecayScan.apply(-(k_left @ seen).view(count, flat, k_dim, k_dim),
                             (k_left @ own).view(count, flat, k_dim, v_dim),
                             total[..., -1].exp().view(count, flat),
                             initial.reshape(flat, k_dim, v_dim))
    before = states[:-1].view(count, batch, v_heads, k_dim, v_dim)
    update = own - seen @ before
    out = (per_value_head(q) @ before) * total.exp()[..., None]
    out = out + (per_value_head(q @ k.mT) * decay) @ update

    def by_token(x):  # [N, B, Hv, chunk, Dv] -> [B, T, Hv, Dv]
        return x.permute(1, 0, 3, 2, 4).reshape(batch, -1, v_heads, v_dim)[:, :tokens]

    last = states[-1].view(batch, v_heads, k_dim, v_dim)
    return (by_token(out), last, by_token(update)) if updates else (by_token(out), last)


def recurrent(q, k, v, beta, log_gate, initial=None):
    """The same token by token, for tests: the first equation of this file and nothing else."""
    shared = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    state = initial
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    out = []
    for t in range(v.shape[1]):
        state = state * log_gate[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, dim=1), state
