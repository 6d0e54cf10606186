"""Starts the built server as a child process, speaks to it, and looks at how it ends.

Everything runs on loopback with ports that the system chose, on a copy of a bundled model (the
server caches the identity beside the model). FAULT_SERVER_BINARY names the executable where a
Server is given no command.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import xxhash
from sparsegdn.rpc import status_pb2
from sparsegdn.v1 import prefill_pb2 as pb
from sparsegdn.v1 import prefill_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests/data/models"
BINARY = os.environ.get("FAULT_SERVER_BINARY", "FAULT_SERVER_BINARY is not set")
CODE_DIR = Path(__file__).resolve().parent
OPTIONS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", 16 << 20)]


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SPARSEGDN_")}
    return {**kept, **extra}


def run_to_exit(*args: str, timeout: float = 20, env: dict[str, str] | None = None,
                preexec_fn=None) -> tuple[int, str]:
    """Exit code and standard error of a server that is expected not to start."""
    done = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, env=env or clean_environment(), preexec_fn=preexec_fn)
    return done.returncode, done.stderr


def eventually(done, timeout: float = 10.0):
    """The first true value of done(), polled; None when it did not come."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if value := done():
            return value
        time.sleep(0.02)
    return None


class Snapshot:
    """A stream put together the way a client must: every byte, every checksum, the digest."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.manifest = self.result = None
        self.tensors: list[bytearray] = []
        self.received = 0

    def add(self, event) -> None:
        kind = event.WhichOneof("event")
        self.events.append(kind)
        if kind == "manifest":
            self.manifest = event.manifest
            self.tensors = [bytearray(t.bytes) for t in event.manifest.tensors]
        elif kind == "chunk":
            chunk = event.chunk
            if xxhash.xxh3_64_intdigest(chunk.data) != chunk.xxh3_64:
                raise AssertionError("a frame fails its checksum")
            end = chunk.byte_offset + len(chunk.data)
            self.tensors[chunk.tensor][chunk.byte_offset:end] = chunk.data
            self.received += len(chunk.data)
        elif kind == "result":
            self.result = event.result

    @property
    def whole(self) -> bool:
        if self.result is None or self.received != self.manifest.total_bytes:
            return False
        hashes = b"".join(xxhash.xxh3_64_intdigest(bytes(t)).to_bytes(8, "little")
                          for t in self.tensors)
        return xxhash.xxh3_64_intdigest(hashes) == self.result.digest


class Details:
    """reason, field and retry delay of an RpcError's grpc-status-details-bin."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.reason = self.field = None
        self.retry_seconds = None
        trailer = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        for detail in status_pb2.Status.FromString(trailer).details:
            name = detail.type_url.rsplit(".", 1)[-1]
            if name == "ErrorInfo":
                self.reason = status_pb2.ErrorInfo.FromString(detail.value).reason
            elif name == "BadRequest":
                bad = status_pb2.BadRequest.FromString(detail.value)
                self.field = bad.field_violations[0].field
            elif name == "RetryInfo":
                delay = status_pb2.RetryInfo.FromString(detail.value).retry_delay
                self.retry_seconds = delay.seconds + delay.nanos * 1e-9


def prompt(tokens: int, seed: int = 0, **fields) -> pb.PrefillRequest:
    return pb.PrefillRequest(token_ids=[(i * 31 + seed) % 512 for i in range(tokens)], **fields)


class Server:
    """A child process; a context manager that leaves nothing behind."""

    def __init__(self, *flags: object, model: str | Path = "tiny-hybrid", ready: bool = True,
                 command: list[str] | None = None, backend: str = "cpu", start_seconds: float = 10,
                 env: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        if isinstance(model, Path):
            self.model = model
        else:
            self.model = self.folder / model
            shutil.copytree(MODELS / model, self.model)
        ports = self.folder / "ports"
        self.log_file = self.folder / "log"
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                [*(command or [BINARY]), "--model", self.model, "--backend", backend,
                 "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
                 "--port-file", ports, *map(str, flags)],
                stdout=subprocess.DEVNULL, stderr=log, env=clean_environment(**(env or {})))
        try:
            if not eventually(lambda: ports.exists() or self.process.poll() is not None,
                              start_seconds):
                raise AssertionError("no port file")
            if self.process.poll() is not None:
                raise AssertionError(f"exit {self.process.returncode}: {self.log()}")
            self.port, self.http_port = map(int, ports.read_text().split())
            self.target = f"127.0.0.1:{self.port}"
            self.channel = self.new_channel()
            self.stub = prefill_pb2_grpc.PrefillServiceStub(self.channel)
            if ready and not eventually(lambda: self.http("/readyz")[0] == 200, start_seconds):
                raise AssertionError(f"not ready: {self.log()}")
        except BaseException:
            self.close()
            raise

    def new_channel(self) -> grpc.Channel:
        return grpc.insecure_channel(
            self.target, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def log_lines(self, event: str) -> list[dict]:
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def http(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.http_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, series: str) -> float:
        for line in self.http("/metrics")[1].splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no series {series}")

    def health(self, service: str = "") -> int:
        """grpc.health.v1: 1 SERVING, 2 NOT_SERVING, 0 an error. By hand: no generated code."""
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
        try:
            return check(request, timeout=5)[1]
        except grpc.RpcError:
            return 0

    def prefill(self, request: pb.PrefillRequest, timeout: float = 60, stub=None) -> Snapshot:
        snapshot = Snapshot()
        for event in (stub or self.stub).Prefill(request, timeout=timeout):
            snapshot.add(event)
        return snapshot

    def refusal(self, request: pb.PrefillRequest, timeout: float = 60) -> grpc.RpcError:
        try:
            self.prefill(request, timeout)
        except grpc.RpcError as error:
            return error
        raise AssertionError("the call succeeded")

    def idle(self) -> bool:
        """Nothing queued, running or buffered, and every slot free."""
        return all(self.metric(f"sparsegdn_{name}") == 0 for name in
                   ("queue_requests", "queue_tokens", "running_requests", "slow_reader_bytes"))

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if hasattr(self, "channel"):
            self.channel.close()
        self._folder.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
