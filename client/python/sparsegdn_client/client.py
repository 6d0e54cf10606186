"""The calls of the prefill service."""

from __future__ import annotations

import ipaddress
import json
import math
import re
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Iterator, Literal, Sequence

import grpc
import numpy as np
import numpy.typing as npt

from sparsegdn_client._stubs import SERVICE, xxh3_64
from sparsegdn_client._stubs import prefill_pb2 as pb
from sparsegdn_client.assembler import Assembler
from sparsegdn_client.errors import IntegrityError, PrefillError, from_rpc_error
from sparsegdn_client.frames import Chunk, parse_response
from sparsegdn_client.security import (
    check_token_may_travel,
    explain_tls,
    read_token,
    tls_credentials,
)
from sparsegdn_client.shared import UNAVAILABLE as SHARED_MEMORY_UNAVAILABLE
from sparsegdn_client.snapshot import FORMAT_VERSION, Snapshot, digest_of
from sparsegdn_client.types import (
    Budget,
    ModelInfo,
    Outputs,
    PrefillResult,
    Result,
    SnapshotAt,
    SnapshotRef,
    check_int32,
    check_int64,
    check_uint32,
    enum_value,
)

_IMPORT_CHUNK_BYTES = 1 << 20
_LONGEST_TIMEOUT = 10 * 365 * 86400.0  # seconds
_FIRST_WAIT, _LAST_WAIT = 0.1, 2.0  # seconds before a prefill runs again


@dataclass(frozen=True)
class Progress:
    """Where a prefill stands; counters only grow."""

    stage: Literal["queued", "computing", "streaming"] = "queued"
    queue_position: int = 0
    queued_tokens: int = 0
    tokens_done: int = 0
    tokens_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


class Cancellation:
    """Cancels, for good, the calls it was given to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Any] = []
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _add(self, call: Any) -> None:
        with self._lock:
            self._calls.append(call)
            cancelled = self.cancelled
        if cancelled:
            call.cancel()

    def _remove(self, call: Any) -> None:
        with self._lock:
            self._calls.remove(call)


def _target_uri(target: str) -> str:
    known = ("unix:", "dns:", "ipv4:", "ipv6:")
    if "://" in target or target.startswith(known):
        return target
    if "," not in target:
        return f"dns:///{target}"
    items = [re.sub("^localhost:", "127.0.0.1:", item) for item in target.split(",")]
    families = {_family(item) for item in items}
    if len(families) != 1:
        raise ValueError(f"target {target!r} mixes IPv4 and IPv6, wanted one family in a list")
    return f"ipv{families.pop()}:{','.join(items)}"


def _family(item: str) -> int:
    """4 or 6 of "address:port". gRPC resolves no names inside a list."""
    host, colon, port = item.rpartition(":")
    try:
        if colon and port.isdigit():
            version = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
            if version == 4 or host.startswith("["):
                return version
    except ValueError:
        pass
    raise ValueError(f"target has {item!r} in a list, wanted address:port; a name stands alone")


def _seconds(timeout: float | None) -> float | None:
    """gRPC takes what is too long for its clock, and NaN, for a deadline that has passed."""
    if timeout is not None and math.isnan(timeout):
        raise ValueError("timeout is nan, must be seconds or None")
    return None if timeout is None or timeout > _LONGEST_TIMEOUT else timeout


def _token_list(token_ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
    tokens = np.asarray(token_ids)
    if tokens.size == 0:
        return []  # the server refuses it, with its own words
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"token_ids is {tokens.dtype}{list(tokens.shape)}, must be integers [N]")
    low, high = int(tokens.min()), int(tokens.max())
    if low < -(1 << 31) or high >= 1 << 31:
        raise ValueError(f"token_ids range from {low} to {high}, must fit in 32 bits")
    return tokens.tolist()


class _PrefillStream:
    """The events of one Prefill call, in the order the contract allows."""

    def __init__(
        self, max_bytes: int, report: Callable[[Progress], None] | None, allow_shared: bool = False
    ) -> None:
        self._assembler = Assembler(max_bytes)
        self._allow_shared = allow_shared
        self._report = report
        self._progress = Progress()
        self._result: Any = None
        self._start = time.monotonic()
        self._first_chunk: float | None = None

    def on_event(self, response: Any) -> None:
        if self._result is not None:
            raise IntegrityError("EVENT_AFTER_RESULT", "an event came after the result")
        p = self._progress
        kind = "chunk" if isinstance(response, Chunk) else response.WhichOneof("event")
        if kind == "accepted":
            p = replace(
                p,
                queue_position=response.accepted.queue_position,
                queued_tokens=response.accepted.queued_tokens,
            )
        elif kind == "progress":
            p = replace(
                p,
                stage="computing" if p.stage == "queued" else p.stage,
                tokens_done=max(p.tokens_done, response.progress.tokens_done),
                tokens_total=response.progress.tokens_total,
            )
        elif kind == "manifest":
            self._assembler.set_manifest(
                response.manifest, allow_shared=self._allow_shared
            )
        elif kind == "chunk":
            if self._first_chunk is None:
                self._first_chunk = time.monotonic() - self._start
            self._assembler.add(response if isinstance(response, Chunk) else response.chunk)
            p = replace(p, stage="streaming")
        elif kind == "shared_chunks":
            if self._first_chunk is None:
                self._first_chunk = time.monotonic() - self._start
            for chunk in response.shared_chunks.chunks:
                self._assembler.add_shared(chunk)
            p = replace(p, stage="streaming")
        elif kind == "result":
            self._result = response.result
        else:
            return  # an event kind of a newer server: nothing a snapshot depends on
        self._progress = replace(
            p, bytes_done=self._assembler.bytes_done, bytes_total=self._assembler.bytes_total
        )
        if self._report is not None:
            self._report(self._progress)

    def finish(self) -> PrefillResult:
        if self._result is None:
            raise IntegrityError("RESULT_MISSING", "the stream ended without a result")
        snapshot = self._assembler.finish(self._result.digest)
        return PrefillResult(
            snapshot=snapshot,
            result=Result.from_proto(self._result),
            total_seconds=time.monotonic() - self._start,
            first_chunk_seconds=self._first_chunk,
        )


def _service_config(uri: str, max_attempts: int) -> str:
    """Retries, and for a static list health checking: servers that load or drain get no calls."""
    config: dict[str, Any] = {}
    if max_attempts > 1:
        policy = {
            "maxAttempts": max_attempts,
            "initialBackoff": "0.1s",
            "maxBackoff": "1s",
            "backoffMultiplier": 3,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        # GetModelInfo is left out: wait_until_ready asks again by itself.
        names = [
            {"service": SERVICE.strip("/"), "method": method}
            for method in ("Prefill", "ImportSnapshot", "ReleaseSnapshot")
        ]
        config["methodConfig"] = [{"name": names, "retryPolicy": policy}]
    if "," in uri:
        config["healthCheckConfig"] = {"serviceName": ""}
    return json.dumps(config) if config else ""


class PrefillClient:
    """A connection to one service. Thread-safe; calls may run concurrently and block.

    Args:
        target: "host:port" (resolved as dns:///, round robin over its addresses), a gRPC URI, or
            "address:port,address:port,...": round robin over a static list, watching each one's
            health.
        credentials: a grpc.ChannelCredentials; wins over the tls_ arguments.
        tls: use TLS, with the system's authorities unless tls_ca names a PEM file of others.
        tls_cert, tls_key: PEM files of this client, for servers that ask for a certificate.
        tls_server_name: the name in the server's certificate, where it is not the target's.
        token_file: holds the bearer token that every call brings; read for each call, so that a
            rotated token is taken at once. Refused for plain text to another machine unless
            allow_plain_text_token.
        shared_memory: on a unix: target, take tensors through shared memory and use them where
            they are; a server without room, or whose memory this process cannot see, streams.
        max_snapshot_bytes: bound on what a manifest may claim.
        max_attempts: prefill, import_snapshot and release: a call that ends with UNAVAILABLE
            before its first answer (connection failed, server loading or draining) is sent again
            after 0.1 to 1 s, up to this many times in all, 1 to 5; over several addresses the
            next attempt goes to another one.
        retry_buffer_bytes: only a call whose request fits is sent again.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        tls_server_name: str = "",
        token_file: str | Path | None = None,
        allow_plain_text_token: bool = False,
        shared_memory: bool = False,
        max_receive_message_bytes: int = 64 << 20,
        retry_buffer_bytes: int = 64 << 20,
        max_snapshot_bytes: int = 64 << 30,
        max_attempts: int = 4,
    ) -> None:
        if not target:
            raise ValueError("target is empty, wanted host:port or a gRPC URI")
        if not 1 <= max_attempts <= 5:
            raise ValueError(f"max_attempts is {max_attempts}, wanted 1 to 5")
        options = [
            ("grpc.lb_policy_name", "round_robin"),
            ("grpc.max_receive_message_length", max_receive_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.per_rpc_retry_buffer_size", retry_buffer_bytes),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        if tls_server_name:
            options.append(("grpc.ssl_target_name_override", tls_server_name))
        if credentials is None and (tls or tls_ca or tls_cert or tls_key):
            credentials = tls_credentials(tls_ca, tls_cert, tls_key)
        self._uses_tls = credentials is not None
        self._token_file = token_file
        if token_file is not None:
            check_token_may_travel(target, self._uses_tls, allow_plain_text_token)
            read_token(token_file)
        self._ask_shared = shared_memory
        uri = _target_uri(target)
        if config := _service_config(uri, max_attempts):
            options.append(("grpc.service_config", config))
        self._channel = (
            grpc.insecure_channel(uri, options)
            if credentials is None
            else grpc.secure_channel(uri, credentials, options)
        )
        self._max_snapshot_bytes = max_snapshot_bytes
        self._prefill = self._channel.unary_stream(
            SERVICE + "Prefill", pb.PrefillRequest.SerializeToString, parse_response
        )
        self._import = self._channel.stream_unary(
            SERVICE + "ImportSnapshot", pb.SnapshotFrame.SerializeToString, pb.SnapshotRef.FromString
        )
        self._release = self._channel.unary_unary(
            SERVICE + "ReleaseSnapshot",
            pb.ReleaseSnapshotRequest.SerializeToString,
            pb.ReleaseSnapshotResponse.FromString,
        )
        self._info = self._channel.unary_unary(
            SERVICE + "GetModelInfo",
            pb.GetModelInfoRequest.SerializeToString,
            pb.ModelInfo.FromString,
        )

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> PrefillClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def prefill(
        self,
        token_ids: Sequence[int] | npt.NDArray[Any],
        *,
        budget: Budget | None = None,
        snapshot_at: SnapshotAt | None = None,
        outputs: Outputs | None = None,
        resume_from: str = "",
        first_position: int | None = None,
        keep: bool = False,
        ttl_seconds: int = 0,
        pin: bool = False,
        prefix_reuse: bool = True,
        restarts: int = 0,
        priority: int = 0,
        request_id: str = "",
        expect_model: str = "",
        tenant: str = "",
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancellation: Cancellation | None = None,
    ) -> PrefillResult:
        """Runs a prompt; returns a complete, verified snapshot or raises.

        Every chunk's XXH3-64, every byte of every tensor exactly once, the digest over whole
        tensors, then the result, then OK: nothing is handed out before.

        Args:
            token_ids: integers [N]; with `resume_from`, those that follow that snapshot.
            snapshot_at: "before_last" (the server's default: the worker runs the last token
                itself) or "after_last" (the result names the next token).
            keep: the server keeps the snapshot and `result.snapshot_id` names it.
            pin: with `keep`, the snapshot is not evicted for room before its time.
            prefix_reuse: False neither starts from stored prefixes nor leaves any.
            restarts: a call that ends with UNAVAILABLE even after its answer began (the server
                died or was stopped) runs again from its start, so often at most, within `timeout`
                in all; the counters of `progress` start anew.
            expect_model: the model identity this worker continues with; "" is not checked.
            progress: called on this thread between messages.

        Raises:
            PrefillError: the server's refusal. IntegrityError: the stream was not sound.
        """
        check_int32("priority", priority)
        check_int64("first_position", first_position)
        check_uint32("ttl_seconds", ttl_seconds)
        request = pb.PrefillRequest(
            token_ids=_token_list(token_ids),
            snapshot_at=enum_value(pb.SnapshotAt, "SNAPSHOT_AT_", snapshot_at),
            resume_from=resume_from,
            first_position=first_position,
            priority=priority,
            request_id=request_id,
            tenant=tenant,
        )
        request.worker.format_version = FORMAT_VERSION
        request.worker.model_identity = expect_model
        if budget is not None:
            request.budget.CopyFrom(budget.to_proto())
        if outputs is not None:
            request.outputs.CopyFrom(outputs.to_proto())
        if keep:
            request.keep_snapshot.ttl_seconds = ttl_seconds
            request.keep_snapshot.pin = pin
            request.keep_snapshot.SetInParent()
        if not prefix_reuse:
            request.prefix_reuse = pb.PREFIX_REUSE_OFF
        end = None if timeout is None else time.monotonic() + timeout
        wait = _FIRST_WAIT
        while True:
            try:
                left = None if end is None else end - time.monotonic()
                return self._prefill_any_way(request, left, progress, cancellation)
            except PrefillError as error:
                pause = min(max(error.retry_after_seconds or wait, _FIRST_WAIT), _LAST_WAIT)
                late = end is not None and time.monotonic() + pause >= end
                if restarts <= 0 or late or not _is_gone(error, cancellation):
                    raise
                if not _sleep(pause, cancellation):
                    raise PrefillError("CANCELLED", "cancelled by this process") from None
            restarts -= 1
            wait = min(2 * wait, _LAST_WAIT)

    def _prefill_any_way(
        self,
        request: Any,
        timeout: float | None,
        progress: Callable[[Progress], None] | None,
        cancellation: Cancellation | None,
    ) -> PrefillResult:
        """Through shared memory where that was asked for and works, else through the stream."""
        if self._ask_shared:
            request.shared_memory = True
            try:
                return self._prefill_once(request, timeout, progress, cancellation)
            except PrefillError as error:
                if error.reason != SHARED_MEMORY_UNAVAILABLE:
                    raise
            self._ask_shared = request.shared_memory = False
        return self._prefill_once(request, timeout, progress, cancellation)

    def _prefill_once(
        self,
        request: Any,
        timeout: float | None,
        progress: Callable[[Progress], None] | None,
        cancellation: Cancellation | None,
    ) -> PrefillResult:
        stream = _PrefillStream(self._max_snapshot_bytes, progress, request.shared_memory)
        call = self._prefill(request, timeout=_seconds(timeout), metadata=self._metadata())

        def consume() -> None:
            for event in _events(call):
                stream.on_event(event)

        self._run(call, cancellation, consume)
        return stream.finish()

    def _metadata(self) -> list[tuple[str, str]] | None:
        if self._token_file is None:
            return None
        return [("authorization", f"Bearer {read_token(self._token_file)}")]

    def import_snapshot(
        self,
        snapshot: Snapshot,
        *,
        ttl_seconds: int = 0,
        tenant: str = "",
        timeout: float | None = None,
        cancellation: Cancellation | None = None,
    ) -> SnapshotRef:
        """Uploads the importable tensors, so that `prefill` can resume from the returned id."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"snapshot is {type(snapshot).__name__}, must be a Snapshot")
        check_uint32("ttl_seconds", ttl_seconds)
        call = self._import.future(
            _import_frames(snapshot, ttl_seconds, tenant),
            timeout=_seconds(timeout),
            metadata=self._metadata(),
        )
        ref = self._run(call, cancellation, call.result)
        return SnapshotRef(ref.snapshot_id, ref.position, ref.bytes, ref.ttl_seconds)

    def release(self, snapshot_id: str, *, tenant: str = "", timeout: float | None = None) -> None:
        """Drops a kept snapshot. PrefillError NOT_FOUND when the server does not hold it."""
        request = pb.ReleaseSnapshotRequest(snapshot_id=snapshot_id, tenant=tenant)
        call = self._release.future(
            request, timeout=_seconds(timeout), metadata=self._metadata()
        )
        self._run(call, None, call.result)

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """Identity, shapes and limits. PrefillError UNAVAILABLE while the server loads."""
        call = self._info.future(
            pb.GetModelInfoRequest(), timeout=_seconds(timeout), metadata=self._metadata()
        )
        return ModelInfo.from_proto(self._run(call, None, call.result))

    def wait_until_ready(self, timeout: float) -> ModelInfo:
        """`model_info`, asked again while the answer is UNAVAILABLE, for `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                return self.model_info(timeout=max(0.2, min(5.0, end - time.monotonic())))
            except PrefillError as error:
                again = error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
                if not again or time.monotonic() >= end:
                    raise
            time.sleep(0.1)

    def _run(self, call: Any, cancellation: Cancellation | None, work: Callable[[], Any]) -> Any:
        """`work` under the cancellation; the call is cancelled whenever it does not succeed."""
        if cancellation is not None:
            cancellation._add(call)
        try:
            return work()
        except grpc.FutureCancelledError:
            raise PrefillError("CANCELLED", "cancelled by this process") from None
        except grpc.RpcError as error:
            raise explain_tls(from_rpc_error(error), self._uses_tls) from None
        except BaseException:
            call.cancel()  # the server must not go on for a caller that has given up
            raise
        finally:
            if cancellation is not None:
                cancellation._remove(call)


def _is_gone(error: PrefillError, cancellation: Cancellation | None) -> bool:
    """A server that shuts down resets the streams that reach it last: CANCELLED, though nobody here
    cancelled."""
    ours = cancellation is not None and cancellation.cancelled
    return error.code == "UNAVAILABLE" or (error.code == "CANCELLED" and not ours)


def _sleep(seconds: float, cancellation: Cancellation | None) -> bool:
    """False when cancelled meanwhile."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if cancellation is not None and cancellation.cancelled:
            return False
        time.sleep(min(left, 0.02))
    return True


def _events(call: Any) -> Iterator[Any]:
    """The responses; a cancelled call ends in grpc.RpcError, whatever the version of grpcio."""
    yield from call
    if call.code() is not grpc.StatusCode.OK:
        raise PrefillError(call.code().name, call.details() or "")


def _import_frames(snapshot: Snapshot, ttl_seconds: int, tenant: str) -> Iterator[Any]:
    names = snapshot.importable()
    header = pb.SnapshotHeader(
        manifest=pb.Manifest(
            model_identity=snapshot.model_identity,
            format_version=snapshot.format_version,
            position=snapshot.position,
            tensors=[snapshot.infos[name].to_proto() for name in names],
            total_bytes=sum(snapshot.infos[name].bytes for name in names),
        ),
        tenant=tenant,
    )
    header.keep.ttl_seconds = ttl_seconds
    yield pb.SnapshotFrame(header=header)
    for index, name in enumerate(names):
        data = memoryview(snapshot[name].reshape(-1).view(np.uint8))
        for offset in range(0, len(data), _IMPORT_CHUNK_BYTES):
            piece = bytes(data[offset : offset + _IMPORT_CHUNK_BYTES])
            yield pb.SnapshotFrame(
                chunk=pb.TensorChunk(
                    tensor=index, byte_offset=offset, data=piece, xxh3_64=xxh3_64(piece)
                )
            )
    yield pb.SnapshotFrame(end=pb.SnapshotEnd(digest=digest_of([snapshot.hashes[n] for n in names])))
