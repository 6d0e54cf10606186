"""A verified snapshot as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sparsegdn_client._stubs import prefill_pb2 as pb
from sparsegdn_client._stubs import xxh3_64
from sparsegdn_client.errors import IntegrityError, PrefillError
from sparsegdn_client.types import enum_value, enum_word

FORMAT_VERSION = 1
MAX_TENSORS = 1 << 20

# numpy has neither bf16 nor fp8: their bits are kept in an unsigned integer of the same size.
STORAGE = {"fp32": np.dtype("<f4"), "bf16": np.dtype("<u2"), "fp8_e4m3": np.dtype("u1"),
           "int32": np.dtype("<i4")}

KINDS = tuple(name.removeprefix("TENSOR_KIND_").lower() for name in pb.TensorKind.keys()[1:])
STATE_KINDS = ("recurrent_state", "recurrent_state_scale", "conv_state", "key", "value")


def bf16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Exact: bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def fp8_e4m3_to_float32(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """E4M3 without infinities: bias 7, largest 448, 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9,
                         (8 + mantissa) * 2.0 ** (exponent - 10.0))
    table = np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)
    table[[0x7F, 0xFF]] = np.nan
    return table[bits]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a manifest; `position` is the tokens a state has seen, or KV's first row."""

    name: str
    kind: str
    layer: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    position: int
    state_layout: str = ""
    conv_layout: str = ""

    @staticmethod
    def from_proto(proto: Any) -> TensorInfo:
        return TensorInfo(
            name=proto.name,
            kind=enum_word(pb.TensorKind, "TENSOR_KIND_", proto.kind),
            layer=proto.layer,
            dtype=enum_word(pb.DType, "DTYPE_", proto.dtype),
            shape=tuple(proto.shape),
            bytes=proto.bytes,
            position=proto.position,
            state_layout=enum_word(pb.StateLayout, "STATE_LAYOUT_", proto.state_layout),
            conv_layout=enum_word(pb.ConvLayout, "CONV_LAYOUT_", proto.conv_layout),
        )

    def to_proto(self) -> Any:
        return pb.TensorInfo(
            name=self.name,
            kind=enum_value(pb.TensorKind, "TENSOR_KIND_", self.kind),
            layer=self.layer,
            dtype=enum_value(pb.DType, "DTYPE_", self.dtype),
            shape=self.shape,
            state_layout=enum_value(pb.StateLayout, "STATE_LAYOUT_", self.state_layout or None),
            conv_layout=enum_value(pb.ConvLayout, "CONV_LAYOUT_", self.conv_layout or None),
            bytes=self.bytes,
            position=self.position,
        )


def _invalid(field: str, message: str) -> IntegrityError:
    return IntegrityError("MANIFEST_INVALID", f"manifest: {field} {message}", field=field)


def _check_tensor(info: TensorInfo, field: str) -> None:
    legal = all(0x20 < ord(c) < 0x7F and c not in '"\\' for c in info.name)
    if not 0 < len(info.name) < 256 or not legal or info.name == "__metadata__":
        raise _invalid(f"{field}.name", "must be 1..255 printable characters")
    if info.kind not in KINDS:
        raise _invalid(f"{field}.kind", f"= {info.kind or 0} is unknown")
    if info.kind == "recurrent_state" and info.state_layout not in ("key_major", "value_major"):
        raise _invalid(f"{field}.state_layout", f"= {info.state_layout or 0} is unknown")
    if info.kind == "conv_state" and info.conv_layout not in ("four_columns", "three_columns"):
        raise _invalid(f"{field}.conv_layout", f"= {info.conv_layout or 0} is unknown")
    if info.position < 0:
        raise _invalid(f"{field}.position", "must be >= 0")
    if info.dtype not in STORAGE or len(info.shape) > 8 or any(d < 0 for d in info.shape):
        raise _invalid(field, "has an unknown dtype or an absurd shape")
    elements = 1
    for dim in info.shape:
        elements *= dim
    expected = elements * STORAGE[info.dtype].itemsize
    if expected != info.bytes:
        raise _invalid(f"{field}.bytes", f"= {info.bytes}, must be {expected} as shape and dtype say")


def check_manifest(
    version: int, position: int, infos: Sequence[TensorInfo], total_bytes: int, max_bytes: int
) -> None:
    """Raises IntegrityError unless the manifest is sound, PrefillError when it is too large."""
    if version != FORMAT_VERSION:
        raise _invalid("format_version", f"= {version}, must be {FORMAT_VERSION}")
    if position < 0:
        raise _invalid("position", "must be >= 0")
    if len(infos) > MAX_TENSORS:
        raise _invalid("tensors", f"has {len(infos)} entries, at most {MAX_TENSORS}")
    names: set[str] = set()
    for i, info in enumerate(infos):
        _check_tensor(info, f"tensors[{i}]")
        if info.name in names:
            raise _invalid(f"tensors[{i}].name", f'repeats "{info.name}"')
        names.add(info.name)
    total = sum(info.bytes for info in infos)
    if total != total_bytes:
        raise _invalid("total_bytes", f"= {total_bytes}, the tensors have {total}")
    if total > max_bytes:
        raise PrefillError(
            "RESOURCE_EXHAUSTED",
            f"manifest: total_bytes = {total}, this client takes at most {max_bytes}",
            field="total_bytes",
            reason="SNAPSHOT_TOO_LARGE",
        )


def digest_of(hashes: Sequence[int]) -> int:
    """XXH3-64 over whole-tensor hashes, 8 bytes little endian each, manifest order."""
    return xxh3_64(b"".join(h.to_bytes(8, "little") for h in hashes))


class Snapshot(Mapping[str, np.ndarray]):
    """Maps tensor names to arrays in the dtype and layout that was asked for, in manifest order.

    bf16 is uint16 and fp8 is uint8 here; `state`, `conv_state`, `key` and `value` convert to
    float32 in one layout, whatever the stream carried.
    """

    def __init__(
        self,
        model_identity: str,
        position: int,
        infos: Sequence[TensorInfo],
        arrays: Sequence[np.ndarray],
        hashes: Sequence[int] | None = None,
    ) -> None:
        """`arrays[i]` must have the shape and storage dtype of `infos[i]`; `hashes[i]` is the
        XXH3-64 of its bytes, computed unless given."""
        check_manifest(FORMAT_VERSION, position, infos, sum(i.bytes for i in infos), 1 << 63)
        if len(arrays) != len(infos):
            raise ValueError(f"{len(arrays)} arrays, must be {len(infos)}")
        for info, array in zip(infos, arrays):
            if array.shape != info.shape or array.dtype != STORAGE[info.dtype]:
                raise ValueError(
                    f"{info.name} is {array.dtype}{array.shape}, must be "
                    f"{STORAGE[info.dtype]}{info.shape}"
                )
        self.model_identity = model_identity
        self.format_version = FORMAT_VERSION
        self.position = position
        self.infos: dict[str, TensorInfo] = {info.name: info for info in infos}
        self._arrays = {i.name: np.ascontiguousarray(a) for i, a in zip(infos, arrays)}
        if hashes is None:
            hashes = [xxh3_64(a.reshape(-1).view(np.uint8)) for a in self._arrays.values()]
        self.hashes = dict(zip(self._arrays, hashes, strict=True))
        self.digest = digest_of(list(self.hashes.values()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        size = sum(info.bytes for info in self.infos.values())
        return f"Snapshot(position={self.position}, tensors={len(self)}, bytes={size})"

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor widened to float32, in the shape of the stream; fp8 is scaled."""
        info, array = self.infos[name], self[name]
        if info.dtype == "bf16":
            return bf16_to_float32(array)
        if info.dtype == "fp8_e4m3":
            return fp8_e4m3_to_float32(array) * self[f"{name}_scale"][..., np.newaxis]
        return array.astype(np.float32)

    def _name(self, layer: int, what: str, position: int | None) -> str:
        prefix = "" if position in (None, self.position) else f"checkpoints.{position}."
        name = f"{prefix}layers.{layer}.{what}"
        if name not in self.infos:
            raise KeyError(f"the snapshot has no {name}; it has {', '.join(list(self)[:8])}, ...")
        return name

    def state(self, layer: int, position: int | None = None) -> npt.NDArray[np.float32]:
        """Recurrent state [Hv, Dk, Dv] (key-major, as in transformers), at a checkpoint if given."""
        name = self._name(layer, "recurrent_state", position)
        values = self.float32(name)
        if self.infos[name].state_layout == "value_major":
            values = values.transpose(0, 2, 1)
        return np.ascontiguousarray(values)

    def conv_state(self, layer: int, position: int | None = None) -> npt.NDArray[np.float32]:
        """Convolution state [C, 4], channels q|k|v, oldest first; of three columns the oldest,
        which no later step reads, comes back as zero."""
        name = self._name(layer, "conv_state", position)
        values = self.float32(name)
        if self.infos[name].conv_layout == "three_columns":
            values = np.pad(values, ((0, 0), (1, 0)))
        return values

    def key(self, layer: int) -> npt.NDArray[np.float32]:
        """Attention keys [T, Nkv, D] after norm and RoPE."""
        return self.float32(self._name(layer, "key", None))

    def value(self, layer: int) -> npt.NDArray[np.float32]:
        """Attention values [T, Nkv, D]."""
        return self.float32(self._name(layer, "value", None))

    def layers(self, kind: str) -> list[int]:
        """Layers with a tensor of this kind at the snapshot's own position."""
        return sorted(
            info.layer
            for name, info in self.infos.items()
            if info.kind == kind and name.startswith("layers.")
        )

    def importable(self) -> list[str]:
        """Names of the tensors that an import sends: no logits, no checkpoints."""
        return [
            name
            for name, info in self.infos.items()
            if info.kind in STATE_KINDS and not name.startswith("checkpoints.")
        ]

    def joined(self, base: Snapshot) -> Snapshot:
        """This snapshot with the KV rows of `base` before its own.

        A call with `resume_from` streams the rows of its own tokens only; a cache or an import needs
        them from position 0. `base` is the snapshot that the call resumed from.
        """
        infos, arrays = [], []
        for name, info in self.infos.items():
            array = self[name]
            if info.kind in ("key", "value") and info.position > 0:
                before = base.infos.get(name)
                ends_here = before is not None and before.position + before.shape[0] == info.position
                if before is None or not ends_here or before.dtype != info.dtype:
                    raise ValueError(f"{name} from position {info.position} does not continue base")
                array = np.concatenate([base[name], array])
                info = replace(
                    info, shape=array.shape, bytes=array.nbytes, position=before.position
                )
            infos.append(info)
            arrays.append(array)
        return Snapshot(self.model_identity, self.position, infos, arrays)
