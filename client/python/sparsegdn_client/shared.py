"""The client's side of same-host hand-off: maps what Manifest.shared_memory names."""

from __future__ import annotations

import mmap
import os
import re
import stat
from typing import Any

import numpy as np

from sparsegdn_client.errors import IntegrityError, PrefillError

UNAVAILABLE = "SHARED_MEMORY_UNAVAILABLE"
_NAME = re.compile(r"/sparsegdn-[0-9a-f]{32}")
_FOLDER = "/dev/shm"
_ALIGN = 64


def _invalid(what: str) -> IntegrityError:
    return IntegrityError("MANIFEST_INVALID", f"manifest: shared_memory {what}",
                          field="shared_memory")


def _unavailable(name: str, error: OSError) -> PrefillError:
    return PrefillError(
        "FAILED_PRECONDITION",
        f"cannot map the server's shared memory {name}: {error.strerror}; client and server must "
        f"share /dev/shm and the user",
        reason=UNAVAILABLE,
    )


def _check_places(manifest: Any) -> None:
    shared = manifest.shared_memory
    # A name from the wire opens nothing but a segment of this service.
    if not _NAME.fullmatch(shared.name):
        raise _invalid("names no segment of this service")
    if len(shared.tensor_offsets) != len(manifest.tensors):
        raise _invalid(
            f"has {len(shared.tensor_offsets)} offsets for {len(manifest.tensors)} tensors"
        )
    end = 0
    for index, (offset, tensor) in enumerate(zip(shared.tensor_offsets, manifest.tensors)):
        if offset % _ALIGN or offset < end or offset + tensor.bytes > shared.bytes:
            raise _invalid(f"puts tensors[{index}] at {offset}, wanted a multiple of {_ALIGN} "
                           f"from {end} within {shared.bytes}")
        end = offset + tensor.bytes


def map_tensors(manifest: Any) -> list[np.ndarray]:
    """The bytes of each tensor, where the server writes them; they stay when the name goes.

    The arrays are private to this process: what it writes into them nobody else sees.
    """
    _check_places(manifest)
    shared = manifest.shared_memory
    try:
        fd = os.open(_FOLDER + shared.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _unavailable(shared.name, error) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size < shared.bytes:
            # Reading behind its end would be a signal.
            raise _invalid(f"claims {shared.bytes} bytes, it has {info.st_size}")
        memory = mmap.mmap(fd, max(1, shared.bytes), access=mmap.ACCESS_COPY)
    except OSError as error:
        raise _unavailable(shared.name, error) from None
    finally:
        os.close(fd)
    whole = np.frombuffer(memory, np.uint8)
    return [
        whole[offset : offset + tensor.bytes]
        for offset, tensor in zip(shared.tensor_offsets, manifest.tensors)
    ]
