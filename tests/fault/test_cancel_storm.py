"""Cancels at random moments: nothing leaks, little is wasted, scrapes and health checks stay quick.

STORM_CANCELS is the number of cancels: 10,000 in the long form, 300 in the normal run, whose few
probes make no 99th percentile and are held to a second each. The server counts every token of a
cancelled prompt as wasted, also those computed before its cancel, so one chunk each is the mean.
STORM_JSON names a file for the figures, which is written before they are judged.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import unittest
from pathlib import Path

import grpc
from harness import ROOT, Server, eventually, prompt
from prober import Prober
from sparsegdn.v1 import prefill_pb2_grpc

sys.path.append(str(ROOT / "tests/bench"))
from service_overhead import commit, machine  # noqa: E402  needs the path

CANCELS = int(os.environ.get("STORM_CANCELS", "300"))
LONG_FORM = 10_000
CALLERS = 8
CHUNK = 2048  # tokens of one chunk at the default chunk_windows: a request's share of a step


class CancelStorm(unittest.TestCase):
    def storm(self, server: Server, cancels: int, seed: int) -> int:
        """Calls cancelled after 0 to 60 ms, while queued, computing or streaming; how many were."""
        rng = random.Random(seed)
        stub = prefill_pb2_grpc.PrefillServiceStub(server.new_channel())
        cancelled = 0
        for _ in range(cancels):
            call = stub.Prefill(prompt(rng.choice([64, 256, 4096, 20000])), timeout=60)
            timer = threading.Timer(rng.uniform(0, 0.06), call.cancel)
            timer.start()
            try:
                for _event in call:
                    pass
            except grpc.RpcError as error:
                self.assertEqual(error.code(), grpc.StatusCode.CANCELLED, error.details())
                cancelled += 1
            timer.join()
        return cancelled

    def test_storm(self) -> None:
        with Server(model="tiny-gdn") as server:
            slots = server.metric("sparsegdn_state_slots_free")
            cancelled: list[int] = []
            failures: list[BaseException] = []

            def run(seed: int) -> None:
                try:
                    cancelled.append(self.storm(server, CANCELS // CALLERS, seed))
                except BaseException as error:  # noqa: BLE001  a thread's failure is the test's
                    failures.append(error)

            threads = [threading.Thread(target=run, args=(seed,)) for seed in range(CALLERS)]
            begin = time.monotonic()
            with Prober(server) as prober:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            storm_seconds = time.monotonic() - begin
            self.assertEqual(failures, [])
            self.assertEqual(prober.failed, [])
            self.assertGreater(sum(cancelled), 0)
            self.assertTrue(eventually(server.idle), "something is still queued or running")
            leaked = slots - server.metric("sparsegdn_state_slots_free")
            wasted = server.metric("sparsegdn_wasted_tokens_total")
            figures = {"calls": CANCELS // CALLERS * CALLERS, "callers": CALLERS,
                       "cancelled": sum(cancelled), "storm_seconds": round(storm_seconds, 1),
                       "probes": prober.summary(), "leaked_state_slots": leaked,
                       "wasted_tokens": wasted,
                       "wasted_tokens_per_cancel": round(wasted / sum(cancelled), 1)}
            print(json.dumps(figures))
            if "STORM_JSON" in os.environ:
                script = "tests/fault/test_cancel_storm.py"
                report = {"command": f"STORM_CANCELS={CANCELS} python3 {script}",
                          "machine": machine(), "commit": commit(), "figures": figures}
                Path(os.environ["STORM_JSON"]).write_text(json.dumps(report, indent=1) + "\n")
            self.assertEqual(leaked, 0)
            self.assertTrue(server.prefill(prompt(20)).whole, "the next request must work")
            limit_ms = 100 if CANCELS >= LONG_FORM else 1000
            for name, row in figures["probes"].items():
                self.assertLess(row["p99_ms"], limit_ms, name)
            # Prompts average three chunks: a server that ran cancelled ones to their end fails.
            self.assertLessEqual(wasted, sum(cancelled) * CHUNK)


if __name__ == "__main__":
    unittest.main()
