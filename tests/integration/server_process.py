"""Starts the built server on a bundled model, and reads what the tests compare with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from sparsegdn_client import PrefillClient

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests/data/models"
GOLDEN = ROOT / "tests/golden"


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All F32 and I32 tensors of a plain safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + o for o in entry["data_offsets"])
        dtype = {"F32": "<f4", "I32": "<i4"}[entry["dtype"]]
        tensors[name] = np.frombuffer(data[begin:end], dtype).reshape(entry["shape"])
    return tensors


class ServerProcess:
    """`sparsegdn-server` on a free port with a copy of a bundled model; a context manager.

    The model is copied because the server caches the identity beside it. TEST_SERVER_BINARY
    names the executable.
    """

    def __init__(self, model: str, *flags: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.model = folder / model
        shutil.copytree(MODELS / model, self.model)
        ports = folder / "ports"
        self.log = folder / "server.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [os.environ["TEST_SERVER_BINARY"], "--model", self.model, "--backend", "cpu",
                 "--listen", "127.0.0.1:0", "--metrics-listen", "", "--port-file", ports,
                 # Each prefill is computed, also one of a prompt seen before.
                 "--prefix-cache-bytes", "0", *flags],
                stdout=log, stderr=subprocess.STDOUT,
                env=dict(os.environ, SPARSEGDN_SERVER="the client's own variable"))
        try:
            self.target = f"127.0.0.1:{self._port(ports)}"
            with PrefillClient(self.target) as client:
                self.info = client.wait_until_ready(60)
        except BaseException:
            self.stop()
            raise

    def _port(self, ports: Path) -> int:
        for _ in range(600):
            if ports.exists() and len(lines := ports.read_text().split()) == 2:
                return int(lines[0])
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text()}")
            time.sleep(0.1)
        raise RuntimeError(f"no port after 60 s: {self.log.read_text()}")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._folder.cleanup()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
