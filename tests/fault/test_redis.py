"""Redis away, killed, hanging or full: no request fails, and every snapshot is whole and right.

The servers share stored prefixes through a real redis-server, started and ended here.
"""

from __future__ import annotations

import signal
import threading
import time
import unittest

from harness import Server, eventually, prompt
from redis_process import Redis
from sparsegdn.v1 import prefill_pb2 as pb

WINDOW = 2048
DENSE = pb.Budget(mode=pb.BUDGET_MODE_DENSE)
FAST = ("--redis-timeout-ms", "300", "--redis-fetch-ms", "600")


def request(windows: int, seed: int, **fields) -> pb.PrefillRequest:
    return prompt(windows * WINDOW + 40, seed, budget=DENSE, **fields)


def hits(server: Server, tier: str) -> float:
    return server.metric(f'sparsegdn_prefix_cache_hits_total{{tier="{tier}"}}')


def errors(server: Server) -> float:
    return sum(server.metric(f'sparsegdn_prefix_cache_redis_errors_total{{direction="{d}"}}')
               for d in ("read", "write"))


class RedisTest(unittest.TestCase):
    def run_one(self, server: Server, windows: int, seed: int):
        """A cold request's snapshot and the same through the store: whole, and the same bytes."""
        snapshot = server.prefill(request(windows, seed))
        self.assertTrue(snapshot.whole)
        return snapshot

    def test_replicas_share_prefixes(self) -> None:
        with Redis() as redis, Server("--redis", redis.url) as a, Server("--redis", redis.url) as b:
            first = self.run_one(a, 3, seed=1)
            # Header, state and KV of three windows.
            self.assertTrue(eventually(lambda: redis.size() == 9), redis.size())
            second = self.run_one(b, 3, seed=1)
            self.assertEqual(second.result.usage.cached_tokens, 3 * WINDOW)
            self.assertEqual(second.tensors, first.tensors)
            self.assertEqual((hits(b, "redis"), hits(b, "memory"), hits(a, "redis")), (1, 0, 0))
            self.assertGreater(
                b.metric('sparsegdn_prefix_cache_redis_bytes_total{direction="read"}'), 1000)
            third = self.run_one(b, 3, seed=1)
            self.assertEqual(third.tensors, first.tensors)
            self.assertEqual(hits(b, "memory"), 1)
            # A tenant of another name finds nothing.
            other = b.prefill(request(3, 1, tenant="other"))
            self.assertEqual(other.result.usage.cached_tokens, 0)
            self.assertNotIn(b"other", redis.command("RANDOMKEY"))

    def test_redis_away_at_start_and_found_later(self) -> None:
        with Redis() as redis:
            redis.kill()
            with Server("--redis", redis.url, *FAST) as server:
                for seed in range(4):
                    self.run_one(server, 1, seed)
                self.assertTrue(eventually(
                    lambda: server.metric("sparsegdn_prefix_cache_redis_up") == 0))
                redis.start()
                # The breaker lets one call through after a second or two, and closes.
                for seed in range(10, 40):
                    self.run_one(server, 1, seed)
                    if redis.size() > 0:
                        break
                    time.sleep(0.5)
                self.assertGreater(redis.size(), 0)
                self.assertTrue(eventually(
                    lambda: server.metric("sparsegdn_prefix_cache_redis_up") == 1))

    def test_kill_9_of_redis_under_load(self) -> None:
        with Redis() as redis, Server("--redis", redis.url, *FAST) as a, \
                Server("--redis", redis.url, *FAST) as b:
            wanted = {seed: self.run_one(a, 2, seed).tensors for seed in range(4)}
            failures: list[BaseException] = []
            stop = threading.Event()

            def load(server: Server, offset: int) -> None:
                count = offset
                while not stop.is_set():
                    count += 1
                    try:
                        got = server.prefill(request(2, count % 4))
                        assert got.whole and got.tensors == wanted[count % 4]
                        # One that nobody has, so that something is always being written.
                        assert server.prefill(request(1, 100 + count * 7 + offset)).whole
                    except BaseException as error:  # noqa: BLE001 - shown by the test
                        failures.append(error)
                        return

            threads = [threading.Thread(target=load, args=(s, i)) for i, s in enumerate((a, b))]
            for thread in threads:
                thread.start()
            time.sleep(1.0)
            redis.kill()
            time.sleep(2.0)
            redis.start()
            time.sleep(2.5)
            stop.set()
            for thread in threads:
                thread.join()
            self.assertEqual(failures, [])
            self.assertGreater(errors(a) + errors(b), 0)
            self.assertEqual(a.metric('sparsegdn_prefix_cache_corrupt_total') +
                             b.metric('sparsegdn_prefix_cache_corrupt_total'), 0)
            self.assertTrue(eventually(a.idle) and eventually(b.idle))

    def test_redis_that_hangs_delays_and_fails_nobody(self) -> None:
        with Redis() as redis, Server("--redis", redis.url, *FAST) as server:
            self.run_one(server, 1, seed=1)
            redis.signal(signal.SIGSTOP)
            try:
                for seed in range(2, 8):
                    start = time.monotonic()
                    self.run_one(server, 1, seed)
                    self.assertLess(time.monotonic() - start, 5)
                # The breaker is open by now: nobody waits.
                self.assertEqual(server.metric("sparsegdn_prefix_cache_redis_up"), 0)
                self.assertEqual(self.run_one(server, 1, seed=1).result.usage.cached_tokens, WINDOW)
            finally:
                redis.signal(signal.SIGCONT)

    def test_redis_at_maxmemory(self) -> None:
        with Redis("--maxmemory", "3mb") as redis, Server("--redis", redis.url, *FAST) as server:
            for seed in range(12):
                self.run_one(server, 1, seed)
            self.assertGreater(
                server.metric('sparsegdn_prefix_cache_redis_errors_total{direction="write"}'), 0)
            for seed in range(12):
                self.assertEqual(self.run_one(server, 1, seed).result.usage.cached_tokens, WINDOW)

    def test_rubbish_in_redis_is_dropped_and_computed(self) -> None:
        with Redis() as redis, Server("--redis", redis.url) as a:
            first = self.run_one(a, 2, seed=1)
            self.assertTrue(eventually(lambda: redis.size() == 6), redis.size())
            spoil = "for _,k in ipairs(redis.call('KEYS','*:s0')) do redis.call('SET',k,'x') end"
            redis.command("EVAL", spoil, "0")
            with Server("--redis", redis.url) as b:
                got = self.run_one(b, 2, seed=1)
                self.assertEqual(got.result.usage.cached_tokens, 0)
                self.assertEqual(got.tensors, first.tensors)
                self.assertGreater(b.metric("sparsegdn_prefix_cache_corrupt_total"), 0)

    def test_sigterm_while_redis_hangs(self) -> None:
        with Redis() as redis, Server("--redis", redis.url, "--drain-seconds", "5") as server:
            redis.signal(signal.SIGSTOP)
            try:
                self.run_one(server, 1, seed=1)
                self.assertEqual(server.stop(timeout=20), 0)
            finally:
                redis.signal(signal.SIGCONT)


if __name__ == "__main__":
    unittest.main(verbosity=2)
