"""PrefillResponse from its bytes; those of a chunk stay where they are.

The generated classes copy a chunk's data twice, once to parse and once to hand out, and nearly all
of a stream is chunk data. So the one shape in which chunks come is read here, and everything else,
malformed messages included, is left to the generated classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sparsegdn_client._stubs import prefill_pb2 as pb

_CHUNK = pb.PrefillResponse.DESCRIPTOR.fields_by_name["chunk"].number << 3 | 2
_FIELDS = pb.TensorChunk.DESCRIPTOR.fields_by_name
_TENSOR = _FIELDS["tensor"].number << 3
_OFFSET = _FIELDS["byte_offset"].number << 3
_HASH = _FIELDS["xxh3_64"].number << 3 | 1
_DATA = _FIELDS["data"].number << 3 | 2


class Chunk(NamedTuple):
    """A TensorChunk whose data is a view of the message."""

    tensor: int
    byte_offset: int
    data: memoryview
    xxh3_64: int


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(value, end); IndexError past the message's end, ValueError past 64 bits."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise ValueError
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError


def _chunk(message: bytes) -> Chunk | None:
    """None unless the message is one chunk with each field at most once, as servers write it."""
    size, at = _varint(message, 1)
    if at + size != len(message):
        return None
    fields: dict[int, Any] = {}
    while at < len(message):
        tag, at = _varint(message, at)
        if tag in fields:
            return None
        if tag == _DATA:
            size, at = _varint(message, at)
            fields[tag] = memoryview(message)[at : at + size]
            at += size
        elif tag == _HASH:
            fields[tag] = int.from_bytes(message[at : at + 8], "little")
            at += 8
        elif tag in (_TENSOR, _OFFSET):
            fields[tag], at = _varint(message, at)
        else:
            return None
    tensor = fields.get(_TENSOR, 0)
    if at != len(message) or tensor >> 32:
        return None
    return Chunk(tensor, fields.get(_OFFSET, 0), fields.get(_DATA, memoryview(b"")),
                 fields.get(_HASH, 0))


def parse_response(message: bytes) -> Any:
    """A Chunk or a PrefillResponse. DecodeError as the generated class raises it."""
    if message and message[0] == _CHUNK:
        try:
            chunk = _chunk(message)
        except (IndexError, ValueError):
            chunk = None
        if chunk is not None:
            return chunk
    return pb.PrefillResponse.FromString(message)
