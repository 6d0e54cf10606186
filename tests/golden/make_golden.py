#!/usr/bin/env python3
"""Writes the golden fixtures of the bundled models: what transformers computes in fp32.

    make_golden.py [OUT_DIR]        (default: this folder)

Needs torch, transformers (with Qwen3.5) and safetensors. The models of tests/data/models run in
fp32, eager attention, with the torch form of the delta rule: fla and causal_conv1d must not be
importable. Fixtures are safetensors files:

  MODEL-N.safetensors        ids [N]; rows [R]: the rows kept of every activation; activations
                             layers.I.NAME [R, cols] under the names of Qwen35Graph's probe;
                             logits [R, V]; after N tokens states.I.recurrent [Hv, Dk, Dv],
                             states.I.conv [C, 4], kv.I.key and kv.I.value [N, Nkv, D]
  MODEL-round-a-log.safetensors  ids, rows, log_gate and logits with A_log and linear_attn.norm
                             rounded to bf16, as a bf16 load does
  MODEL-continuation.safetensors ids [N]; states and kv after N - 1 tokens; greedy [32] tokens and
                             logits [32, V] of decoding one by one from there with the cache;
                             final.I.recurrent of the last linear layer after N + 31 tokens
"""

import importlib.util
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

HERE = pathlib.Path(__file__).resolve().parent
MODELS = HERE.parent / "data" / "models"
ROWS = {70: [0, 1, 2, 3, 31, 62, 63, 64, 65, 69], 300: [0, 63, 64, 127, 128, 255, 298, 299]}
GREEDY_TOKENS = 32
PROMPT_TOKENS = 130


def token_ids(count, vocab, seed):
    """A fixed sequence, the same in any language: a linear congruential generator."""
    ids, state = [], seed
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append((state >> 8) % vocab)
    return torch.tensor([ids])


class Recorder:
    """Collects activations by the names of the C++ probe while a model runs."""

    def __init__(self, model):
        self.found, self.layer, self.undo = {}, None, []
        for index, layer in enumerate(model.model.layers):
            self.hook(layer.register_forward_pre_hook, self.enter(index), with_kwargs=True)
            self.hook(layer.register_forward_hook, self.after(index, "output"))
            self.hook(layer.input_layernorm.register_forward_hook, self.after(index, "input_norm"))
            norm = layer.post_attention_layernorm
            self.hook(norm.register_forward_pre_hook, self.before(index, "after_mixer"))
            self.hook(norm.register_forward_hook, self.after(index, "post_norm"))
            self.hook(layer.mlp.down_proj.register_forward_pre_hook, self.before(index, "swiglu"))
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            out = mixer.out_proj if hasattr(layer, "linear_attn") else mixer.o_proj
            parts = (["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
                     if hasattr(layer, "linear_attn") else ["q_proj", "k_proj", "v_proj"])
            self.hook(out.register_forward_pre_hook, self.before(index, "mixer_out"))
            for part in parts:
                self.hook(getattr(mixer, part).register_forward_hook,
                          self.after(index, f"projections.{part}"))
        self.hook(model.model.norm.register_forward_hook, self.after(-1, "final_norm"))
        self.patch("torch_chunk_gated_delta_rule", self.core)
        self.patch("apply_rotary_pos_emb", self.rope)

    def hook(self, register, function, **kwargs):
        self.undo.append(register(function, **kwargs).remove)

    def patch(self, name, wrapper):
        original = getattr(qwen, name)
        setattr(qwen, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
        self.undo.append(lambda: setattr(qwen, name, original))

    def close(self):
        for undo in self.undo:
            undo()

    def put(self, index, name, value):
        self.found[f"layers.{index}.{name}"] = value.reshape(value.shape[1], -1).clone()

    def enter(self, index):
        def run(_, args, kwargs):
            self.layer = index
            self.put(index, "input", args[0] if args else kwargs["hidden_states"])
        return run

    def before(self, index, name):
        return lambda _, args: self.put(index, name, args[0] if args[0].dim() == 3 else args[0][None])

    def after(self, index, name):
        return lambda _, args, out: self.put(index, name, out[0] if isinstance(out, tuple) else out)

    def core(self, original, query, key, value, g, beta, **kwargs):
        repeat = value.shape[2] // (CONFIG.linear_num_key_heads)
        conv = [x.flatten(2) for x in (query[:, :, ::repeat], key[:, :, ::repeat], value)]
        self.put(self.layer, "conv", torch.cat(conv, -1))
        self.put(self.layer, "log_gate", g)
        self.put(self.layer, "beta", beta)
        out = original(query, key, value, g=g, beta=beta, **kwargs)
        self.put(self.layer, "core", out[0])
        return out

    def rope(self, original, q, k, cos, sin, **kwargs):
        q, k = original(q, k, cos, sin, **kwargs)
        self.put(self.layer, "query", q.transpose(1, 2))
        return q, k

    def rows(self, rows):
        """The kept rows, stacked projections joined in the order of the graph."""
        kept, stacks = {}, {}
        for name, value in self.found.items():
            if ".projections." in name:
                stacks.setdefault(name.rsplit(".", 1)[0], []).append(value[rows])
            else:
                kept[name] = value[rows].contiguous()
        return kept | {name: torch.cat(parts, -1) for name, parts in stacks.items()}


class CountingCache(DynamicCache):
    """A cache that counts its tokens: the stock one asks an attention layer, and a pure GDN model
    has none."""

    seen = 0

    def get_seq_length(self, layer_idx=0):
        return self.seen

    def get_mask_sizes(self, query_length, layer_idx=0):
        return self.seen + query_length, 0


def run(model, ids, cache):
    out = model(ids, past_key_values=cache, use_cache=True)
    cache.seen += ids.shape[1]
    return out


def states(cache, prefix="states"):
    found = {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            found[f"{prefix}.{index}.recurrent"] = layer.recurrent_states[0][0].float().clone()
            found[f"{prefix}.{index}.conv"] = layer.conv_states[0][0].clone()
        else:
            for name, value in (("key", layer.keys), ("value", layer.values)):
                found[f"kv.{index}.{name}"] = value[0].transpose(0, 1).clone()
    return found


def save(path, tensors, model_name):
    kept = {name: value.to(torch.int32) if not value.is_floating_point() else value.float()
            for name, value in tensors.items()}
    kept = {name: value.contiguous() for name, value in kept.items()}
    save_file(kept, path, metadata={"model": model_name, "torch": torch.__version__,
                                    "transformers": transformers.__version__})
    path.chmod(0o644)
    print(f"{path.name}: {path.stat().st_size} bytes")


def activations(model, name, out, count):
    ids = token_ids(count, model.config.vocab_size, seed=count)
    recorder, cache = Recorder(model), CountingCache(config=model.config)
    logits = run(model, ids, cache).logits
    recorder.close()
    rows = ROWS[count]
    found = {"ids": ids[0], "rows": torch.tensor(rows), "logits": logits[0, rows]}
    found |= recorder.rows(rows)
    final = states(cache)
    if count > 70:  # one layer's state is enough there
        last = max(key for key in final if key.endswith(".recurrent"))
        final = {key: value for key, value in final.items()
                 if not key.endswith(".recurrent") or key == last}
    save(out / f"{name}-{count}.safetensors", found | final, name)


def rounded(model, name, out):
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            for weight in (layer.linear_attn.A_log, layer.linear_attn.norm.weight):
                weight.copy_(weight.bfloat16().float())
    ids = token_ids(70, model.config.vocab_size, seed=70)
    recorder, cache = Recorder(model), CountingCache(config=model.config)
    logits = run(model, ids, cache).logits
    recorder.close()
    rows = ROWS[70]
    kept = {key: value for key, value in recorder.rows(rows).items() if "log_gate" in key}
    found = {"ids": ids[0], "rows": torch.tensor(rows), "logits": logits[0, rows]} | kept
    save(out / f"{name}-round-a-log.safetensors", found, name)


def continuation(model, name, out):
    ids = token_ids(PROMPT_TOKENS, model.config.vocab_size, seed=7)
    cache = CountingCache(config=model.config)
    run(model, ids[:, :-1], cache)
    found = {"ids": ids[0]} | states(cache)
    token, greedy, logits = ids[:, -1:], [], []
    for _ in range(GREEDY_TOKENS):
        step = run(model, token, cache).logits[0, -1]
        token = step.argmax()[None, None]
        logits.append(step)
        greedy.append(int(token))
    final = {key: value for key, value in states(cache, "final").items() if "recurrent" in key}
    last = max(final)
    found |= {"greedy": torch.tensor(greedy), "logits": torch.stack(logits), last: final[last]}
    save(out / f"{name}-continuation.safetensors", found, name)


def main():
    global CONFIG
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name in ("fla", "causal_conv1d"):
        if importlib.util.find_spec(name) is not None:
            sys.exit(f"{name} is importable: its kernels would be used instead of torch code")
    torch.set_grad_enabled(False)
    for name in ("tiny-hybrid", "tiny-gdn"):
        model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32,
                                                     attn_implementation="eager").eval()
        CONFIG = model.config
        for count in ROWS:
            activations(model, name, out, count)
        if name == "tiny-hybrid":
            continuation(model, name, out)
            rounded(model, name, out)


if __name__ == "__main__":
    main()
