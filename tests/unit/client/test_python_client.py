"""Goal: a caller of PrefillClient holds a complete verified snapshot or an exception.

Method: a server in Python that plays one good stream, broken in one way per row of FAULTS. Contents
are compared exactly: no tolerance.
"""

import math
import threading
import time
import unittest

import numpy as np
from fake_server import FAULTS, IDENTITY, FakeServer, make_snapshot, next_token
from sparsegdn_client import (
    Budget,
    Cancellation,
    IntegrityError,
    Outputs,
    PrefillClient,
    PrefillError,
    Snapshot,
    TensorInfo,
    bf16_to_float32,
    float32_to_bf16,
    fp8_e4m3_to_float32,
)
from sparsegdn_client.security import check_token_may_travel
from sparsegdn_client.types import DENSE, NOTHING

TOKENS = list(range(40, 80))


class ClientTest(unittest.TestCase):
    def setUp(self):
        self.server = self.enterContext(FakeServer())
        self.client = self.enterContext(
            PrefillClient(self.server.target, max_snapshot_bytes=1 << 20)
        )

    def enterContext(self, manager):  # unittest has it from Python 3.11 on
        self.addCleanup(manager.__exit__, None, None, None)
        return manager.__enter__()

    def test_good_stream_gives_every_byte(self):
        done = self.client.prefill(TOKENS, budget=Budget(retention=0.29))
        expected = make_snapshot(TOKENS[:-1])
        self.assertEqual(list(done.snapshot), list(expected))
        for name in expected:
            np.testing.assert_array_equal(done.snapshot[name], expected[name])
        self.assertEqual(done.snapshot.infos, expected.infos)
        self.assertEqual(done.snapshot.digest, done.result.digest)
        self.assertEqual(done.snapshot.model_identity, IDENTITY)
        self.assertEqual(done.result.budget.retention, 0.29)
        self.assertEqual(done.result.usage.computed_tokens, len(TOKENS))
        self.assertEqual(done.result.retained, {0: (0.5,)})
        self.assertIsNone(done.result.next_token)
        self.assertGreater(done.total_seconds, 0)

    def test_a_list_of_servers(self):
        with FakeServer() as other:
            targets = f"{self.server.target},{other.target},127.0.0.1:1"
            with PrefillClient(targets) as client:
                for _ in range(20):
                    client.prefill(TOKENS)
            self.assertGreaterEqual(len(self.server.requests), 5)
            self.assertGreaterEqual(len(other.requests), 5)
        for bad in ("a:1,b:2", "10.0.0.1:1,", "10.0.0.1:1,[::1]:2", "10.0.0.1,10.0.0.2"):
            with self.subTest(bad), self.assertRaises(ValueError):
                PrefillClient(bad)

    def test_restarts(self):
        self.server.gone = 2
        self.client.prefill(TOKENS, restarts=2)
        self.assertEqual(len(self.server.requests), 3)
        self.server.gone = 2
        with self.assertRaises(PrefillError) as caught:
            self.client.prefill(TOKENS, restarts=1)
        self.assertEqual(caught.exception.code, "UNAVAILABLE")
        self.server.gone = 1
        with self.assertRaises(PrefillError):
            self.client.prefill(TOKENS)  # none unless asked for
        self.server.gone = 1000
        start = time.monotonic()
        with self.assertRaises(PrefillError):
            self.client.prefill(TOKENS, restarts=1000, timeout=0.5)
        self.assertLess(time.monotonic() - start, 3)

    def test_reuse_and_pin_are_sent(self):
        self.client.prefill(TOKENS)
        self.client.prefill(TOKENS, keep=True, pin=True, prefix_reuse=False)
        first, second = self.server.requests
        self.assertEqual((first.prefix_reuse, first.HasField("keep_snapshot")), (0, False))
        self.assertEqual((second.prefix_reuse, second.keep_snapshot.pin), (2, True))

    def test_every_fault_is_an_error(self):
        for name, (_, reason) in FAULTS.items():
            with self.subTest(name):
                with self.assertRaises(PrefillError) as caught:
                    self.client.prefill(TOKENS, request_id=f"fault:{name}")
                self.assertEqual(caught.exception.reason, reason)
                is_integrity = isinstance(caught.exception, IntegrityError)
                self.assertEqual(is_integrity, reason != "SNAPSHOT_TOO_LARGE")

    def test_own_bound_on_the_size(self):
        with PrefillClient(self.server.target, max_snapshot_bytes=100) as client:
            with self.assertRaises(PrefillError) as caught:
                client.prefill(TOKENS)
        self.assertIn("this client takes at most 100", caught.exception.message)

    def test_result_then_error_is_an_error(self):
        with self.assertRaises(PrefillError) as caught:
            self.client.prefill(TOKENS, request_id="error_at_end")
        self.assertEqual(caught.exception.code, "INTERNAL")

    def test_refusal_carries_its_details(self):
        with self.assertRaises(PrefillError) as caught:
            self.client.prefill([])
        error = caught.exception
        self.assertEqual((error.code, error.field, error.reason),
                         ("INVALID_ARGUMENT", "token_ids", "EMPTY_PROMPT"))
        with self.assertRaises(PrefillError) as caught:
            self.client.prefill(TOKENS, request_id="full")
        self.assertEqual(caught.exception.retry_after_seconds, 2.5)

    def test_deadline_reaches_the_server(self):
        with self.assertRaises(PrefillError) as caught:
            self.client.prefill(TOKENS, request_id="stall", timeout=0.2)
        self.assertEqual(caught.exception.code, "DEADLINE_EXCEEDED")
        self.assertTrue(self.server.saw_cancel.wait(10))

    def test_cancel_from_another_thread_and_before_the_call(self):
        cancellation = Cancellation()
        threading.Timer(0.2, cancellation.cancel).start()
        for _ in range(2):
            with self.assertRaises(PrefillError) as caught:
                self.client.prefill(TOKENS, request_id="stall", cancellation=cancellation)
            self.assertEqual(caught.exception.code, "CANCELLED")
        self.assertTrue(self.server.saw_cancel.wait(10))

    def test_exception_in_the_callback_cancels_the_server(self):
        def progress(p):
            if p.stage == "streaming":
                raise KeyError("mine")

        with self.assertRaises(KeyError):
            self.client.prefill(TOKENS, request_id="stall", progress=progress)
        self.assertTrue(self.server.saw_cancel.wait(10))

    def test_progress_grows_and_ends_complete(self):
        seen = []
        self.client.prefill(TOKENS, progress=seen.append)
        self.assertEqual(seen[0].queue_position, 1)
        self.assertEqual([p.bytes_done for p in seen], sorted(p.bytes_done for p in seen))
        self.assertEqual(seen[-1].bytes_done, seen[-1].bytes_total)
        self.assertEqual(seen[-1].stage, "streaming")

    def test_request_carries_every_argument(self):
        self.client.prefill(
            np.asarray(TOKENS, np.int16),
            budget=Budget(mode="retention", retention=0.5, min_retention=0.1, keep_last=0,
                          selector="write_norm", solver="exact", local="none"),
            snapshot_at="after_last",
            outputs=Outputs(kv=False, state_dtype="bf16", state_layout="value_major",
                            conv_layout="three_columns", checkpoint_every=64,
                            logits_positions=[3, 4], top_k=2, prompt_logprobs_from=1),
            keep=True, ttl_seconds=9, priority=-3, expect_model=IDENTITY, tenant="t",
        )
        request = self.server.requests[-1]
        self.assertEqual(list(request.token_ids), TOKENS)
        self.assertTrue(request.budget.HasField("keep_last"))
        self.assertFalse(request.budget.HasField("keep_first"))
        self.assertEqual((request.budget.selector, request.budget.solver, request.budget.local),
                         (2, 2, 2))
        self.assertEqual((request.outputs.state_dtype, request.outputs.state_layout), (2, 2))
        self.assertFalse(request.outputs.kv)
        self.assertFalse(request.outputs.HasField("state"))
        self.assertEqual(list(request.outputs.logits.positions), [3, 4])
        self.assertEqual(request.keep_snapshot.ttl_seconds, 9)
        self.assertEqual(request.worker.format_version, 1)
        self.assertFalse(request.HasField("first_position"))

    def test_bad_arguments_are_refused_here(self):
        rows = {
            "floats": lambda: self.client.prefill([1.5]),
            "matrix": lambda: self.client.prefill([[1], [2]]),
            "too large": lambda: self.client.prefill([1 << 31]),
            "word": lambda: self.client.prefill([1], snapshot_at="sometime"),
            "top_k alone": lambda: self.client.prefill([1], outputs=Outputs(top_k=3)),
            "target": lambda: PrefillClient(""),
        }
        for name, call in rows.items():
            with self.subTest(name), self.assertRaises(ValueError):
                call()
        self.assertEqual(self.server.requests, [])

    def test_integers_out_of_range_are_named(self):
        prefill = self.client.prefill
        rows = {
            "priority is 2147483648": lambda: prefill([1], priority=1 << 31),
            "first_position is 9223372036854775808": lambda: prefill([1], first_position=1 << 63),
            "ttl_seconds is -1": lambda: prefill([1], keep=True, ttl_seconds=-1),
            "ttl_seconds is 4294967296": lambda: self.client.import_snapshot(
                prefill([2, 3]).snapshot, ttl_seconds=1 << 32),
            "budget.keep_last is": lambda: prefill([1], budget=Budget(keep_last=1 << 64)),
            "outputs.top_k is -3": lambda: prefill(
                [1], outputs=Outputs(logits_positions=[0], top_k=-3)),
            "outputs.logits_positions[1] is": lambda: prefill(
                [1], outputs=Outputs(logits_positions=[0, 1 << 63])),
            "outputs.checkpoint_every is 1.5, must be an integer": lambda: prefill(
                [1], outputs=Outputs(checkpoint_every=1.5)),
        }
        for message, call in rows.items():
            with self.subTest(message), self.assertRaises(ValueError) as raised:
                call()
            self.assertIn(message, str(raised.exception))

    def test_a_token_in_clear_text_stays_on_this_machine(self):
        for local in ("127.0.0.1:5", "127.8.9.1:5", "localhost:5", "localhost", "[::1]:5", "[::1]",
                      "dns:///127.0.0.1:5", "unix:/tmp/s", "127.0.0.1:5,127.0.0.2:5"):
            check_token_may_travel(local, False, False)
        for remote in ("127.0.0.1.example.com:5", "127.example.com", "localhost.example.com:5",
                       "dns:///127.0.0.1.example.com:5", "127.0.0.1:5,10.0.0.1:5"):
            with self.subTest(remote), self.assertRaises(ValueError):
                check_token_may_travel(remote, False, False)

    def test_timeouts_without_end(self):
        for timeout in (math.inf, 1e300, 1e12):
            self.assertTrue(self.client.model_info(timeout=timeout).model_identity)
            self.client.prefill(TOKENS, timeout=timeout)
        with self.assertRaisesRegex(ValueError, "timeout is nan"):
            self.client.model_info(timeout=math.nan)

    def test_import_of_what_is_no_snapshot(self):
        for wrong in (None, "path"):
            with self.assertRaises(TypeError) as raised:
                self.client.import_snapshot(wrong)
            self.assertEqual(str(raised.exception),
                             f"snapshot is {type(wrong).__name__}, must be a Snapshot")

    def test_resume_and_release(self):
        first = self.client.prefill(TOKENS, snapshot_at="after_last", keep=True, outputs=NOTHING)
        self.assertEqual(len(first.snapshot), 0)
        self.assertEqual(first.result.next_token, next_token(TOKENS))
        more = [first.result.next_token]
        second = self.client.prefill(more, resume_from=first.result.snapshot_id, budget=DENSE,
                                     snapshot_at="after_last")
        self.assertEqual(second.result.next_token, next_token(TOKENS + more))
        self.client.release(first.result.snapshot_id)
        with self.assertRaises(PrefillError) as caught:
            self.client.release(first.result.snapshot_id)
        self.assertEqual(caught.exception.code, "NOT_FOUND")

    def test_import_then_resume(self):
        snapshot = self.client.prefill(TOKENS, snapshot_at="after_last").snapshot
        ref = self.client.import_snapshot(snapshot, ttl_seconds=7)
        self.assertEqual((ref.position, ref.ttl_seconds), (len(TOKENS), 7))
        done = self.client.prefill([1], resume_from=ref.snapshot_id, snapshot_at="after_last")
        self.assertEqual(done.result.next_token, next_token(TOKENS + [1]))

    def test_import_refusal(self):
        other = Snapshot("other", 0, [], [])
        with self.assertRaises(PrefillError) as caught:
            self.client.import_snapshot(other)
        self.assertEqual(caught.exception.code, "FAILED_PRECONDITION")

    def test_wait_until_ready(self):
        self.server.loading = True
        threading.Timer(0.3, lambda: setattr(self.server, "loading", False)).start()
        self.assertEqual(self.client.wait_until_ready(10).model_name, "fake")
        self.server.loading = True
        with self.assertRaises(PrefillError) as caught:
            self.client.wait_until_ready(0.3)
        self.assertEqual(caught.exception.code, "UNAVAILABLE")

    def test_unavailable_before_the_first_answer_is_tried_again(self):
        self.server.unavailable = 2
        before = len(self.server.requests)
        self.client.prefill(TOKENS)
        self.assertEqual(len(self.server.requests) - before, 3)
        self.server.unavailable = 1
        with PrefillClient(self.server.target, max_attempts=1) as once:
            with self.assertRaises(PrefillError) as caught:
                once.prefill(TOKENS)
        self.assertEqual(caught.exception.code, "UNAVAILABLE")
        for attempts in (0, 6):
            with self.assertRaises(ValueError):
                PrefillClient("127.0.0.1:1", max_attempts=attempts)

    def test_two_threads_share_a_client(self):
        results = {}

        def work(i):
            results[i] = self.client.prefill(TOKENS + [i], snapshot_at="after_last").result

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(4):
            self.assertEqual(results[i].next_token, next_token(TOKENS + [i]))


class ConversionTest(unittest.TestCase):
    def test_bf16_rounds_to_nearest_even(self):
        rows = [(1.0, 1.0), (1.00390625, 1.0), (1.01171875, 1.015625), (np.inf, np.inf),
                (3.4e38, np.inf), (-0.0, -0.0)]
        values = np.array([v for v, _ in rows], np.float32)
        expected = np.array([e for _, e in rows], np.float32)
        np.testing.assert_array_equal(bf16_to_float32(float32_to_bf16(values)), expected)
        nan = np.array([np.nan, -np.nan], np.float32)
        self.assertTrue(np.isnan(bf16_to_float32(float32_to_bf16(nan))).all())

    def test_bf16_bits_survive(self):
        bits = np.arange(65536, dtype=np.uint16)
        values = bf16_to_float32(bits)
        kept = ~np.isnan(values)
        np.testing.assert_array_equal(float32_to_bf16(values[kept]), bits[kept])

    def test_fp8_table(self):
        rows = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x39: 1.125,
                0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}
        got = fp8_e4m3_to_float32(np.array(list(rows), np.uint8))
        np.testing.assert_array_equal(got, np.array(list(rows.values()), np.float32))
        self.assertTrue(np.isnan(fp8_e4m3_to_float32(np.array([0x7F, 0xFF], np.uint8))).all())

    def test_one_layout_whatever_the_stream_carried(self):
        state = np.arange(24, dtype=np.float32).reshape(2, 3, 4)  # [Hv, Dk, Dv]
        conv = np.arange(20, dtype=np.float32).reshape(5, 4)
        by_value = np.ascontiguousarray(state.transpose(0, 2, 1))
        scale = np.full((2, 4), 2.0, np.float32)
        fp8 = np.full((2, 4, 3), 0x38, np.uint8)  # 1.0
        rows = {
            "fp32": ("fp32", "key_major", state, state),
            "bf16": ("bf16", "key_major", float32_to_bf16(state), state),
            "value_major": ("fp32", "value_major", by_value, state),
            "fp8": ("fp8_e4m3", "value_major", fp8, np.full((2, 3, 4), 2.0, np.float32)),
        }
        for name, (dtype, layout, array, expected) in rows.items():
            with self.subTest(name):
                infos = [
                    TensorInfo("layers.0.recurrent_state", "recurrent_state", 0, dtype, array.shape,
                               array.nbytes, 9, state_layout=layout),
                    TensorInfo("layers.0.recurrent_state_scale", "recurrent_state_scale", 0, "fp32",
                               scale.shape, scale.nbytes, 9),
                    TensorInfo("layers.0.conv_state", "conv_state", 0, "fp32", (5, 3), 60, 9,
                               conv_layout="three_columns"),
                ]
                snapshot = Snapshot("", 9, infos, [array, scale, conv[:, 1:]])
                np.testing.assert_array_equal(snapshot.state(0), expected)
                np.testing.assert_array_equal(snapshot.conv_state(0)[:, 1:], conv[:, 1:])
                np.testing.assert_array_equal(snapshot.conv_state(0)[:, 0], 0)
                self.assertEqual(snapshot.layers("recurrent_state"), [0])
                with self.assertRaises(KeyError):
                    snapshot.state(1)

    def test_joined_puts_the_rows_of_the_base_first(self):
        def part(first, rows):
            key = np.arange(first, first + rows, dtype=np.float32).reshape(rows, 1, 1)
            info = TensorInfo("layers.3.key", "key", 3, "fp32", key.shape, key.nbytes, first)
            return Snapshot("", first + rows, [info], [key])

        whole = part(4, 3).joined(part(0, 4))
        expected = part(0, 7)
        self.assertEqual((whole.digest, whole.infos), (expected.digest, expected.infos))
        for base in (part(0, 3), part(0, 5), Snapshot("", 4, [], [])):
            with self.assertRaises(ValueError):
                part(4, 3).joined(base)


if __name__ == "__main__":
    unittest.main()
