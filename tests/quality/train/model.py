"""A Qwen3.5 dense text model in training form; parameter names are those of the checkpoint format.

The same mathematics as transformers' Qwen3_5ForCausalLM (model_test.py compares the logits), with a
chunked delta rule that has a fast backward. Products of weights run in bf16 under autocast, norms,
gates, the residual stream and the delta rule in fp32.
"""

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional

from train import delta_rule

LINEAR, FULL = "linear_attention", "full_attention"
EPS = 1e-6
MAX_POSITION = 262144


@dataclasses.dataclass(frozen=True)
class Config:
    """Fields as in text_config of config.json, defaults those of needle-gdn."""

    layer_types: tuple = (LINEAR,) * 4
    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 512
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7


CONFIGS = {
    "needle-gdn": Config(),
    "needle-hybrid": Config(layer_types=(LINEAR,) * 3 + (FULL,)),
}


# The elementwise chains, apart so that compile_pieces() can fuse each on a GPU.
def _norm(x, weight):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight)


def _conv_silu(x, weight):
    """Causal depthwise conv along T of [B, T, C] with weight [C, 1, W], then SiLU, in fp32."""
    width, tokens = weight.shape[-1], x.shape[1]
    x = functional.pad(x.float(), (0, 0, width - 1, 0))
    out = x[:, :tokens] * weight[:, 0, 0]
    for j in range(1, width):
        out = out + x[:, j:j + tokens] * weight[:, 0, j]
    return functional.silu(out)


def _unit(x, scale):
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) * scale)


def _gates(b, a, a_log, dt_bias):
    """beta and log_gate, fp32."""
    return torch.sigmoid(b.float()), -a_log.exp() * functional.softplus(a.float() + dt_bias)


def _gated_norm(x, weight, z):
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    return x * functional.silu(z.float())


def _swiglu(gate, up):
    return functional.silu(gate) * up


PIECES = ("_norm", "_conv_silu", "_unit", "_gates", "_gated_norm", "_swiglu")


def compile_pieces():
    """Lets torch.compile fuse the elementwise chains of every model of this process."""
    import torch._dynamo as dynamo
    dynamo.config.suppress_errors = True  # a piece that does not compile runs as it is
    for name in PIECES:
        globals()[name] = torch.compile(globals()[name], dynamic=True)
    delta_rule._gated = torch.compile(delta_rule._gated, dynamic=True)


class Norm(nn.Module):
    """RMS norm with zero-centred weight."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return _norm(x, self.weight)


def _linear(rows, columns):
    return nn.Linear(columns, rows, bias=False)


class GatedDeltaNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.key_dim = config.linear_num_key_heads * config.linear_key_head_dim
        self.value_dim = config.linear_num_value_heads * config.linear_value_head_dim
        channels, heads = 2 * self.key_dim + self.value_dim, config.linear_num_value_heads
        self.in_proj_qkv = _linear(channels, config.hidden_size)
        self.in_proj_z = _linear(self.value_dim, config.hidden_size)
        self.in_proj_b = _linear(heads, config.hidden_size)
        self.in_proj_a = _linear(heads, config.hidden_size)
        self.out_proj = _linear(config.hidden_size, self.value_dim)
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(
            torch.zeros(channels, 1, config.linear_conv_kernel_dim))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config.linear_value_head_dim))

    def parts(self, x):
        """(q, k, v, beta, log_gate) as delta_rule.chunked takes them, from x [B, T, H]."""
        config, (batch, tokens, _) = self.config, x.shape
        qkv = _conv_silu(self.in_proj_qkv(x), self.conv1d.weight)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (part.reshape(batch, tokens, -1, config.linear_key_head_dim) for part in (q, k))
        v = v.reshape(batch, tokens, -1, config.linear_value_head_dim)
        gates = _gates(self.in_proj_b(x), self.in_proj_a(x), self.A_log, self.dt_bias)
        return _unit(q, config.linear_key_head_dim ** -0.5), _unit(k, 1.0), v, *gates

    def mix(self, x, out):
        """The layer's output from that of the delta rule, out [B, T, Hv, Dv]."""
        z = self.in_proj_z(x).view_as(out)
        return self.out_proj(_gated_norm(out, self.norm.weight, z).flatten(2))

    def forward(self, x, initial, sparse=None):
        """x [B, T, H], initial [B, Hv, Dk, Dv] or None -> (mixed [B, T, H], final state). sparse: a
        sparsity.Sparsity, or None for a dense pass."""
        q, k, v, beta, log_gate = self.parts(x)
        with torch.autocast(x.device.type, enabled=False):
            if sparse is None:
                out, state = delta_rule.chunked(q, k, v, beta, log_gate, initial)
            else:
                sparse.written.append(beta.mean())
                kept = beta * sparse.mask(beta, k.shape[2])
                out, state = delta_rule.chunked(q, k, v, kept, log_gate, initial)
                own = (q * k).sum(-1).repeat_interleave(v.shape[2] // k.shape[2], dim=2)
                out = out + ((beta - kept) * own)[..., None] * v
        return self.mix(x, out), state


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        heads, kv_heads, dim = (config.num_attention_heads, config.num_key_value_heads,
                                config.head_dim)
        self.q_proj = _linear(heads * dim * 2, config.hidden_size)
        self.k_proj = _linear(kv_heads * dim, config.hidden_size)
        self.v_proj = _linear(kv_heads * dim, config.hidden_size)
        self.o_proj = _linear(config.hidden_size, heads * dim)
        self.q_norm, self.k_norm = Norm(dim), Norm(dim)

    def rotate(self, x, positions):
        """x [B, T, heads, D]; the first partial_rotary_factor D dims turn, in halves."""
        rotary = int(self.config.head_dim * self.config.partial_rotary_factor)
        power = torch.arange(0, rotary, 2, dtype=torch.float32, device=x.device) / rotary
        angle = positions[..., None].float() / self.config.rope_theta ** power
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        first, second, rest = x.split([rotary // 2, rotary // 2, x.shape[-1] - rotary], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def forward(self, x, positions):
        config, (batch, tokens, _) = self.config, x.shape
        q, gate = self.q_proj(x).view(batch, tokens, -1, 2 * config.head_dim).chunk(2, dim=-1)
        k, v = (f(x).view(batch, tokens, -1, config.head_dim) for f in (self.k_proj, self.v_proj))
        q, k = self.rotate(self.q_norm(q), positions), self.rotate(self.k_norm(k), positions)
        repeat = config.num_attention_heads // config.num_key_value_heads
        q, k, v = (part.to(v.dtype).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(repeat, dim=1) for part in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2))
        return self.o_proj(out)


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = _linear(config.intermediate_size, config.hidden_size)
        self.up_proj = _linear(config.intermediate_size, config.hidden_size)
        self.down_proj = _linear(config.hidden_size, config.intermediate_size)

    def forward(self, x):
        return self.down_proj(_swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        self.kind = kind
        self.input_layernorm = Norm(config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = Mlp(config)
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)

    def forward(self, x, positions, initial, sparse=None):
        normed, state = self.input_layernorm(x), None
        if self.kind == LINEAR:
            mixed, state = self.linear_attn(normed, initial, sparse)
        else:
            mixed = self.self_attn(normed, positions)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), state


class Model(nn.Module):
    """Embedding, layers, final norm, output head of its own."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = nn.Parameter(
            torch.zeros(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = Norm(config.hidden_size)
        self.lm_head = _linear(config.vocab_size, config.hidden_size)

    def hidden(self, tokens, positions=None, initial=None, sparse=None):
        """tokens [B, T] -> (normed [B, T, H] fp32, final states [B, linear layers, Hv, Dk, Dv]).

        positions int64 [B, T], by default 0 .. T - 1; only full attention reads them. initial: as
        the final states, or None for zeros. sparse: a sparsity.Sparsity, or None.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = functional.embedding(tokens, self.embed_tokens.weight)
        states, linear = [], 0
        for layer in self.layers:
            first = None
            if layer.kind == LINEAR and initial is not None:
                first = initial[:, linear]
            x, state = layer(x, positions, first, sparse)
            if state is not None:
                states.append(state)
                linear += 1
        return self.norm(x), torch.stack(states, dim=1)

    def logits(self, hidden):
        return self.lm_head(hidden).float()

    def initialise(self, seed):
        """Weights from a seed, drawn on the CPU: the same on every machine.

        The first half of the value heads of a layer starts with a memory that outlasts the longest
        prompt (decay 1e-6 and 1e-5 a token): over the 8K tokens of training a gradient cannot tell
        1e-4 from none, but over 131072 it is everything. The others start between 1e-3 and 0.1.
        Embeddings are wide, branches and head narrow: the residual stream starts near 0.5, which
        keeps the norms from blowing gradients up.
        """
        source = torch.Generator().manual_seed(seed)
        depth = math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if name.endswith(("A_log", "norm.weight")):
                continue
            if name.endswith("dt_bias"):
                rates = torch.tensor([1e-6, 1e-5, 1e-3, 1e-1], dtype=torch.float64)
                rates = rates.repeat_interleave(max(1, len(parameter) // 4))[:len(parameter)]
                parameter.data.copy_(torch.log(torch.expm1(rates)))
                continue
            spread = 0.5 if "embed" in name else parameter.shape[-1] ** -0.5
            if "conv1d" in name:
                spread = 0.3
            elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                spread /= depth
            elif "lm_head" in name:
                spread /= 4
            parameter.data.copy_(torch.randn(parameter.shape, generator=source) * spread)
        return self


def build(name, seed=0):
    """A model of CONFIGS, initialised."""
    return Model(CONFIGS[name]).initialise(seed)
