"""Faults seen in public against servers of this kind; each row of the list that needs no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import grpc
import xxhash
from harness import Details, Server, Snapshot, eventually, prompt
from sparsegdn.v1 import prefill_pb2 as pb
from sparsegdn.v1 import prefill_pb2_grpc

CODE = grpc.StatusCode
NAN = float("nan")


class BadInput(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--max-prompt-tokens", 5000)
        cls.addClassCleanup(cls.server.close)

    def expect(self, request, code, field=None, reason=None):
        error = self.server.refusal(request)
        self.assertEqual(error.code(), code, error.details())
        details = Details(error)
        if field is not None:
            self.assertEqual(details.field, field, error.details())
        if reason is not None:
            self.assertEqual(details.reason, reason)
        self.assertTrue(self.server.prefill(prompt(20)).whole, "the next request must work")
        return error

    def test_token_ids_outside_the_vocabulary(self):
        for bad in (-1, 512, 2**31 - 1, -(2**31)):
            with self.subTest(bad):
                request = prompt(50)
                request.token_ids[17] = bad
                error = self.expect(request, CODE.INVALID_ARGUMENT, "token_ids[17]")
                self.assertIn(str(bad), error.details())

    def test_empty_prompt(self):
        self.expect(prompt(0), CODE.INVALID_ARGUMENT, "token_ids")

    def test_empty_prompt_beside_others(self):
        results = []

        def good():
            results.append(self.server.prefill(prompt(3000)).whole)

        threads = [threading.Thread(target=good) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            self.assertEqual(self.server.refusal(prompt(0)).code(), CODE.INVALID_ARGUMENT)
        for thread in threads:
            thread.join()
        self.assertEqual(results, [True] * 4)

    def test_prompt_longer_than_the_context(self):
        before = self.server.metric("sparsegdn_batch_tokens_count")
        error = self.server.refusal(prompt(5001))
        self.assertEqual(error.code(), CODE.OUT_OF_RANGE)
        self.assertEqual(self.server.metric("sparsegdn_batch_tokens_count"), before)
        self.assertTrue(self.server.prefill(prompt(5000)).whole)

    def test_message_beyond_the_receive_limit(self):
        request = pb.PrefillRequest(token_ids=[1] * (2 << 20))
        self.expect(request, CODE.RESOURCE_EXHAUSTED)

    def test_budgets_out_of_range(self):
        rows = [
            (pb.Budget(retention=0), "budget.retention"),
            (pb.Budget(retention=1.5), "budget.retention"),
            (pb.Budget(retention=-0.1), "budget.retention"),
            (pb.Budget(retention=NAN), "budget.retention"),
            (pb.Budget(coverage=NAN), "budget.coverage"),
            (pb.Budget(min_retention=0.5), "budget.retention"),
            (pb.Budget(max_retention=-1), "budget.max_retention"),
            (pb.Budget(keep_last=-1), "budget.keep_last"),
            (pb.Budget(retention=0.5, coverage=0.5), "budget.mode"),
            (pb.Budget(mode=pb.BUDGET_MODE_DENSE, retention=0.5), "budget.retention"),
            (pb.Budget(mode=pb.BUDGET_MODE_RETENTION, coverage=0.5), "budget.coverage"),
            (pb.Budget(mode=7), "budget.mode"),
            (pb.Budget(solver=7), "budget.solver"),
        ]
        for budget, field in rows:
            with self.subTest(str(budget)):
                self.expect(prompt(50, budget=budget), CODE.INVALID_ARGUMENT, field)

    def test_checkpoint_off_the_boundary(self):
        for every in (1, 64, 2047, -2048):
            with self.subTest(every):
                self.expect(prompt(3000, outputs=pb.Outputs(checkpoint_every=every)),
                            CODE.INVALID_ARGUMENT, "outputs.checkpoint_every")

    def test_another_model(self):
        self.expect(prompt(50, worker=pb.WorkerIdentity(model_identity="0" * 64)),
                    CODE.FAILED_PRECONDITION, "worker.model_identity")

    def test_unknown_snapshot(self):
        self.expect(prompt(50, resume_from="nope", first_position=3), CODE.NOT_FOUND, "resume_from")

    def upload(self, snapshot: Snapshot, manifest=None, flip=None, digest=None):
        def frames():
            yield pb.SnapshotFrame(header=pb.SnapshotHeader(manifest=manifest or snapshot.manifest))
            for index, tensor in enumerate(snapshot.tensors):
                data = bytearray(tensor)
                checksum = xxhash.xxh3_64_intdigest(bytes(data))
                if flip == index:
                    data[len(data) // 2] ^= 1
                yield pb.SnapshotFrame(chunk=pb.TensorChunk(tensor=index, data=bytes(data),
                                                            xxh3_64=checksum))
            yield pb.SnapshotFrame(
                end=pb.SnapshotEnd(digest=snapshot.result.digest if digest is None else digest))

        return self.server.stub.ImportSnapshot(frames(), timeout=20)

    def test_imports_that_are_not_what_they_say(self):
        snapshot = self.server.prefill(prompt(100))
        self.assertEqual(self.upload(snapshot).position, 99)
        other = pb.Manifest()
        other.CopyFrom(snapshot.manifest)
        other.model_identity = "f" * 64
        kept = self.server.metric("sparsegdn_kept_snapshots")
        rows = [
            ("another model", dict(manifest=other), CODE.FAILED_PRECONDITION),
            ("a flipped bit", dict(flip=0), CODE.DATA_LOSS),
            ("a wrong digest", dict(digest=1), CODE.DATA_LOSS),
        ]
        for name, change, code in rows:
            with self.subTest(name):
                with self.assertRaises(grpc.RpcError) as caught:
                    self.upload(snapshot, **change)
                self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertEqual(self.server.metric("sparsegdn_kept_snapshots"), kept)

    def test_upload_that_is_never_finished(self):
        def frames():
            yield pb.SnapshotFrame(chunk=pb.TensorChunk(data=b"x"))

        with self.assertRaises(grpc.RpcError) as caught:
            self.server.stub.ImportSnapshot(frames(), timeout=10)
        self.assertEqual(caught.exception.code(), CODE.INVALID_ARGUMENT)

    def test_every_code_is_counted_and_no_id_is_a_label(self):
        self.server.refusal(prompt(0, request_id="a-very-special-id"))
        text = self.server.http("/metrics")[1]
        self.assertNotIn("a-very-special-id", text)
        self.assertGreaterEqual(self.server.metric(
            'sparsegdn_requests_total{code="INVALID_ARGUMENT",method="Prefill"}'), 1)
        logged = eventually(lambda: [line for line in self.server.log_lines("prefill ended")
                                     if line["request_id"] == "a-very-special-id"])
        self.assertEqual(logged[0]["code"], "INVALID_ARGUMENT")

    def test_a_failed_release_is_logged(self):
        with self.assertRaises(grpc.RpcError):
            self.server.stub.ReleaseSnapshot(pb.ReleaseSnapshotRequest(snapshot_id="none"),
                                             timeout=10)
        logged = eventually(lambda: self.server.log_lines("release ended"))
        self.assertEqual(logged[0]["code"], "NOT_FOUND")
        self.assertEqual(len(logged[0]["request_id"]), 16)

    def test_reflection_lists_the_service(self):
        call = self.server.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        reply = next(call(iter([b"\x3a\x00"]), timeout=10))  # list_services: ""
        self.assertIn(b"sparsegdn.v1.PrefillService", reply)
        self.assertIn(b"grpc.health.v1.Health", reply)

    def test_traceparent_comes_back_and_is_logged(self):
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        events = list(self.server.stub.Prefill(prompt(20), timeout=10,
                                               metadata=[("traceparent", trace)]))
        self.assertEqual(events[-1].result.traceparent, trace)
        self.assertTrue(eventually(lambda: trace in self.server.log()))

    def test_prompts_are_not_logged(self):
        request = pb.PrefillRequest(token_ids=[487, 311] * 20, request_id="secret")
        self.assertTrue(self.server.prefill(request).whole)
        self.assertTrue(eventually(lambda: "secret" in self.server.log()))
        self.assertNotRegex(self.server.log(), r"487\D{1,3}311")


class Memory(unittest.TestCase):
    def test_fits_the_context_but_never_the_memory(self):
        with Server("--kv-tokens", 4096) as server:
            start = time.monotonic()
            error = server.refusal(prompt(20000))
            self.assertEqual(error.code(), CODE.RESOURCE_EXHAUSTED)
            self.assertEqual(Details(error).reason, "NEVER_FITS")
            self.assertIsNone(Details(error).retry_seconds)
            self.assertLess(time.monotonic() - start, 5)
            self.assertTrue(server.prefill(prompt(1000)).whole)


class Leaving(unittest.TestCase):
    """Clients that go away, stop reading, or come too late."""

    def start_client(self, server: Server) -> subprocess.Popen:
        """A client process in the middle of a long prefill."""
        here = os.path.dirname(os.path.abspath(__file__))
        client = subprocess.Popen([sys.executable, f"{here}/long_prefill.py", server.target],
                                  stdout=subprocess.PIPE)
        self.addCleanup(client.wait)
        self.addCleanup(client.stdout.close)
        self.addCleanup(client.kill)
        self.assertTrue(client.stdout.readline())
        self.assertTrue(eventually(lambda: server.metric("sparsegdn_running_requests") == 1))
        return client

    def test_client_killed_mid_prefill(self):
        with Server(model="tiny-gdn") as server:
            self.start_client(server).send_signal(signal.SIGKILL)
            self.assertTrue(eventually(server.idle), "the slot is not freed")
            self.assertEqual(server.metric('sparsegdn_cancelled_total{stage="computing"}'), 1)
            self.assertGreater(server.metric("sparsegdn_wasted_tokens_total"), 0)
            self.assertLess(server.metric("sparsegdn_wasted_tokens_total"), 200000)
            self.assertTrue(server.prefill(prompt(100)).whole)

    def test_client_stopped_without_a_word(self):
        # A stopped process keeps its connection; only the server's pings tell.
        # One thread, so that the prefill outlasts them.
        with Server("--threads", 1, "--keepalive-seconds", 1, "--keepalive-timeout-seconds", 1,
                    "--slow-reader-timeout-seconds", 600, model="tiny-gdn") as server:
            self.start_client(server).send_signal(signal.SIGSTOP)
            ended = 'sparsegdn_requests_total{code="CANCELLED",method="Prefill"}'
            self.assertTrue(eventually(lambda: server.metric(ended) == 1, 15))
            self.assertTrue(eventually(server.idle), "the slot is not freed")
            self.assertEqual(server.metric('sparsegdn_cancelled_total{stage="computing"}'), 1)

    def test_client_that_pings_every_second_keeps_its_call(self):
        # While its call waits in the queue no data flows, which is when pings count as abuse.
        with Server("--state-slots", 1, model="tiny-gdn") as server:
            running = server.stub.Prefill(prompt(250000), timeout=60)
            next(running)
            self.assertTrue(eventually(lambda: server.metric("sparsegdn_running_requests") == 1))
            options = [("grpc.keepalive_time_ms", 600), ("grpc.keepalive_permit_without_calls", 1),
                       ("grpc.http2.max_pings_without_data", 0)]
            with grpc.insecure_channel(server.target, options=options) as channel:
                call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prompt(50), timeout=60)
                self.assertEqual(next(call).WhichOneof("event"), "accepted")
                time.sleep(4)
                self.assertTrue(call.is_active(), "the connection was closed")
                running.cancel()
                self.assertEqual(list(call)[-1].WhichOneof("event"), "result")

    def test_client_that_does_not_read(self):
        with Server("--slow-reader-timeout-seconds", 1, "--max-buffered-bytes-per-call", 4 << 20,
                    model="tiny-gdn") as server:
            call = server.stub.Prefill(
                prompt(60000, outputs=pb.Outputs(checkpoint_every=2048)), timeout=60)
            next(call)
            ended = 'sparsegdn_requests_total{code="RESOURCE_EXHAUSTED",method="Prefill"}'
            most = 0.0

            def cut():
                nonlocal most
                most = max(most, server.metric("sparsegdn_slow_reader_bytes"))
                return server.metric(ended) == 1

            self.assertTrue(eventually(cut, 20), server.log())
            self.assertLess(most, 32 << 20)
            self.assertGreaterEqual(server.metric("sparsegdn_slow_readers_total"), 1)
            with self.assertRaises(grpc.RpcError):
                for event in call:
                    self.assertNotEqual(event.WhichOneof("event"), "result")
            self.assertTrue(eventually(server.idle))

    def test_client_that_stops_sending(self):
        with Server("--slow-reader-timeout-seconds", 1) as server:
            snapshot = server.prefill(prompt(100))
            over = threading.Event()
            self.addCleanup(over.set)

            def frames():
                yield pb.SnapshotFrame(header=pb.SnapshotHeader(manifest=snapshot.manifest))
                over.wait(30)

            with self.assertRaises(grpc.RpcError) as caught:
                server.stub.ImportSnapshot(frames(), timeout=20)
            self.assertEqual(caught.exception.code(), CODE.CANCELLED)  # the cut came first
            ended = eventually(lambda: server.log_lines("import ended"))[0]
            self.assertEqual((ended["code"], ended["message"]),
                             ("RESOURCE_EXHAUSTED", "the client sent nothing for too long"))
            self.assertEqual(server.metric("sparsegdn_kept_snapshot_bytes"), 0)

    def test_deadline_in_the_queue_costs_no_work(self):
        with Server("--state-slots", 1, model="tiny-gdn") as server:
            long = server.stub.Prefill(prompt(100000), timeout=60)
            next(long)
            self.assertTrue(eventually(lambda: server.metric("sparsegdn_running_requests") == 1))
            error = server.refusal(prompt(50), timeout=0.3)
            self.assertEqual(error.code(), CODE.DEADLINE_EXCEEDED)
            self.assertTrue(eventually(
                lambda: server.metric("sparsegdn_expired_in_queue_total") == 1))
            long.cancel()
            self.assertTrue(eventually(server.idle))
            self.assertEqual(server.metric("sparsegdn_batch_requests_bucket{le=\"1\"}"),
                             server.metric("sparsegdn_batch_requests_count"))

    def test_a_short_prompt_does_not_wait_for_a_long_one(self):
        with Server(model="tiny-gdn") as server:
            done = {}

            def run(name, tokens):
                stub = prefill_pb2_grpc.PrefillServiceStub(server.new_channel())
                done[name] = (server.prefill(prompt(tokens), stub=stub), time.monotonic())

            long = threading.Thread(target=run, args=("long", 60000))
            long.start()
            self.assertTrue(eventually(lambda: server.metric("sparsegdn_running_requests") == 1))
            steps = server.metric("sparsegdn_batch_tokens_count")
            run("short", 101)
            steps = server.metric("sparsegdn_batch_tokens_count") - steps
            long.join()
            self.assertTrue(done["short"][0].whole and done["long"][0].whole)
            self.assertLess(done["short"][1], done["long"][1])
            # One step that runs, its own, and one that begins while the answer is read; the
            # long prompt has 30.
            self.assertLessEqual(steps, 4)


class Stopping(unittest.TestCase):
    def test_sigterm_mid_transfer(self):
        with Server("--drain-seconds", 20, model="tiny-gdn") as server:
            call = server.stub.Prefill(
                prompt(30000, outputs=pb.Outputs(checkpoint_every=2048)), timeout=60)
            snapshot = Snapshot()
            while "chunk" not in snapshot.events:
                snapshot.add(next(call))
            server.process.send_signal(signal.SIGTERM)
            self.assertTrue(eventually(lambda: server.http("/readyz")[0] == 503))
            self.assertEqual(server.health("sparsegdn.v1.PrefillService"), 2)
            error = server.refusal(prompt(10))
            self.assertEqual(error.code(), CODE.UNAVAILABLE)
            self.assertEqual(Details(error).reason, "DRAINING")
            for event in call:
                snapshot.add(event)
            self.assertTrue(snapshot.whole)
            self.assertEqual(server.process.wait(20), 0)
            self.assertFalse(server.log_lines("drained")[0]["calls_cut"])

    def test_sigterm_while_computing(self):
        with Server("--drain-seconds", 30, model="tiny-gdn") as server:
            call = server.stub.Prefill(prompt(30000), timeout=60)
            snapshot = Snapshot()
            snapshot.add(next(call))
            server.process.send_signal(signal.SIGTERM)
            for event in call:
                snapshot.add(event)
            self.assertTrue(snapshot.whole)
            self.assertEqual(server.process.wait(20), 0)

    def test_a_drain_that_is_too_short_cuts(self):
        with Server("--drain-seconds", 1, model="tiny-gdn") as server:
            call = server.stub.Prefill(prompt(250000), timeout=60)
            next(call)
            start = time.monotonic()
            self.assertEqual(server.stop(signal.SIGINT), 0)
            self.assertLess(time.monotonic() - start, 8)
            with self.assertRaises(grpc.RpcError):
                for event in call:
                    self.assertNotEqual(event.WhichOneof("event"), "result")
            self.assertTrue(server.log_lines("drained")[0]["calls_cut"])

    def test_an_idle_server_stops_at_once_and_says_so(self):
        with Server() as server:
            start = time.monotonic()
            self.assertEqual(server.stop(), 0)
            self.assertLess(time.monotonic() - start, 3)
            self.assertEqual(len(server.log_lines("drained")), 1)

    def test_kill_9_leaves_the_client_an_error(self):
        with Server(model="tiny-gdn") as server:
            call = server.stub.Prefill(prompt(100000), timeout=60)
            next(call)
            self.assertEqual(server.stop(signal.SIGKILL), -signal.SIGKILL)
            with self.assertRaises(grpc.RpcError) as caught:
                for event in call:
                    self.assertNotEqual(event.WhichOneof("event"), "result")
            self.assertEqual(caught.exception.code(), CODE.UNAVAILABLE)


class Reloading(unittest.TestCase):
    def test_sighup_reloads_limits_alone(self):
        with Server(ready=False) as bare:  # only for a folder that lives as long as the test
            config = bare.folder / "config.json"
            config.write_text('{"limits": {"max_prompt_tokens": 100}}')
            with Server("--config", config) as server:
                self.assertEqual(server.refusal(prompt(101)).code(), CODE.OUT_OF_RANGE)
                config.write_text('{"limits": {"max_prompt_tokens": 200}, '
                                  '"budget": {"retention": 0.9}}')
                server.process.send_signal(signal.SIGHUP)
                self.assertTrue(eventually(lambda: server.log_lines("limits reloaded")))
                self.assertTrue(server.prefill(prompt(101)).whole)
                info = server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
                self.assertEqual(info.limits.max_context_tokens, 200)
                self.assertEqual(info.default_budget.retention, 0.29)
                config.write_text('{"limits": {"max_promt_tokens": 300}}')
                server.process.send_signal(signal.SIGHUP)
                failed = eventually(
                    lambda: server.log_lines("limits not reloaded, the old ones stay"))
                self.assertIn("limits.max_promt_tokens", failed[0]["error"])
                self.assertEqual(server.refusal(prompt(201)).code(), CODE.OUT_OF_RANGE)


if __name__ == "__main__":
    unittest.main()
