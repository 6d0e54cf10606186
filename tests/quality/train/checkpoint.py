"""Checkpoint folders in the format of Qwen3.5: config.json, one bf16 shard, its index."""

import dataclasses
import hashlib
import json
import os

import torch
from safetensors.torch import load_file, save_file

from train import model as model_module

PREFIX = "model.language_model."
SHARD = "model.safetensors-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


def _kept_fp32(name):
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


def _stored(name):
    return name if name.startswith("lm_head.") else PREFIX + name


def _text_config(config):
    rotary = int(config.head_dim * config.partial_rotary_factor) // 2
    third = rotary // 3
    return {
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_value_head_dim": config.linear_value_head_dim,
        "max_position_embeddings": model_module.MAX_POSITION,
        "model_type": "qwen3_5_text",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": len(config.layer_types),
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": model_module.EPS,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [rotary - 2 * third, third, third],
            "partial_rotary_factor": config.partial_rotary_factor,
            "rope_theta": int(config.rope_theta),
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def save(model, folder):
    """Writes the folder; returns the bytes of its tensors."""
    os.makedirs(folder, exist_ok=True)
    tensors = {}
    for name, value in model.state_dict().items():
        dtype = torch.float32 if _kept_fp32(name) else torch.bfloat16
        tensors[_stored(name)] = value.detach().cpu().to(dtype).contiguous()
    total = sum(value.nbytes for value in tensors.values())
    save_file(tensors, os.path.join(folder, SHARD), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": _text_config(model.config),
        "tie_word_embeddings": False,
    }
    index = {"metadata": {"total_size": total},
             "weight_map": {name: SHARD for name in sorted(tensors)}}
    for name, value in (("config.json", config), (INDEX, index)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
    return total


def load(folder, config):
    """The folder's weights in a training model of `config`, widened to fp32."""
    tensors = load_file(os.path.join(folder, SHARD))
    model = model_module.Model(config)
    model.load_state_dict({name.removeprefix(PREFIX): value.float()
                           for name, value in tensors.items()})
    return model


@dataclasses.dataclass(frozen=True)
class Start:
    """Weights that a run starts from, and the SHA-256 of their file."""

    weights: dict
    digest: str


def start_of(folder, config):
    with open(os.path.join(folder, SHARD), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Start(load(folder, config).state_dict(), digest)
