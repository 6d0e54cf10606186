"""Reassembles a stream of chunks into a verified snapshot; knows no gRPC."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Sequence

import numpy as np

from sparsegdn_client._stubs import RunningHash, xxh3_64
from sparsegdn_client.errors import IntegrityError, PrefillError
from sparsegdn_client.shared import map_tensors
from sparsegdn_client.snapshot import STORAGE, Snapshot, TensorInfo, check_manifest


_ALIGN = 64


class _Part:
    """One tensor's bytes, the ranges of them that have come, and the hash so far."""

    def __init__(self, info: TensorInfo, data: np.ndarray) -> None:
        self.info = info
        self.data = data
        self.view = memoryview(data)
        self.begins: list[int] = []  # received [begin, end), sorted, merged
        self.ends: list[int] = []
        self._hashed = 0
        self._whole_hash: int | None = None
        self._running: RunningHash | None = None

    def insert(self, begin: int, end: int) -> bool:
        """False when a byte of [begin, end) is there already."""
        i = bisect_left(self.begins, begin)
        if i < len(self.begins) and self.begins[i] < end:
            return False
        if i > 0 and self.ends[i - 1] > begin:
            return False
        joins_next = i < len(self.begins) and self.begins[i] == end
        if i > 0 and self.ends[i - 1] == begin:
            self.ends[i - 1] = end
            if joins_next:
                self.ends[i - 1] = self.ends[i]
                del self.begins[i], self.ends[i]
        elif joins_next:
            self.begins[i] = begin
        else:
            self.begins.insert(i, begin)
            self.ends.insert(i, end)
        return True

    def hash_range(self, begin: int, end: int, value: int) -> None:
        """Takes the hash on over [begin, end), whose own hash is `value`, while it is in the cache;
        not where ranges come out of order."""
        if begin == 0 and end == self.info.bytes:
            self._whole_hash = value
        elif begin == self._hashed:
            self._running = self._running or RunningHash()
            self._running.update(self.view[begin:end])
            self._hashed = end

    def hash(self) -> int:
        """XXH3-64 of the whole tensor."""
        if self._whole_hash is not None:
            return self._whole_hash
        if self._running is None:
            return xxh3_64(self.view)
        if self._hashed < self.info.bytes:
            self._running.update(self.view[self._hashed :])
            self._hashed = self.info.bytes
        return self._running.intdigest()

    @property
    def whole(self) -> bool:
        return not self.info.bytes or (self.begins == [0] and self.ends == [self.info.bytes])

    def array(self) -> np.ndarray:
        return self.data.view(STORAGE[self.info.dtype]).reshape(self.info.shape)


def _buffers(infos: Sequence[TensorInfo]) -> list[np.ndarray]:
    """Room for each tensor in one allocation: numpy asks for huge pages from 4 MiB on, and most of
    what a first touch of 4 KiB pages costs is saved."""
    begins, total = [], 0
    for info in infos:
        begins.append(total)
        total += -(-info.bytes // _ALIGN) * _ALIGN
    data = np.empty(total, np.uint8)
    return [data[b : b + info.bytes] for b, info in zip(begins, infos)]


class Assembler:
    """One snapshot in the making. After an error it must be dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._manifest: Any = None
        self._parts: list[_Part] = []
        self._shared = False
        self.bytes_done = 0
        self.bytes_total = 0

    def set_manifest(self, manifest: Any, *, allow_shared: bool = False) -> None:
        """A manifest with shared_memory is refused unless `allow_shared`: it was not asked for."""
        if self._manifest is not None:
            raise IntegrityError("MANIFEST_REPEATED", "a second manifest came", field="manifest")
        infos = [TensorInfo.from_proto(tensor) for tensor in manifest.tensors]
        check_manifest(
            manifest.format_version, manifest.position, infos, manifest.total_bytes, self._max_bytes
        )
        self._shared = manifest.HasField("shared_memory")
        if self._shared and not allow_shared:
            raise IntegrityError("MANIFEST_INVALID", "shared_memory was not asked for",
                                 field="shared_memory")
        try:
            buffers = map_tensors(manifest) if self._shared else _buffers(infos)
            self._parts = [_Part(*pair) for pair in zip(infos, buffers)]
        except MemoryError:
            raise PrefillError(
                "RESOURCE_EXHAUSTED",
                f"out of memory for a snapshot of {manifest.total_bytes} bytes",
                reason="SNAPSHOT_TOO_LARGE",
            ) from None
        self._manifest = manifest
        self.bytes_total = manifest.total_bytes

    def add(self, chunk: Any) -> None:
        """Chunks come in any order, tensors mixed; an empty one is legal and carries nothing."""
        data = chunk.data  # a message makes a copy at each look
        self._take(chunk, len(data), data)

    def add_shared(self, chunk: Any) -> None:
        """The same, of a SharedChunk: its bytes are in their place already."""
        self._take(chunk, chunk.bytes, None)

    def _take(self, chunk: Any, size: int, data: Any) -> None:
        if self._manifest is None:
            raise IntegrityError("MANIFEST_MISSING", "a chunk came before the manifest")
        if chunk.tensor >= len(self._parts):
            raise IntegrityError(
                "CHUNK_TENSOR_UNKNOWN",
                f"chunk.tensor = {chunk.tensor}, the manifest has {len(self._parts)} tensors",
            )
        part, begin = self._parts[chunk.tensor], chunk.byte_offset
        if self._shared != (data is None):
            raise IntegrityError(
                "CHUNK_NOT_SHARED",
                f"chunk of {part.info.name}: its bytes must be in "
                f"{'shared memory' if self._shared else 'the message'}",
            )
        end = begin + size
        if end > part.info.bytes:
            raise IntegrityError(
                "CHUNK_OUT_OF_BOUNDS",
                f"chunk of {part.info.name}: offset {begin} + {size} bytes, "
                f"the tensor has {part.info.bytes}",
            )
        if xxh3_64(part.view[begin:end] if data is None else data) != chunk.xxh3_64:
            raise IntegrityError(
                "CHUNK_HASH", f"chunk of {part.info.name} at {begin} does not match its XXH3-64"
            )
        if not size:
            return
        if not part.insert(begin, end):
            raise IntegrityError(
                "CHUNK_OVERLAP", f"chunk of {part.info.name} at {begin} repeats bytes"
            )
        if data is not None:
            part.view[begin:end] = data
        part.hash_range(begin, end, chunk.xxh3_64)
        self.bytes_done += size

    def finish(self, digest: int) -> Snapshot:
        """The snapshot, once every byte is there and the digest over whole tensors agrees."""
        if self._manifest is None:
            raise IntegrityError("MANIFEST_MISSING", "the result came without a manifest")
        for part in self._parts:
            if not part.whole:
                raise IntegrityError(
                    "BYTES_MISSING",
                    f"tensor {part.info.name} is incomplete: the stream ended before all of its "
                    f"{part.info.bytes} bytes came",
                )
        snapshot = Snapshot(
            self._manifest.model_identity,
            self._manifest.position,
            [part.info for part in self._parts],
            [part.array() for part in self._parts],
            [part.hash() for part in self._parts],
        )
        if snapshot.digest != digest:
            raise IntegrityError(
                "DIGEST",
                f"digest is {snapshot.digest:016x}, the server said {digest:016x}",
                field="result.digest",
            )
        return snapshot
