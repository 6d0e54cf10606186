"""Three servers behind the clients' round_robin over a static list, with a shared Redis; one is
killed and one is drained under load. No request is lost that the client runs again, and replicas
find each other's prefixes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import unittest

import numpy as np
from harness import Server, clean_environment, eventually
from redis_process import Redis
from sparsegdn_client import Budget, PrefillClient, PrefillError

WINDOW = 2048
DENSE = Budget(mode="dense")


def tokens(seed: int, count: int = 5 * WINDOW + 100, shared: int = 3 * WINDOW) -> list[int]:
    """Prompts of one group share their first three windows."""
    group = seed % 3
    head = [(i * 31 + group * 7) % 512 for i in range(shared)]
    return head + [(i * 17 + seed * 13 + 5) % 512 for i in range(count - shared)]


class ScaleOutTest(unittest.TestCase):
    def setUp(self) -> None:
        self.redis = self.enterContext(Redis()) if hasattr(self, "enterContext") else None
        if self.redis is None:
            self.redis = Redis()
            self.addCleanup(self.redis.__exit__)
        self.servers = []
        for _ in range(3):
            server = Server("--redis", self.redis.url, "--threads", "1")
            self.addCleanup(server.close)
            self.servers.append(server)
        self.list = ",".join(server.target for server in self.servers)

    def hits(self, server: Server) -> float:
        return sum(server.metric(f'sparsegdn_prefix_cache_hits_total{{tier="{tier}"}}')
                   for tier in ("memory", "redis"))

    def test_killed_and_drained_under_load(self) -> None:
        lost, drained, left = self.servers
        with PrefillClient(left.target) as alone:
            wanted = {seed: alone.prefill(tokens(seed), budget=DENSE, prefix_reuse=False).snapshot
                      for seed in range(6)}
        done: list[int] = []
        failures: list[BaseException] = []
        stop = threading.Event()
        with PrefillClient(self.list, max_attempts=5) as client:
            def load(worker: int) -> None:
                count = worker
                while not stop.is_set():
                    count += 1
                    seed = count % 6
                    try:
                        got = client.prefill(tokens(seed), budget=DENSE, restarts=20, timeout=120)
                        for name, array in wanted[seed].items():
                            np.testing.assert_array_equal(got.snapshot[name], array)
                        done.append(seed)
                    except BaseException as error:  # noqa: BLE001 - shown by the test
                        failures.append(error)
                        return

            threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
            for thread in threads:
                thread.start()
            # All three serve, then one dies while it computes for somebody.
            self.assertTrue(eventually(lambda: all(
                s.metric('sparsegdn_requests_total{code="OK",method="Prefill"}') > 0
                for s in self.servers), 60))
            self.assertTrue(eventually(
                lambda: lost.metric("sparsegdn_running_requests") > 0, 30))
            lost.stop(signal.SIGKILL)
            before = len(done)
            self.assertTrue(eventually(lambda: len(done) >= before + 6, 60), failures)
            drained.process.send_signal(signal.SIGTERM)
            self.assertEqual(drained.process.wait(60), 0)
            before = len(done)
            self.assertTrue(eventually(lambda: len(done) >= before + 6, 60), failures)
            stop.set()
            for thread in threads:
                thread.join()
        self.assertEqual(failures, [])
        self.assertGreater(self.hits(left), 0)
        self.assertTrue(eventually(left.idle))

    def test_a_prefix_of_one_replica_is_found_by_all(self) -> None:
        first, *others = self.servers
        with PrefillClient(first.target) as client:
            wanted = client.prefill(tokens(1), budget=DENSE).snapshot
        # Five windows: a header, a state and a KV each.
        self.assertTrue(eventually(lambda: self.redis.size() == 15), self.redis.size())
        for server in others:
            with PrefillClient(server.target) as client:
                got = client.prefill(tokens(1), budget=DENSE)
            self.assertEqual(got.result.usage.cached_tokens, 5 * WINDOW)
            for name, array in wanted.items():
                np.testing.assert_array_equal(got.snapshot[name], array)
            self.assertEqual(
                server.metric('sparsegdn_prefix_cache_hits_total{tier="redis"}'), 1)
            self.assertEqual(
                server.metric("sparsegdn_prefix_cache_tokens_saved_total"), 5 * WINDOW)

    def test_a_call_without_restarts_ends_in_unavailable(self) -> None:
        lost = self.servers[0]
        with PrefillClient(lost.target, max_attempts=1) as client:
            caught: list[PrefillError] = []

            def call() -> None:
                try:
                    client.prefill(tokens(1, count=60 * WINDOW), budget=DENSE)
                except PrefillError as error:
                    caught.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            self.assertTrue(eventually(
                lambda: lost.metric("sparsegdn_running_requests") > 0, 30))
            lost.stop(signal.SIGKILL)
            thread.join(30)
        self.assertEqual([error.code for error in caught], ["UNAVAILABLE"])

    def test_the_command_line_takes_the_list(self) -> None:
        self.servers[0].stop(signal.SIGKILL)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(" ".join(map(str, tokens(1))))
            file.flush()
            for _ in range(4):
                run = subprocess.run(
                    [os.environ["FAULT_CLI"], "prefill", file.name, "--server", self.list,
                     "--dense", "--restarts", "3", "--json", "--quiet"],
                    capture_output=True, text=True, timeout=60, env=clean_environment())
                self.assertEqual(run.returncode, 0, run.stderr)
                json.loads(run.stdout)
        served = [s.metric('sparsegdn_requests_total{code="OK",method="Prefill"}')
                  for s in self.servers[1:]]
        self.assertEqual(sum(served), 4)


if __name__ == "__main__":
    unittest.main(verbosity=2)
