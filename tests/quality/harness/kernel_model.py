"""Controls: a needle-gdn kind of model in numpy around the kernels of libsparsegdn.so.

The wire offers no selector that is meant to fail, the C ABI takes any mask. The graph is that of
tests/quality/train/model.py for GDN layers alone; under the mask that the library selects itself it
gives what the server gives (harness_test.py).
"""

import importlib.util
import json
import os
import pathlib

import numpy as np

from tasks import example as example_module

_EPS = 1e-6
_PREFIX = "model.language_model."
_KEEP_LAST = 64


def _example_module(root):
    path = root / "examples/python_ctypes.py"
    spec = importlib.util.spec_from_file_location("python_ctypes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_tensors(folder):
    """{name: float32 array} of a folder with one shard of BF16 and F32 tensors."""
    path, = pathlib.Path(folder).glob("*.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + at for at in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            raw = np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16
            value = raw.view(np.float32)
        else:
            value = np.frombuffer(data[begin:end], "<f4")
        tensors[name.removeprefix(_PREFIX)] = value.reshape(entry["shape"])
    return tensors


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _silu(x):
    return x * _sigmoid(x)


def _rms(x):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + _EPS)


def _unit(x):
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + _EPS)


class KernelModel:
    """logits() of a folder whose layers are all linear_attention."""

    def __init__(self, library, folder, threads=0):
        root = pathlib.Path(__file__).resolve().parents[3]
        self._abi = _example_module(root)
        self._gdn = self._abi.Gdn(os.fspath(library), threads)
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)["text_config"]
        if set(self.config["layer_types"]) != {"linear_attention"}:
            raise ValueError("layer_types: must all be linear_attention")
        self.weights = read_tensors(folder)

    def close(self):
        self._gdn.close()

    def _parts(self, name, x):
        """q, k [T, Hk, D] unit rows, v [T, Hv, D], log_gate, beta [T, Hv]."""
        w, c = self.weights, self.config
        tokens, k_heads = len(x), c["linear_num_key_heads"]
        raw = x @ w[name + "in_proj_qkv.weight"].T
        kernel = w[name + "conv1d.weight"][:, 0]
        padded = np.concatenate([np.zeros((kernel.shape[1] - 1, raw.shape[1]), np.float32), raw])
        conv = sum(padded[j:j + tokens] * kernel[:, j] for j in range(kernel.shape[1]))
        key_dim = k_heads * c["linear_key_head_dim"]
        q, k, v = np.split(_silu(conv), [key_dim, 2 * key_dim], axis=1)
        q, k = (_unit(part.reshape(tokens, k_heads, -1)) for part in (q, k))
        beta = _sigmoid(x @ w[name + "in_proj_b.weight"].T)
        a = x @ w[name + "in_proj_a.weight"].T + w[name + "dt_bias"]
        gate = -np.exp(w[name + "A_log"]) * np.logaddexp(0, a)
        v = v.reshape(tokens, c["linear_num_value_heads"], -1)
        return [np.ascontiguousarray(part, np.float32) for part in (q, k, v, gate, beta)]

    def _core(self, parts, selector, retention, rng):
        """Output of the GDN core under the mask that `selector` makes of the library's own."""
        if selector == "dense":
            return self._gdn.forward(*parts, self._abi.DENSE)[0]
        out, _, mask = self._gdn.forward(*parts, self._abi.RETENTION, retention)
        if selector == "selected":
            return out
        free = len(mask) - _KEEP_LAST
        if selector == "shuffled":
            mask[:free] = mask[rng.permutation(free)]
        else:  # random: as many events for each head pair, anywhere
            for pair in range(mask.shape[1]):
                mask[:free, pair] = mask[rng.permutation(free), pair]
        return self._gdn.forward(*parts, self._abi.RETENTION, retention, mask=mask)[0]

    def logits(self, tokens, selector, retention=1.0, seed=0):
        """[T, V]. selector: dense, selected (the library's), random or shuffled."""
        w, rng = self.weights, np.random.default_rng(seed)
        x = w["embed_tokens.weight"][tokens]
        for layer in range(len(self.config["layer_types"])):
            name = f"layers.{layer}."
            normed = _rms(x) * (1 + w[name + "input_layernorm.weight"])
            mixer = name + "linear_attn."
            out = self._core(self._parts(mixer, normed), selector, retention, rng)
            z = (normed @ w[mixer + "in_proj_z.weight"].T).reshape(out.shape)
            out = _rms(out) * w[mixer + "norm.weight"] * _silu(z)
            x = x + out.reshape(len(x), -1) @ w[mixer + "out_proj.weight"].T
            normed = _rms(x) * (1 + w[name + "post_attention_layernorm.weight"])
            hidden = _silu(normed @ w[name + "mlp.gate_proj.weight"].T)
            hidden = hidden * (normed @ w[name + "mlp.up_proj.weight"].T)
            x = x + hidden @ w[name + "mlp.down_proj.weight"].T
        return _rms(x) * (1 + w["norm.weight"]) @ w["lm_head.weight"].T

    def score(self, example, selector, retention, seed=0):
        """(score, NLL of the prompt) of an Example, teacher-forced: one pass for all answers."""
        logits = self.logits(example.tokens, selector, retention, seed).astype(np.float64)
        predicted = np.full(len(example.tokens), -1)
        predicted[1:] = logits[:-1].argmax(axis=1)
        prompt = len(example.prompt)
        logits = logits[:prompt - 1] - logits[:prompt - 1].max(axis=1, keepdims=True)
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        nll = -logp[np.arange(prompt - 1), example.tokens[1:prompt]].mean()
        return example_module.score_teacher_forced(example, predicted), float(nll)
