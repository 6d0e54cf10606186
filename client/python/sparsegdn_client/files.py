"""Snapshots as safetensors files with metadata (docs/snapshot_format.md), in numpy alone."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, Callable

import numpy as np
from google.protobuf import json_format

from sparsegdn_client._stubs import prefill_pb2 as pb
from sparsegdn_client._stubs import xxh3_64
from sparsegdn_client.errors import IntegrityError, SnapshotFileError
from sparsegdn_client.snapshot import STORAGE, Snapshot, TensorInfo, check_manifest
from sparsegdn_client.types import Result

_MAX_HEADER_BYTES = 100_000_000  # as the safetensors reference reader
_FILE_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp8_e4m3": "F8_E4M3", "int32": "I32"}
# Under the metadata's checksum, in this order; an absent key counts as "".
_CHECKSUMMED = tuple(
    f"sparsegdn.{key}"
    for key in ("format_version", "model_identity", "position", "digest", "tensors", "result")
)
_DTYPES = {word: dtype for dtype, word in _FILE_DTYPES.items()}


def _metadata_checksum(metadata: dict[str, Any]) -> str:
    values = "".join(_text(metadata, key) + "\0" for key in _CHECKSUMMED)
    return f"{xxh3_64(values.encode()):016x}"


def _tensor_metadata(info: TensorInfo, digest: int) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "name": info.name,
        "kind": info.kind,
        "layer": info.layer,
        "position": info.position,
        "dtype": _FILE_DTYPES[info.dtype],
        "shape": list(info.shape),
    }
    if info.state_layout:
        meta["state_layout"] = info.state_layout
    if info.conv_layout:
        meta["conv_layout"] = info.conv_layout
    meta["xxh3_64"] = f"{digest:016x}"
    return meta


def _header(snapshot: Snapshot, order: list[TensorInfo], result: Result | None) -> bytes:
    compact = {"separators": (",", ":")}
    metadata = {
        "sparsegdn.format_version": str(snapshot.format_version),
        "sparsegdn.model_identity": snapshot.model_identity,
        "sparsegdn.position": str(snapshot.position),
        "sparsegdn.digest": f"{snapshot.digest:016x}",
        "sparsegdn.tensors": json.dumps(
            [_tensor_metadata(i, snapshot.hashes[n]) for n, i in snapshot.infos.items()], **compact
        ),
    }
    if result is not None and result.proto is not None:
        metadata["sparsegdn.result"] = json.dumps(
            json_format.MessageToDict(result.proto, preserving_proto_field_name=True), **compact
        )
    metadata["sparsegdn.metadata_xxh3_64"] = _metadata_checksum(metadata)
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for info in order:
        header[info.name] = {
            "dtype": _FILE_DTYPES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.bytes],
        }
        offset += info.bytes
    text = json.dumps(header, **compact).encode()
    text += b" " * (-len(text) % 8)  # the data section starts at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _open_unnamed(folder: Path, temporary: Path) -> tuple[int, bool]:
    """A descriptor to write to, and whether `temporary` names it already."""
    try:
        flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
        return os.open(folder, flags, 0o644), False
    except (OSError, AttributeError):  # this file system or system has none
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        return os.open(temporary, flags, 0o644), True


def _write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """A file without a name where the system has them, else a hidden one; fsync; rename."""
    # The rename would put a file in the place of a device, a pipe or a socket: of /dev/null, say.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "is there and is no regular file", str(path))
    folder = path.parent
    temporary = folder / f".{path.name[:200]}.tmp.{os.getpid()}.{secrets.token_hex(4)}"
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    named = False
    try:
        fd, named = _open_unnamed(folder, temporary)
        with os.fdopen(fd, "wb") as file:
            write(file)
            file.flush()
            os.fsync(fd)
            if not named:
                # The folder's descriptor makes Python call linkat, which follows the link.
                os.link(
                    f"/proc/self/fd/{fd}",
                    temporary.name,
                    src_dir_fd=folder_fd,
                    dst_dir_fd=folder_fd,
                    follow_symlinks=True,
                )
                named = True
        os.replace(temporary, path)
        named = False
        try:
            os.fsync(folder_fd)
        except OSError:
            pass  # the file is complete under its name already
    finally:
        os.close(folder_fd)
        if named:
            os.unlink(temporary)


def save_snapshot(
    path: str | os.PathLike[str], snapshot: Snapshot, result: Result | None = None
) -> None:
    """Writes `snapshot`, and the result beside it, atomically. OSError leaves `path` as it was."""
    # Wide elements first, so that every tensor is aligned to its element.
    order = sorted(snapshot.infos.values(), key=lambda i: -STORAGE[i.dtype].itemsize)
    header = _header(snapshot, order, result)

    def write(file: BinaryIO) -> None:
        file.write(header)
        for info in order:
            file.write(memoryview(snapshot[info.name].reshape(-1).view(np.uint8)))

    _write_atomically(Path(path), write)


def _text(metadata: dict[str, Any], key: str) -> str:
    value = metadata.get(key, "")
    return value if isinstance(value, str) else ""


def _parse_tensor(meta: Any, header: dict[str, Any]) -> tuple[TensorInfo, int, int]:
    """Info, begin in the data section, checksum. KeyError, TypeError, ValueError if malformed."""
    entry = header[meta["name"]]
    begin, end = (int(x) for x in entry["data_offsets"])
    # The copies in the metadata are under its checksum.
    if (meta["dtype"], meta["shape"]) != (entry["dtype"], entry["shape"]):
        raise ValueError(f"{meta['name']}: dtype or shape differs from the safetensors entry")
    info = TensorInfo(
        name=meta["name"],
        kind=str(meta["kind"]),
        layer=int(meta["layer"]),
        dtype=_DTYPES.get(entry["dtype"], str(entry["dtype"])),
        shape=tuple(int(d) for d in entry["shape"]),
        bytes=end - begin,
        position=int(meta["position"]),
        state_layout=str(meta.get("state_layout", "")),
        conv_layout=str(meta.get("conv_layout", "")),
    )
    return info, begin, int(meta["xxh3_64"], 16)


class _Reader:
    def __init__(self, path: str | os.PathLike[str], file: BinaryIO, max_bytes: int) -> None:
        self.path, self.file, self.max_bytes = os.fspath(path), file, max_bytes

    def fail(self, why: str) -> SnapshotFileError:
        return SnapshotFileError(f"{self.path} is not a sound snapshot file: {why}")

    def header(self) -> tuple[dict[str, Any], int, int]:
        """The JSON header, where the data section begins, and its size."""
        size = os.fstat(self.file.fileno()).st_size
        prefix = self.file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise self.fail("its header length is out of bounds")
        try:
            header = json.loads(self.file.read(length))
        except (ValueError, RecursionError) as error:
            raise self.fail(f"its header is not JSON ({error})") from None
        if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
            raise self.fail("it has no metadata")
        return header, 8 + length, size - 8 - length

    def tensors(self, header: dict[str, Any]) -> list[tuple[TensorInfo, int, int]]:
        metadata = header["__metadata__"]
        if _metadata_checksum(metadata) != _text(metadata, "sparsegdn.metadata_xxh3_64"):
            raise self.fail("its sparsegdn.* metadata is missing or does not match its checksum")
        try:
            listed = json.loads(_text(metadata, "sparsegdn.tensors"))
            if len(listed) + 1 != len(header):
                raise ValueError("it does not list the tensors of the file")
            parsed = [_parse_tensor(meta, header) for meta in listed]
            version = int(_text(metadata, "sparsegdn.format_version"))
            position = int(_text(metadata, "sparsegdn.position"))
            infos = [info for info, _, _ in parsed]
            check_manifest(version, position, infos, sum(i.bytes for i in infos), self.max_bytes)
        except (KeyError, TypeError, ValueError, RecursionError, IntegrityError) as error:
            raise self.fail(f"sparsegdn.* metadata: {error}") from None
        return parsed

    def read(self) -> tuple[Snapshot, Result | None]:
        header, data_begin, data_bytes = self.header()
        parsed = self.tensors(header)
        end = 0
        for info, begin, _ in sorted(parsed, key=lambda item: (item[1], item[0].bytes)):
            if begin != end:
                raise self.fail(f"gap or overlap at data byte {end}")
            end += info.bytes
        if end != data_bytes:
            raise self.fail(f"the data section has {data_bytes} bytes, the header says {end}")
        arrays = []
        for info, begin, _ in parsed:
            data = np.empty(info.bytes, np.uint8)
            self.file.seek(data_begin + begin)
            if self.file.readinto(memoryview(data)) != info.bytes:  # type: ignore[attr-defined]
                raise self.fail("it ends early")
            arrays.append(data.view(STORAGE[info.dtype]).reshape(info.shape))
        metadata = header["__metadata__"]
        snapshot = Snapshot(
            _text(metadata, "sparsegdn.model_identity"),
            int(_text(metadata, "sparsegdn.position")),
            [info for info, _, _ in parsed],
            arrays,
        )
        for info, _, checksum in parsed:
            if snapshot.hashes[info.name] != checksum:
                raise self.fail(f"tensor {info.name} does not match its checksum")
        if f"{snapshot.digest:016x}" != _text(metadata, "sparsegdn.digest"):
            raise self.fail("its digest does not match")
        return snapshot, self.result(_text(metadata, "sparsegdn.result"))

    def result(self, text: str) -> Result | None:
        if not text:
            return None
        try:
            proto = json_format.Parse(text, pb.Result(), ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise self.fail(f"sparsegdn.result: {error}") from None
        return Result.from_proto(proto)


def load_snapshot_file(
    path: str | os.PathLike[str], *, max_bytes: int = 64 << 30
) -> tuple[Snapshot, Result | None]:
    """Reads and verifies a file of `save_snapshot` or `sparsegdn prefill --out`.

    Raises:
        OSError: it cannot be read. SnapshotFileError: it is something else, or corrupt.
    """
    # Of a pipe without a writer the open alone would wait for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise SnapshotFileError(f"{path} is not a snapshot file: not a regular file")
        return _Reader(path, file, max_bytes).read()


def load_snapshot(path: str | os.PathLike[str], *, max_bytes: int = 64 << 30) -> Snapshot:
    """`load_snapshot_file` without the result."""
    return load_snapshot_file(path, max_bytes=max_bytes)[0]
