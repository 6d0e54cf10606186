"""A training model run sparsely: window by window, mask, masked delta rule, self term."""

import torch

from study import budget, scores
from train import delta_rule
from train import model as model_module


class Sparse:
    """Runs `model` with the events that `name` scores highest.

    retention: one share, or one per GDN layer; 1 leaves a layer dense. weights: {GDN layer: [Hk,
    features]} of the learned score. watch(layer, window): called for every window with its Window.
    """

    def __init__(self, model, name, retention, *, keep_last=64, self_term=True, spread=True,
                 weights=None, watch=None, seed=0):
        self.model, self.score = model, scores.SCORES[name]
        kinds = [layer.kind for layer in model.layers]
        linear = kinds.count(model_module.LINEAR)
        self.retention = retention if isinstance(retention, (list, tuple)) else [retention] * linear
        self.keep_last, self.self_term, self.spread = keep_last, self_term, spread
        self.weights, self.watch, self.seed = weights or {}, watch, seed
        self.taken = [None] * linear  # share of events per GDN layer, [Hk]

    def _mix(self, layer, index, x):
        parts = layer.parts(x)
        with torch.autocast(x.device.type, enabled=False):
            out = self._core(index, *parts)
        return layer.mix(x, out)

    def _core(self, index, q, k, v, beta, log_gate):
        """The masked delta rule of one layer, [B, T, Hv, Dv]."""
        batch, tokens, pairs, k_dim = k.shape
        heads = v.shape[2]
        state = v.new_zeros(batch, heads, k_dim, v.shape[3])
        before = k.new_zeros(batch, 64, pairs, k_dim)
        generator = torch.Generator(v.device).manual_seed(self.seed * 1000 + index)
        out, taken = torch.empty_like(v), torch.zeros(pairs, dtype=torch.float64, device=v.device)
        for start in range(0, tokens, budget.WINDOW):
            part = slice(start, min(start + budget.WINDOW, tokens))
            w = scores.Window(q[:, part], k[:, part], v[:, part], beta[:, part], log_gate[:, part],
                              before, state, generator, self.weights.get(index))
            if self.watch:
                self.watch(index, w)
            mask = torch.ones(w.k.shape[:3], dtype=torch.bool, device=v.device)
            free = min(part.stop, tokens - self.keep_last) - start
            if free > 0 and self.retention[index] < 1:
                mask[:, :free] = budget.select(self.score(w)[:, :free], self.retention[index],
                                               self.spread)
            taken += mask.sum((0, 1))
            wide = mask.repeat_interleave(heads // pairs, dim=2)
            kept = w.beta * wide
            out[:, part], state = delta_rule.chunked(w.q, w.k, w.v, kept, w.log_gate, state)
            if self.self_term:
                own = (w.q * w.k).sum(-1).repeat_interleave(heads // pairs, dim=2)
                out[:, part] += ((w.beta - kept) * own)[..., None] * w.v
            before = torch.cat([before, w.k], dim=1)[:, -64:]
        self.taken[index] = taken / (batch * tokens)
        return out

    @torch.no_grad()
    def hidden(self, tokens):
        """tokens [B, T] -> [B, T, H], as Model.hidden."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = torch.nn.functional.embedding(tokens, self.model.embed_tokens.weight)
        linear = 0
        for layer in self.model.layers:
            normed = layer.input_layernorm(x)
            if layer.kind == model_module.LINEAR:
                with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                    mixed = self._mix(layer.linear_attn, linear, normed)
                linear += 1
            else:
                with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                    mixed = layer.self_attn(normed, positions)
            x = x + mixed
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)
