"""Bridge to Hugging Face transformers: continue a snapshot with `model.generate`.

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    done = client.prefill(ids)                                # snapshot before the last token
    cache = load_into_cache(model, done.snapshot, expect_model=folder)
    full = torch.tensor([ids])
    model.generate(full, attention_mask=torch.ones_like(full), past_key_values=cache,
                   max_new_tokens=32)

`generate` takes the full ids, and a mask, or it would take tokens equal to the pad token for padding.
The cache must be shorter than they are, which "before_last" (the
default) guarantees. Needs a transformers whose DynamicCache holds linear layers itself.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import torch
import transformers
from transformers import DynamicCache

from sparsegdn_client.identity import check_identity
from sparsegdn_client.snapshot import Snapshot


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _check_library() -> None:
    if not all(hasattr(DynamicCache, m) for m in ("update_conv_state", "update_recurrent_state")):
        raise RuntimeError(
            f"transformers {transformers.__version__} is too old: its DynamicCache has no "
            f"update_conv_state and update_recurrent_state, so it cannot hold linear attention "
            f"layers. Install a version that knows Qwen3.5 with the unified DynamicCache (5.17 and "
            f"5.24 are known to work)."
        )


def _decoder_layers(model: Any) -> Any:
    """The text decoder's layers: model.layers, or model.language_model.layers with vision."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    decoder = getattr(decoder, "language_model", decoder)
    return decoder.layers


def _check(snapshot: Snapshot, config: Any) -> None:
    """Shapes and layouts against the model: a wrong one would decode garbage without an error."""
    heads, dk, dv = (
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    channels = 2 * config.linear_num_key_heads * dk + heads * dv
    for layer, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            head_dim = getattr(config, "head_dim", None)
            wanted: dict[str, tuple[int, ...]] = {}
            for what in ("key", "value"):
                wanted[what] = (snapshot.position, config.num_key_value_heads, head_dim)
        else:
            by_value = snapshot.infos.get(f"layers.{layer}.recurrent_state")
            transposed = by_value is not None and by_value.state_layout == "value_major"
            wanted = {
                "recurrent_state": (heads, dv, dk) if transposed else (heads, dk, dv),
                "conv_state": (channels, config.linear_conv_kernel_dim),
            }
        for what, shape in wanted.items():
            info = snapshot.infos.get(f"layers.{layer}.{what}")
            if info is None:
                raise ValueError(
                    f"the snapshot has no layers.{layer}.{what}, which this model needs: request "
                    f"state, conv_state and kv"
                )
            first = 0 if what in ("key", "value") else snapshot.position
            if info.position != first:
                raise ValueError(
                    f"{info.name} is at position {info.position}, must be {first}: put the rows of "
                    f"the snapshot it continues before it, tail.joined(base)"
                )
            got = info.shape
            if info.conv_layout == "three_columns":
                got = (got[0], got[1] + 1)
            if got != shape:
                raise ValueError(f"{info.name} has shape {list(got)}, the model needs {list(shape)}")


def _tensor(values: np.ndarray, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).unsqueeze(0).to(device=like.device, dtype=dtype)


class CountingCache(DynamicCache):
    """A DynamicCache that counts its tokens itself.

    The stock one asks an attention layer for the length; a model of linear layers alone has none,
    and the stock cache raises.
    """

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer: `generate` of 5.24 cuts off the cached ids of no other cache."""
        return [False] * len(self.layers)

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._seen = 0
        self._rows = 0

    def update_conv_state(self, conv_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx == 0:
            self._rows = conv_states.shape[-1]
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        if layer_idx == 0:
            # A single-token step changes the conv state in place, without the call above.
            self._seen += self._rows or 1
            self._rows = 0
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def start_at(self, position: int) -> None:
        self._seen, self._rows = position, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._seen + query_length, 0


def load_into_cache(
    model: Any, snapshot: Snapshot, *, expect_model: str | os.PathLike[str] | None = None
) -> DynamicCache:
    """A DynamicCache of batch 1 that holds `snapshot`, for `model` to continue from.

    Works for the text-only class (Qwen3_5ForCausalLM) and the conditional-generation class, for
    any state dtype and layout of the stream. Keys, values and conv states take the layer's dtype
    and device, recurrent states stay fp32.

    Args:
        model: a transformers Qwen3.5 model.
        snapshot: with states, conv states and, for hybrids, KV from position 0.
        expect_model: the identity that the snapshot must be of, 64 hex digits, or the folder that
            `model` was loaded from, whose weights are then read once. Without it only shapes are
            checked, and a snapshot of another model of the same shapes decodes garbage.

    Raises:
        RuntimeError: transformers is too old. ValueError: the snapshot does not fit the model,
            or is not of `expect_model`.
    """
    _check_library()
    if expect_model is not None:
        check_identity(snapshot.model_identity, expect_model)
    config = _text_config(model)
    _check(snapshot, config)
    hybrid = "full_attention" in config.layer_types
    cache = DynamicCache(config=config) if hybrid else CountingCache(config)
    layers = _decoder_layers(model)
    for layer, kind in enumerate(config.layer_types):
        like = next(layers[layer].parameters())
        if kind == "full_attention":
            # [T, Nkv, D] on the wire, [1, Nkv, T, D] here.
            key = _tensor(np.ascontiguousarray(snapshot.key(layer).transpose(1, 0, 2)), like, like.dtype)
            value = _tensor(
                np.ascontiguousarray(snapshot.value(layer).transpose(1, 0, 2)), like, like.dtype
            )
            cache.update(key, value, layer)
        else:
            cache.update_conv_state(_tensor(snapshot.conv_state(layer), like, like.dtype), layer)
            cache.update_recurrent_state(
                _tensor(snapshot.state(layer), like, torch.float32), layer
            )
            # 5.25 counts tokens in linear layers too, here the columns of the conv state.
            count = getattr(cache.layers[layer], "cumulative_length_linear", None)
            if count is not None:
                count.fill_(snapshot.position)
    if isinstance(cache, CountingCache):
        cache.start_at(snapshot.position)
    # A multimodal prompt before this one leaves position offsets that text must not inherit.
    inner = getattr(model, "model", None)
    if getattr(inner, "rope_deltas", None) is not None:
        inner.rope_deltas = None
    return cache
