"""Errors of the client. Whatever is raised, no part of a snapshot has been handed out."""

from __future__ import annotations

from typing import Any

_TYPE_PREFIX = "type.googleapis.com/google.rpc."


class PrefillError(Exception):
    """A call failed.

    Attributes:
        code: canonical gRPC code, e.g. "INVALID_ARGUMENT".
        message: the server's words, which name field, got and wanted.
        field: the request field at fault, or "".
        reason: stable UPPER_SNAKE_CASE reason, or "".
        retry_after_seconds: when to try again, if the server said so.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str = "",
        reason: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}" + (f" [{reason}]" if reason else ""))
        self.code = code
        self.message = message
        self.field = field
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class IntegrityError(PrefillError):
    """What came is not a complete, verified snapshot (code DATA_LOSS).

    `reason` is one of MANIFEST_INVALID, MANIFEST_MISSING, MANIFEST_REPEATED, CHUNK_HASH,
    CHUNK_OUT_OF_BOUNDS, CHUNK_OVERLAP, CHUNK_TENSOR_UNKNOWN, BYTES_MISSING, DIGEST,
    EVENT_AFTER_RESULT, RESULT_MISSING.
    """

    def __init__(self, reason: str, message: str, *, field: str = "") -> None:
        super().__init__("DATA_LOSS", message, field=field, reason=reason)


class SnapshotFileError(Exception):
    """A file is not a snapshot file, or is corrupt; the message names path and place."""


def from_rpc_error(error: Any) -> PrefillError:
    """A grpc.RpcError with the google.rpc details of its trailer decoded."""
    from sparsegdn_client._stubs import status_pb2

    field = reason = ""
    retry: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(value)
        except Exception:  # details are a courtesy; the code and message stand without them
            continue
        for detail in status.details:
            kind = detail.type_url.removeprefix(_TYPE_PREFIX)
            if kind == "ErrorInfo":
                info = status_pb2.ErrorInfo.FromString(detail.value)
                reason = info.reason
                field = field or info.metadata.get("field", "")
            elif kind == "BadRequest":
                bad = status_pb2.BadRequest.FromString(detail.value)
                if bad.field_violations:
                    field = bad.field_violations[0].field
            elif kind == "RetryInfo":
                delay = status_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry = delay.seconds + delay.nanos * 1e-9
    return PrefillError(
        error.code().name,
        error.details() or "",
        field=field,
        reason=reason,
        retry_after_seconds=retry,
    )
