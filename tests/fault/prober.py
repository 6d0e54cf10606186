"""Asks a server under load over and over whether it still answers, and how long that takes."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

from harness import Server

SERVICE, SERVING = "sparsegdn.v1.PrefillService", 1
PAUSE_SECONDS = 0.02


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Prober(threading.Thread):
    """A context manager: probes in turn for as long as it is open; `failed` holds wrong answers."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.probes: dict[str, Callable[[], bool]] = {
            "/metrics": lambda: server.http("/metrics")[0] == 200,
            "/livez": lambda: server.http("/livez")[0] == 200,
            "grpc.health.v1": lambda: server.health(SERVICE) == SERVING}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.probes}
        self.failed: list[str] = []
        self._closed = threading.Event()

    def run(self) -> None:
        while True:
            for name, probe in self.probes.items():
                start = time.monotonic()
                try:
                    if not probe():
                        self.failed.append(name)
                except Exception as error:  # noqa: BLE001  a thread's failure is its user's
                    self.failed.append(f"{name}: {error!r}")
                self.seconds[name].append(time.monotonic() - start)
            if self._closed.wait(PAUSE_SECONDS):
                return

    def summary(self) -> dict[str, dict]:
        return {name: {"probes": len(seconds),
                       "p50_ms": round(statistics.median(seconds) * 1e3, 3),
                       "p99_ms": round(percentile(seconds, 0.99) * 1e3, 3),
                       "max_ms": round(max(seconds) * 1e3, 3)}
                for name, seconds in self.seconds.items()}

    def __enter__(self) -> Prober:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.join()
