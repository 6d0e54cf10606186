"""Model identity of a checkpoint folder, as the server computes it (docs/snapshot_format.md)."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from pathlib import Path
from typing import Any, Iterator

_OLD_PREFIX = "model.language_model."
_LINEAR = (
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "in_proj_b.weight",
    "in_proj_a.weight",
    "conv1d.weight",
    "A_log",
    "dt_bias",
    "norm.weight",
    "out_proj.weight",
)
_FULL = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "q_norm.weight",
    "k_norm.weight",
)
_EVERY_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def _layer_types(text: dict[str, Any]) -> list[str]:
    if text.get("layer_types") is not None:
        return list(text["layer_types"])
    interval = text.get("full_attention_interval", 4)
    return [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention"
        for i in range(text["num_hidden_layers"])
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "%.17g" % value
    return ",".join(value) if isinstance(value, list) else str(value)


def _config_lines(config: dict[str, Any]) -> tuple[str, list[str], bool]:
    """The text configuration as the identity hashes it; layer types; tied embeddings."""
    text = config.get("text_config", config)
    rope: dict[str, Any] = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    for source in (text, text.get("rope_scaling") or {}, text.get("rope_parameters") or {}):
        rope.update({k: source[k] for k in rope if source.get(k) is not None})
    outer = config.get("tie_word_embeddings")
    tied = text.get("tie_word_embeddings")
    tied = bool(outer) if tied is None else bool(tied)
    layers = _layer_types(text)
    values = {
        "attention_head_dim": text.get("head_dim", 256),
        "conv_kernel": text.get("linear_conv_kernel_dim", 4),
        "eps": float(text.get("rms_norm_eps", 1e-6)),
        "head_dim_k": text.get("linear_key_head_dim", 128),
        "head_dim_v": text.get("linear_value_head_dim", 128),
        "hidden_size": text["hidden_size"],
        "intermediate_size": text["intermediate_size"],
        "layer_types": layers,
        "num_k_heads": text["linear_num_key_heads"],
        "num_kv_heads": text.get("num_key_value_heads", text["num_attention_heads"]),
        "num_q_heads": text["num_attention_heads"],
        "num_v_heads": text["linear_num_value_heads"],
        "partial_rotary_factor": float(rope["partial_rotary_factor"]),
        "rope_theta": float(rope["rope_theta"]),
        "tie_word_embeddings": tied,
        "vocab_size": text["vocab_size"],
    }
    return "".join(f"{k}={_value(v)}\n" for k, v in sorted(values.items())), layers, tied


def _text_tensors(layers: list[str], tied: bool) -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not tied:
        names.add("lm_head.weight")
    for i, kind in enumerate(layers):
        prefix = f"model.layers.{i}."
        names.update(prefix + name for name in _EVERY_LAYER)
        if kind == "linear_attention":
            names.update(f"{prefix}linear_attn.{name}" for name in _LINEAR)
        else:
            names.update(f"{prefix}self_attn.{name}" for name in _FULL)
    return names


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return sorted(folder.glob("*.safetensors"))


def _entries(shard: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Canonical name, header entry, and the file offset of the data section."""
    with open(shard, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if name.startswith(_OLD_PREFIX):
            name = "model." + name[len(_OLD_PREFIX) :]
        yield name, entry, 8 + length


def check_identity(got: str, expect: str | os.PathLike[str]) -> None:
    """Raises ValueError unless `got` is the identity `expect`, or that of the checkpoint folder
    `expect`, with A_log rounded by the server or not. A folder costs a read of its weights.
    """
    text = os.fspath(expect)
    if re.fullmatch("[0-9a-f]{64}", text):
        wanted = [text]
    else:
        wanted = [compute_model_identity(text)]
        if got not in wanted:
            wanted.append(compute_model_identity(text, round_a_log=True))
    if got not in wanted:
        raise ValueError(
            f"the snapshot is of the model {got}, must be of {wanted[0]}: other weights decode "
            f"garbage from it"
        )


def compute_model_identity(folder: str | os.PathLike[str], *, round_a_log: bool = False) -> str:
    """SHA-256 over text configuration and text tensors: 64 lower-case hex digits.

    Equal to `ModelInfo.model_identity` of a server that runs the same weights, whatever the
    sharding or the name prefix. `round_a_log` is the server's switch (`ModelInfo.round_a_log`).
    Reads every weight once, through mmap.

    Raises:
        OSError: a file cannot be read. ValueError: a text tensor is missing or comes twice.
    """
    root = Path(folder)
    lines, layers, tied = _config_lines(json.loads((root / "config.json").read_text()))
    sha = hashlib.sha256(b"sparsegdn-model-identity-1\n")
    sha.update(lines.encode())
    sha.update(b"round_a_log=true\n" if round_a_log else b"round_a_log=false\n")
    wanted = _text_tensors(layers, tied)
    found: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for shard in _shards(root):
        for name, entry, begin in _entries(shard):
            if name not in wanted:
                continue
            if name in found:
                raise ValueError(f"{folder}: tensor {name} comes twice")
            found[name] = (shard, entry, begin)
    missing = sorted(wanted - found.keys())
    if missing:
        raise ValueError(f"{folder}: {len(missing)} text tensors are missing, first {missing[0]}")
    for name in sorted(found, key=str.encode):
        shard, entry, begin = found[name]
        start, end = entry["data_offsets"]
        shape = ",".join(str(d) for d in entry["shape"])
        sha.update(f"{name}\0{entry['dtype']}\0{shape}\0".encode())
        sha.update((end - start).to_bytes(8, "little"))
        with open(shard, "rb") as file, mmap.mmap(
            file.fileno(), 0, access=mmap.ACCESS_READ
        ) as data, memoryview(data) as view, view[begin + start : begin + end] as tensor:
            sha.update(tensor)
    return sha.hexdigest()
