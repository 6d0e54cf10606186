"""A small prefill service in Python for the client's tests: deterministic, resumable, breakable.

Its "model" has one linear and one full layer. The state after tokens t_0..t_{n-1} is a function of
all of them (the key tensor holds them), so that a test can tell which tokens a snapshot has seen; the
next token is (sum of all tokens + their count) mod 97. A request_id "fault:NAME" breaks the stream
in the way of FAULTS[NAME].
"""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Any, Callable

import grpc
import numpy as np
from sparsegdn_client._stubs import SERVICE, status_pb2, xxh3_64
from sparsegdn_client._stubs import prefill_pb2 as pb
from sparsegdn_client.snapshot import STORAGE, Snapshot, TensorInfo

IDENTITY = "ab" * 32
FRAME_BYTES = 1000
VOCAB_SIZE = 97

Events = list[Any]


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) + len(tokens)) % VOCAB_SIZE


def make_snapshot(tokens: list[int]) -> Snapshot:
    n = len(tokens)
    seen = np.asarray(tokens, np.float32)
    state = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5) + seen.sum(dtype=np.float32)
    conv = np.zeros((7, 4), np.float32)
    conv[:, 4 - min(n, 4) :] = seen[n - min(n, 4) :]
    key = np.repeat(seen, 8).reshape(n, 2, 4)
    tensors = [
        ("layers.0.recurrent_state", "recurrent_state", 0, state, n, {"state_layout": "key_major"}),
        ("layers.0.conv_state", "conv_state", 0, conv, n, {"conv_layout": "four_columns"}),
        ("layers.1.key", "key", 1, key, 0, {}),
        ("layers.1.value", "value", 1, -key, 0, {}),
    ]
    infos = [
        TensorInfo(name, kind, layer, "fp32", a.shape, a.nbytes, at, **layouts)
        for name, kind, layer, a, at, layouts in tensors
    ]
    return Snapshot(IDENTITY, n, infos, [t[3] for t in tensors])


def chunks_of(snapshot: Snapshot) -> Events:
    """Chunks of at most FRAME_BYTES, tensors mixed, last bytes first."""
    events = []
    for index, name in enumerate(snapshot):
        data = snapshot[name].tobytes()
        for offset in range(0, len(data), FRAME_BYTES):
            piece = data[offset : offset + FRAME_BYTES]
            events.append(
                pb.PrefillResponse(
                    chunk=pb.TensorChunk(
                        tensor=index, byte_offset=offset, data=piece, xxh3_64=xxh3_64(piece)
                    )
                )
            )
    return events[::-1]


def manifest_of(snapshot: Snapshot) -> Any:
    infos = snapshot.infos.values()
    return pb.Manifest(
        model_identity=snapshot.model_identity,
        format_version=1,
        position=snapshot.position,
        tensors=[info.to_proto() for info in infos],
        total_bytes=sum(info.bytes for info in infos),
    )


def set_data(chunk: Any, data: bytes) -> None:
    chunk.data = data
    chunk.xxh3_64 = xxh3_64(data)


def _flip(events: Events, keep_hash: bool) -> None:
    chunk = events[4].chunk
    data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
    if keep_hash:
        chunk.data = data
    else:
        set_data(chunk, data)


def _inside(events: Events) -> None:
    """Two bytes from the middle of a chunk that has come already."""
    extra = pb.PrefillResponse()
    extra.CopyFrom(events[4])
    extra.chunk.byte_offset += 1
    set_data(extra.chunk, extra.chunk.data[1:3])
    events.insert(5, extra)


def _claim(events: Events) -> None:
    manifest = events[2].manifest
    tensor = manifest.tensors[2]
    tensor.shape[0] = 1 << 40
    manifest.total_bytes += (1 << 40) * 32 - tensor.bytes
    tensor.bytes = (1 << 40) * 32


def _set(path: str, value: Any) -> Callable[[Events], None]:
    """Sets a field of the manifest, as in "tensors.0.name"."""

    def apply(events: Events) -> None:
        target = events[2].manifest
        *steps, last = path.split(".")
        for step in steps:
            target = target[int(step)] if step.isdigit() else getattr(target, step)
        if last.isdigit():
            target[int(last)] = value
        else:
            setattr(target, last, value)

    return apply


# Name -> what it does to the good stream, and the reason a client must give. Events 0, 1, 2 are
# Accepted, Progress, Manifest; then chunks; the last is the Result.
FAULTS: dict[str, tuple[Callable[[Events], Any], str]] = {
    "hash_wrong": (lambda e: setattr(e[3].chunk, "xxh3_64", 1), "CHUNK_HASH"),
    "byte_flipped": (lambda e: _flip(e, keep_hash=True), "CHUNK_HASH"),
    "byte_flipped_hash_fitting": (lambda e: _flip(e, keep_hash=False), "DIGEST"),
    "chunk_missing": (lambda e: e.pop(4), "BYTES_MISSING"),
    "byte_missing": (lambda e: set_data(e[3].chunk, e[3].chunk.data[:-1]), "BYTES_MISSING"),
    "chunk_twice": (lambda e: e.insert(5, e[4]), "CHUNK_OVERLAP"),
    "chunk_inside_another": (_inside, "CHUNK_OVERLAP"),
    "chunk_longer": (lambda e: set_data(e[4].chunk, e[4].chunk.data + b"x"), "CHUNK_OVERLAP"),
    "chunk_past_end": (lambda e: setattr(e[3].chunk, "byte_offset", 1 << 40),
                       "CHUNK_OUT_OF_BOUNDS"),
    "chunk_of_unknown_tensor": (lambda e: setattr(e[3].chunk, "tensor", 9),
                                "CHUNK_TENSOR_UNKNOWN"),
    "chunk_before_manifest": (lambda e: e.insert(2, e.pop(3)), "MANIFEST_MISSING"),
    "manifest_absent": (lambda e: e.__delitem__(slice(2, -1)), "MANIFEST_MISSING"),
    "manifest_twice": (lambda e: e.insert(3, e[2]), "MANIFEST_REPEATED"),
    "result_absent": (lambda e: e.pop(), "RESULT_MISSING"),
    "stream_empty": (lambda e: e.clear(), "RESULT_MISSING"),
    "result_twice": (lambda e: e.append(e[-1]), "EVENT_AFTER_RESULT"),
    "digest_wrong": (lambda e: setattr(e[-1].result, "digest", 1), "DIGEST"),
    "version_unknown": (_set("format_version", 2), "MANIFEST_INVALID"),
    "position_negative": (_set("position", -1), "MANIFEST_INVALID"),
    "total_wrong": (_set("total_bytes", 1), "MANIFEST_INVALID"),
    "bytes_wrong": (_set("tensors.0.bytes", 1), "MANIFEST_INVALID"),
    "shape_negative": (_set("tensors.0.shape.0", -2), "MANIFEST_INVALID"),
    "name_repeated": (_set("tensors.0.name", "layers.1.key"), "MANIFEST_INVALID"),
    "name_empty": (_set("tensors.0.name", ""), "MANIFEST_INVALID"),
    "dtype_unknown": (_set("tensors.0.dtype", 99), "MANIFEST_INVALID"),
    "kind_unknown": (_set("tensors.0.kind", 99), "MANIFEST_INVALID"),
    "state_layout_unset": (_set("tensors.0.state_layout", 0), "MANIFEST_INVALID"),
    "conv_layout_unset": (_set("tensors.1.conv_layout", 0), "MANIFEST_INVALID"),
    "claim_above_bound": (_claim, "SNAPSHOT_TOO_LARGE"),
}


def _abort(context: Any, code: grpc.StatusCode, message: str, **details: Any) -> None:
    status = status_pb2.Status(code=code.value[0], message=message)
    for kind, detail in details.items():
        packed = status.details.add()
        packed.type_url = f"type.googleapis.com/google.rpc.{kind}"
        packed.value = detail.SerializeToString()
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


class FakeServer:
    """Listens on a free loopback port; a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.kept: dict[str, list[int]] = {}
        self.requests: list[Any] = []
        self.ever_kept = 0
        self.saw_cancel = threading.Event()
        self.loading = False
        self.unavailable = 0  # answers of Prefill that will be UNAVAILABLE
        self.gone = 0  # and that will become it after their first event
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16),
            options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)],
        )
        handlers = {
            "Prefill": grpc.unary_stream_rpc_method_handler(
                self.prefill, pb.PrefillRequest.FromString, pb.PrefillResponse.SerializeToString
            ),
            "ImportSnapshot": grpc.stream_unary_rpc_method_handler(
                self.import_snapshot, pb.SnapshotFrame.FromString, pb.SnapshotRef.SerializeToString
            ),
            "ReleaseSnapshot": grpc.unary_unary_rpc_method_handler(
                self.release,
                pb.ReleaseSnapshotRequest.FromString,
                pb.ReleaseSnapshotResponse.SerializeToString,
            ),
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                self.info, pb.GetModelInfoRequest.FromString, pb.ModelInfo.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE.strip("/"), handlers),)
        )
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.stop(0).wait()

    def _keep(self, tokens: list[int]) -> str:
        with self._lock:
            self.ever_kept += 1
            name = f"kept-{self.ever_kept}"
            self.kept[name] = tokens
        return name

    def prefill(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        if self.unavailable > 0:
            self.unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server is draining")
        if not request.token_ids:
            _abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "token_ids is empty",
                ErrorInfo=status_pb2.ErrorInfo(reason="EMPTY_PROMPT"),
                BadRequest=status_pb2.BadRequest(
                    field_violations=[
                        status_pb2.BadRequest.FieldViolation(field="token_ids", description="empty")
                    ]
                ),
            )
        if request.request_id == "full":
            retry = status_pb2.RetryInfo()
            retry.retry_delay.seconds, retry.retry_delay.nanos = 2, 500_000_000
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", RetryInfo=retry)
        if request.resume_from and request.resume_from not in self.kept:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no snapshot {request.resume_from}")
        events, tokens = self._events(request)
        fault = request.request_id.removeprefix("fault:")
        if fault in FAULTS:
            FAULTS[fault][0](events)
        if request.request_id == "stall":
            events.pop()
            # Called when the call ends, and this one only ends when its client goes away.
            context.add_callback(self.saw_cancel.set)
        if self.gone > 0:
            self.gone -= 1
            yield events[0]
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server died")
        yield from events
        for _ in range(1000 if request.request_id == "stall" else 0):
            if not context.is_active():
                return
            time.sleep(0.01)
        if request.request_id == "error_at_end":
            context.abort(grpc.StatusCode.INTERNAL, "the end went wrong")

    def _events(self, request: Any) -> tuple[Events, list[int]]:
        before = self.kept.get(request.resume_from, [])
        tokens = before + list(request.token_ids)
        after_last = request.snapshot_at == pb.SNAPSHOT_AT_AFTER_LAST
        held = tokens if after_last else tokens[:-1]
        snapshot = make_snapshot(held)
        out = request.outputs
        if out.HasField("state") and not out.state:
            snapshot = Snapshot(IDENTITY, len(held), [], [])
        dense = request.budget.mode == pb.BUDGET_MODE_DENSE
        total = len(request.token_ids) * 2
        result = pb.Result(digest=snapshot.digest, snapshot_position=len(held))
        result.effective_budget.CopyFrom(request.budget)
        result.effective_budget.mode = pb.BUDGET_MODE_DENSE if dense else pb.BUDGET_MODE_RETENTION
        result.usage.prompt_tokens = len(tokens)
        result.usage.computed_tokens = len(request.token_ids)
        result.usage.cached_tokens = len(before)
        result.usage.events_total = total
        result.usage.events_selected = total if dense else total // 2
        result.timings.total_seconds = 0.25
        result.retained.add(layer=0, pair_share=[1.0 if dense else 0.5])
        if after_last:
            result.next_token = next_token(tokens)
        if request.HasField("keep_snapshot"):
            result.snapshot_id = self._keep(held)
            result.snapshot_ttl_seconds = request.keep_snapshot.ttl_seconds or 300
        n = len(request.token_ids)
        events = [
            pb.PrefillResponse(accepted=pb.Accepted(queue_position=1, queued_tokens=5)),
            pb.PrefillResponse(progress=pb.Progress(tokens_done=n, tokens_total=n)),
            pb.PrefillResponse(manifest=manifest_of(snapshot)),
            *chunks_of(snapshot),
            pb.PrefillResponse(result=result),
        ]
        return events, tokens

    def import_snapshot(self, frames: Any, context: Any) -> Any:
        from sparsegdn_client.assembler import Assembler

        assembler, snapshot, ttl = Assembler(1 << 30), None, 0
        for frame in frames:
            kind = frame.WhichOneof("frame")
            if kind == "header":
                ttl = frame.header.keep.ttl_seconds
                if frame.header.manifest.model_identity != IDENTITY:
                    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another model")
                assembler.set_manifest(frame.header.manifest)
            elif kind == "chunk":
                assembler.add(frame.chunk)
            else:
                snapshot = assembler.finish(frame.end.digest)
        if snapshot is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no end")
        tokens = [int(t) for t in snapshot["layers.1.key"][:, 0, 0]]
        size = sum(info.bytes for info in snapshot.infos.values())
        return pb.SnapshotRef(
            snapshot_id=self._keep(tokens), position=snapshot.position, bytes=size,
            ttl_seconds=ttl or 300,
        )

    def release(self, request: Any, context: Any) -> Any:
        with self._lock:
            found = self.kept.pop(request.snapshot_id, None)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no snapshot {request.snapshot_id}")
        return pb.ReleaseSnapshotResponse()

    def info(self, request: Any, context: Any) -> Any:
        if self.loading:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        return pb.ModelInfo(
            model_identity=IDENTITY,
            model_name="fake",
            format_version=1,
            backend="cpu",
            layers=[pb.LAYER_KIND_LINEAR_ATTENTION, pb.LAYER_KIND_FULL_ATTENTION],
            vocab_size=VOCAB_SIZE,
            compute_dtype=pb.DTYPE_FP32,
            window=2048,
        )


__all__ = ["FAULTS", "STORAGE", "FakeServer", "make_snapshot", "next_token"]
