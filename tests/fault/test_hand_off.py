"""Same-host hand-off under faults: clients and servers that are killed, a full /dev/shm, files in the
way of the socket. Everything runs with a /dev/shm of its own where that can be had (as root), because
any server that starts on the machine removes what dead ones left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import grpc
import numpy as np
from harness import BINARY, CODE_DIR, Server, clean_environment, eventually, prompt, run_to_exit
from own_mounts import refused, with_tmpfs
from sparsegdn.v1 import prefill_pb2 as pb
from sparsegdn.v1 import prefill_pb2_grpc
from sparsegdn_client import Cancellation, PrefillClient, PrefillError, load_snapshot

CLI = os.environ["FAULT_CLI"]
SHM = Path("/dev/shm")
IDS = [(i * 31) % 512 for i in range(3000)]


def exists(name: str) -> bool:
    return (SHM / name.lstrip("/")).exists()


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.socket = self.folder / "grpc.sock"
        self.target = f"unix:{self.socket}"

    def server(self, *flags, **options) -> Server:
        """Listens on the socket beside its TCP port."""
        return Server(*flags, "--listen", f"127.0.0.1:0,{self.target}", **options)

    def client(self, **options) -> PrefillClient:
        client = PrefillClient(self.target, shared_memory=True, **options)
        self.addCleanup(client.close)
        return client

    def raw(self) -> prefill_pb2_grpc.PrefillServiceStub:
        channel = grpc.insecure_channel(self.target)
        self.addCleanup(channel.close)
        return prefill_pb2_grpc.PrefillServiceStub(channel)

    def need_own_memory(self) -> None:
        if why := refused(str(SHM)):
            print(f"SKIPPED: no /dev/shm of its own for {self.id()}: {why}", flush=True)
            self.skipTest(why)

    def begin(self, tokens: int = 200000):
        """A call that has its segment and is far from its end; (call, name)."""
        call = self.raw().Prefill(prompt(tokens, shared_memory=True), timeout=60)
        for event in call:
            if event.WhichOneof("event") == "manifest":
                return call, event.manifest.shared_memory.name
        raise AssertionError("no manifest")

    def start_worker(self, script: str) -> subprocess.Popen:
        """A client process that maps its segment and prints the name."""
        worker = subprocess.Popen([sys.executable, CODE_DIR / script, self.target],
                                  stdout=subprocess.PIPE, text=True)
        self.addCleanup(lambda: (worker.kill(), worker.wait(), worker.stdout.close()))
        return worker


class Clients(Case):
    def test_python_and_command_line_get_the_same_bytes_as_over_tcp(self):
        with self.server() as server, PrefillClient(server.target) as plain:
            streamed = plain.prefill(IDS).snapshot
            client = self.client()
            for _ in range(3):  # the first segment is fresh, later ones are spares
                shared = client.prefill(IDS).snapshot
                self.assertEqual(shared.digest, streamed.digest)
                for name in streamed:
                    np.testing.assert_array_equal(shared[name], streamed[name])
            shared[name][...] = 0  # private: another reader of the segment sees nothing of it
            out = self.folder / "s.safetensors"
            done = subprocess.run(
                [CLI, "prefill", "--quiet", "--server", self.target, "--shared-memory", "--out",
                 out], input=" ".join(map(str, IDS)), text=True, capture_output=True, timeout=60,
                env=clean_environment())
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(load_snapshot(out).digest, streamed.digest)
            self.assertEqual(server.metric(
                'sparsegdn_shared_memory_calls_total{outcome="given"}'), 4)
            self.assertEqual([line["shared_memory"] for line in server.log_lines("prefill ended")],
                             [False] + [True] * 4)

    def test_tcp_clients_are_offered_nothing(self):
        with self.server() as server:
            for event in server.stub.Prefill(prompt(100, shared_memory=True), timeout=60):
                self.assertFalse(event.manifest.HasField("shared_memory"))
                self.assertNotEqual(event.WhichOneof("event"), "shared_chunks")

    def test_segments_are_private_and_go_after_their_call(self):
        with self.server("--shared-memory-linger-seconds", 2) as server:
            call, name = self.begin(100)
            self.assertRegex(name, "^/sparsegdn-[0-9a-f]{32}$")
            info = (SHM / name[1:]).stat()
            self.assertEqual(info.st_mode & 0o7777, 0o600)
            self.assertEqual(info.st_uid, os.geteuid())
            for _ in call:
                pass
            end = time.monotonic()
            self.assertTrue(exists(name))
            self.assertTrue(eventually(lambda: not exists(name)))
            self.assertGreater(time.monotonic() - end, 1.5)
            self.assertEqual(server.stop(), 0)
            self.assertFalse(self.socket.exists())

    def test_ten_seconds_is_the_default(self):
        with self.server():
            call, name = self.begin(100)
            for _ in call:
                pass
            end = time.monotonic()
            self.assertTrue(eventually(lambda: not exists(name), 15))
            self.assertAlmostEqual(time.monotonic() - end, 10, delta=1.5)


class KilledClients(Case):
    def test_kill_9_of_the_client_mid_call(self):
        with self.server(model="tiny-gdn") as server:
            worker = self.start_worker("shared_worker.py")
            name = worker.stdout.readline().strip()
            self.assertTrue(exists(name), name)
            worker.kill()
            self.assertTrue(eventually(lambda: not exists(name), 5))
            self.assertTrue(eventually(server.idle))
            self.assertEqual(self.client().prefill(IDS).result.usage.prompt_tokens, 3000)

    def test_a_client_that_cancels(self):
        with self.server(model="tiny-gdn") as server:
            call, name = self.begin()
            self.assertTrue(exists(name))
            call.cancel()
            self.assertTrue(eventually(lambda: not exists(name), 5))
            self.assertTrue(eventually(server.idle))
            cancellation = Cancellation()
            with self.assertRaises(PrefillError) as caught:
                self.client().prefill([i % 512 for i in range(100000)], cancellation=cancellation,
                                      progress=lambda p: p.bytes_total and cancellation.cancel())
            self.assertEqual(caught.exception.code, "CANCELLED")

    def test_a_stopped_client(self):
        with self.server("--keepalive-seconds", 1, "--keepalive-timeout-seconds", 1,
                         model="tiny-gdn") as server:
            worker = self.start_worker("shared_worker.py")
            name = worker.stdout.readline().strip()
            self.assertTrue(exists(name), name)
            worker.send_signal(signal.SIGSTOP)
            self.assertTrue(eventually(lambda: not exists(name), 20))
            self.assertTrue(eventually(server.idle))


class KilledServer(Case):
    def test_kill_9_of_the_server_mid_call(self):
        """The client has an error; the next server removes what lies about, and nothing else."""
        with self.server(model="tiny-gdn") as server:
            call, name = self.begin()
            self.assertEqual(server.stop(signal.SIGKILL), -signal.SIGKILL)
            with self.assertRaises(grpc.RpcError) as caught:
                for event in call:
                    self.assertNotEqual(event.WhichOneof("event"), "result")
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertTrue(exists(name))
        self.assertTrue(self.socket.exists())  # stale: the next one takes its place
        other = self.folder / "other"
        other.mkdir()
        with Server("--listen", f"127.0.0.1:0,unix:{other}/grpc.sock") as living:
            self.assertFalse(exists(name))
            self.assertEqual(len(living.log_lines("shared memory of a dead server removed")), 1)
            client = PrefillClient(f"unix:{other}/grpc.sock", shared_memory=True)
            self.addCleanup(client.close)
            self.target, kept = f"unix:{other}/grpc.sock", self.target
            call, theirs = self.begin(100)
            for _ in call:
                pass
            self.target = kept
            with self.server():  # beside it: the living one's segment is not a leftover
                self.assertTrue(exists(theirs))
                self.assertTrue(self.client().prefill(IDS).snapshot)

    def test_a_snapshot_outlives_its_server(self):
        with self.server() as server:
            snapshot = self.client().prefill(IDS).snapshot
            before = {name: snapshot[name].copy() for name in snapshot}
            server.stop(signal.SIGKILL)
        for name, array in before.items():
            np.testing.assert_array_equal(snapshot[name], array)

    def test_the_socket_of_a_living_server_is_not_taken(self):
        with self.server():
            code, text = run_to_exit("--model", "x", "--listen", self.target,
                                     "--metrics-listen", "")
            self.assertEqual(code, 4, text)
            self.assertIn("another server listens", text)
            self.assertTrue(self.client().prefill(IDS).snapshot)

    def test_a_file_in_the_way_of_the_socket(self):
        self.socket.write_text("mine")
        code, text = run_to_exit("--model", "x", "--listen", self.target, "--metrics-listen", "")
        self.assertEqual(code, 2, text)
        self.assertIn("no socket", text)
        self.assertEqual(self.socket.read_text(), "mine")


class FullMemory(Case):
    def test_a_full_dev_shm_falls_back_to_streaming(self):
        """In a mount namespace of its own, with a /dev/shm of 256 KiB."""
        self.need_own_memory()
        small = with_own_memory([BINARY], "size=256k")
        with self.server(command=small) as server, PrefillClient(server.target) as plain:
            # The client sees the machine's own /dev/shm, but it is offered nothing.
            snapshot = self.client().prefill(IDS).snapshot
            self.assertEqual(snapshot.digest, plain.prefill(IDS).snapshot.digest)
            self.assertEqual(server.metric(
                'sparsegdn_shared_memory_calls_total{outcome="refused"}'), 1)
            self.assertEqual(server.metric("sparsegdn_shared_memory_bytes"), 0)

    def test_another_dev_shm_falls_back_too(self):
        """Offered, but the client cannot map it: as in two containers."""
        self.need_own_memory()
        apart = with_own_memory([BINARY])
        with self.server(command=apart) as server, PrefillClient(server.target) as plain:
            client, digest = self.client(), plain.prefill(IDS).snapshot.digest
            for _ in range(2):
                self.assertEqual(client.prefill(IDS).snapshot.digest, digest)
            self.assertEqual(len(server.log_lines("prefill ended")), 4)  # one was repeated

    def test_segments_are_bounded_in_bytes(self):
        with self.server("--shared-memory-bytes", 3 << 20, "--shared-memory-linger-seconds",
                         60) as server:
            client = self.client()
            for _ in range(4):
                client.prefill(IDS[:200])
                self.assertLessEqual(server.metric("sparsegdn_shared_memory_bytes"), 3 << 20)
            given = server.metric('sparsegdn_shared_memory_calls_total{outcome="given"}')
            refused = server.metric('sparsegdn_shared_memory_calls_total{outcome="refused"}')
            self.assertEqual(given + refused, 4)
            self.assertGreater(given, 0)
            self.assertGreater(refused, 0)


def with_own_memory(command: list[str], options: str = "mode=1777") -> list[str]:
    """The command with an empty /dev/shm of its own."""
    return with_tmpfs(str(SHM), command, options)


if __name__ == "__main__":
    if not refused(str(SHM)) and "FAULT_OWN_MEMORY" not in os.environ:
        os.environ["FAULT_OWN_MEMORY"] = "1"
        command = with_own_memory([sys.executable, *sys.argv])
        os.execvp(command[0], command)
    unittest.main()
