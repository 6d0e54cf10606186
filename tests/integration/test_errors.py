"""Goal: every refusal has its code and names its field, and the next request works. Method: the built
server, one bad request per row."""

import threading
import time
import unittest

import numpy as np
from server_process import ServerProcess
from sparsegdn_client import (
    Budget,
    Cancellation,
    Outputs,
    PrefillClient,
    PrefillError,
    Snapshot,
)
from sparsegdn_client._stubs import prefill_pb2 as pb
from sparsegdn_client.types import DENSE, NOTHING

IDS = list(range(100))


class ErrorTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = ServerProcess("tiny-hybrid", "--max-prompt-tokens", "40000",
                                   "--kept-snapshot-bytes", str(64 << 20))
        cls.addClassCleanup(cls.server.stop)
        cls.client = PrefillClient(cls.server.target)
        cls.addClassCleanup(cls.client.close)

    def refused(self, code, field, call):
        with self.assertRaises(PrefillError) as caught:
            call()
        self.assertEqual(caught.exception.code, code, caught.exception)
        self.assertIn(field, caught.exception.field or caught.exception.message)
        # The server lives and serves.
        self.client.prefill([1, 2, 3], outputs=NOTHING)

    def test_prefill(self):
        vocab = self.server.info.vocab_size
        rows = {
            "empty prompt": ("INVALID_ARGUMENT", "token_ids", [], {}),
            "token below 0": ("INVALID_ARGUMENT", "token_ids[2]", [1, 2, -1], {}),
            "token above vocabulary": ("INVALID_ARGUMENT", "token_ids[1]", [1, vocab], {}),
            "longer than the limit": ("OUT_OF_RANGE", "token_ids", [1] * 40001, {}),
            "retention 0": ("INVALID_ARGUMENT", "retention", IDS, {"budget": Budget(retention=0.0)}),
            "retention 1.5": ("INVALID_ARGUMENT", "retention", IDS,
                              {"budget": Budget(retention=1.5)}),
            "retention NaN": ("INVALID_ARGUMENT", "retention", IDS,
                              {"budget": Budget(retention=float("nan"))}),
            "coverage 0": ("INVALID_ARGUMENT", "coverage", IDS, {"budget": Budget(coverage=0.0)}),
            "both shares": ("INVALID_ARGUMENT", "budget", IDS,
                            {"budget": Budget(retention=0.5, coverage=0.5)}),
            "outside its own bounds": ("INVALID_ARGUMENT", "retention", IDS,
                                       {"budget": Budget(retention=0.1, min_retention=0.2)}),
            "unused field": ("INVALID_ARGUMENT", "budget", IDS,
                             {"budget": Budget(mode="dense", retention=0.5)}),
            "keep_last negative": ("INVALID_ARGUMENT", "keep_last", IDS,
                                   {"budget": Budget(keep_last=-1)}),
            "keep_last 0 before the last": ("INVALID_ARGUMENT", "keep_last", IDS,
                                            {"budget": Budget(retention=0.5, keep_last=0)}),
            "checkpoint off the window": ("INVALID_ARGUMENT", "checkpoint_every", IDS,
                                          {"outputs": Outputs(checkpoint_every=100)}),
            "checkpoint off the group": ("INVALID_ARGUMENT", "checkpoint_every", IDS,
                                         {"outputs": Outputs(checkpoint_every=65),
                                          "budget": DENSE}),
            "logits past the end": ("INVALID_ARGUMENT", "positions", IDS,
                                    {"outputs": Outputs(logits_positions=[100])}),
            "logprobs from 0": ("INVALID_ARGUMENT", "logprobs", IDS,
                                {"outputs": Outputs(prompt_logprobs_from=0)}),
            "another model": ("FAILED_PRECONDITION", "model_identity", IDS,
                              {"expect_model": "0" * 64}),
            "unknown snapshot": ("NOT_FOUND", "resume_from", IDS, {"resume_from": "nothing"}),
            "position without resume": ("INVALID_ARGUMENT", "first_position", IDS,
                                        {"first_position": 3}),
            "priority": ("INVALID_ARGUMENT", "priority", IDS, {"priority": 9}),
            "request id": ("INVALID_ARGUMENT", "request_id", IDS, {"request_id": "x" * 200}),
        }
        for name, (code, field, ids, arguments) in rows.items():
            with self.subTest(name):
                self.refused(code, field, lambda: self.client.prefill(ids, **arguments))

    def test_a_snapshot_that_can_never_be_kept(self):
        with ServerProcess("tiny-hybrid", "--kept-snapshot-bytes", str(1 << 20)) as server:
            with PrefillClient(server.target) as client:
                with self.assertRaises(PrefillError) as caught:
                    client.prefill([1] * 2000, keep=True)
                self.assertEqual(caught.exception.code, "RESOURCE_EXHAUSTED")
                client.prefill([1] * 2000)

    def test_unknown_enum(self):
        for field, value in (("snapshot_at", 9), ("budget.mode", 9), ("budget.solver", 9),
                             ("outputs.state_dtype", 9), ("outputs.state_layout", 9)):
            with self.subTest(field):
                request = pb.PrefillRequest(token_ids=IDS)
                target, *rest = field.split(".")
                setattr(getattr(request, target) if rest else request, (rest or [target])[0], value)
                self.refused("INVALID_ARGUMENT", field.split(".")[-1],
                             lambda: self.send(request))

    def send(self, request):
        """A request the typed client would not let through."""
        call = self.client._prefill(request)
        self.client._run(call, None, lambda: list(call))

    def test_resume_position_mismatch(self):
        kept = self.client.prefill(IDS, keep=True, outputs=NOTHING).result
        self.refused("INVALID_ARGUMENT", "first_position", lambda: self.client.prefill(
            [1], resume_from=kept.snapshot_id, first_position=100))
        self.client.prefill([1], resume_from=kept.snapshot_id, first_position=99)
        self.client.release(kept.snapshot_id)
        self.refused("NOT_FOUND", "snapshot", lambda: self.client.release(kept.snapshot_id))

    def test_a_kept_snapshot_expires(self):
        kept = self.client.prefill(IDS, keep=True, ttl_seconds=1, outputs=NOTHING).result
        self.assertEqual(kept.snapshot_ttl_seconds, 1)
        time.sleep(1.5)
        self.refused("NOT_FOUND", "resume_from",
                     lambda: self.client.prefill([1], resume_from=kept.snapshot_id))

    def test_import(self):
        good = self.client.prefill(IDS).snapshot
        names = list(good)

        def changed(identity=good.model_identity, keep=names):
            return Snapshot(identity, good.position, [good.infos[n] for n in keep],
                            [good[n] for n in keep])

        self.refused("FAILED_PRECONDITION", "model_identity",
                     lambda: self.client.import_snapshot(changed(identity="0" * 64)))
        self.refused("INVALID_ARGUMENT", "tensors",
                     lambda: self.client.import_snapshot(changed(keep=names[1:])))
        ref = self.client.import_snapshot(changed())
        self.client.release(ref.snapshot_id)

    def test_import_with_bad_bytes(self):
        from sparsegdn_client.client import _import_frames

        good = self.client.prefill(IDS).snapshot

        def hash_wrong(frames):
            frames[1].chunk.xxh3_64 ^= 1

        def digest_wrong(frames):
            frames[-1].end.digest ^= 1

        def byte_missing(frames):
            del frames[1]

        def twice(frames):
            frames.insert(1, frames[1])

        def no_end(frames):
            frames.pop()

        for change in (hash_wrong, digest_wrong, byte_missing, twice, no_end):
            with self.subTest(change.__name__):
                frames = list(_import_frames(good, 0, ""))
                change(frames)
                call = self.client._import.future(iter(frames))
                with self.assertRaises(PrefillError) as caught:
                    self.client._run(call, None, call.result)
                self.assertIn(caught.exception.code, ("INVALID_ARGUMENT", "DATA_LOSS"))
        self.client.prefill([1, 2, 3])

    def test_deadline_and_cancel(self):
        ids = np.ones(40000, np.int32)
        self.refused("DEADLINE_EXCEEDED", "", lambda: self.client.prefill(ids, timeout=0.05))
        cancellation = Cancellation()
        threading.Timer(0.1, cancellation.cancel).start()
        self.refused("CANCELLED", "",
                     lambda: self.client.prefill(ids, cancellation=cancellation))


class ShutdownTest(unittest.TestCase):
    def test_sigterm_lets_a_running_call_finish(self):
        server = ServerProcess("tiny-hybrid")
        started, result = threading.Event(), []

        def work():
            with PrefillClient(server.target) as client:
                result.append(client.prefill([1] * 20000, progress=lambda p: started.set()))

        thread = threading.Thread(target=work)
        thread.start()
        self.assertTrue(started.wait(30))
        code = server.stop()
        thread.join()
        self.assertEqual(code, 0)
        self.assertEqual(result[0].snapshot.position, 19999)


if __name__ == "__main__":
    unittest.main()
