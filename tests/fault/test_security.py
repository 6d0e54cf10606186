"""Who may call, whose snapshots are whose, what is rotated under a running server, and what its log
says, with the clients that users have: the Python package and the command line tool."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

import grpc
from authority import Authority
from harness import Details, Server, clean_environment, eventually, prompt, run_to_exit
from raw_http2 import Connection, pump
from sparsegdn.v1 import prefill_pb2 as pb
from sparsegdn.v1 import prefill_pb2_grpc
from sparsegdn_client import PrefillClient, PrefillError

CLI = os.environ["FAULT_CLI"]
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
TOKENS = f"# tenants\nalice {ALICE}\nbob {BOB}\n"
IDS = [(i * 31) % 512 for i in range(64)]


def cli(*args: object) -> tuple[int, str]:
    """Exit code and both streams of the command line client."""
    done = subprocess.run([CLI, *map(str, args)], input=" ".join(map(str, IDS)), text=True,
                          capture_output=True, timeout=60, env=clean_environment())
    return done.returncode, done.stdout + done.stderr


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name: str, text: str) -> Path:
        """Replaced as an operator should: renamed into place, for nobody else."""
        temporary = self.folder / f"{name}.new"
        temporary.write_text(text)
        temporary.chmod(0o600)
        return temporary.rename(self.folder / name)

    def client(self, target: str, **options) -> PrefillClient:
        client = PrefillClient(target, **options)
        self.addCleanup(client.close)
        return client

    def fails(self, code: str, reason: str, call, *args, **options) -> PrefillError:
        with self.assertRaises(PrefillError) as caught:
            call(*args, timeout=10, **options)
        self.assertEqual((caught.exception.code, caught.exception.reason), (code, reason),
                         str(caught.exception))
        return caught.exception


class Tokens(Case):
    def setUp(self):
        super().setUp()
        self.tokens = self.write("tokens", TOKENS)
        self.alice = self.write("alice", ALICE + "\n")
        self.bob = self.write("bob", BOB)

    def test_clients_with_and_without(self):
        wrong = self.write("wrong", "x" * 40)
        with Server("--auth-tokens", self.tokens) as server:
            self.fails("UNAUTHENTICATED", "TOKEN_MISSING", self.client(server.target).prefill, IDS)
            self.fails("UNAUTHENTICATED", "TOKEN_UNKNOWN",
                       self.client(server.target, token_file=wrong).prefill, IDS)
            good = self.client(server.target, token_file=self.alice)
            self.assertEqual(good.prefill(IDS).result.usage.prompt_tokens, 64)
            self.assertEqual(good.model_info().model_name, "tiny-hybrid")
            flags = ["prefill", "--quiet", "--server", server.target]
            code, text = cli(*flags)
            self.assertEqual(code, 3, text)
            self.assertIn("UNAUTHENTICATED, TOKEN_MISSING", text)
            code, text = cli(*flags, "--token-file", wrong)
            self.assertEqual(code, 3, text)
            self.assertIn("UNAUTHENTICATED, TOKEN_UNKNOWN", text)
            self.assertNotIn("xxxx", text)
            self.assertEqual(cli(*flags, "--token-file", self.alice)[0], 0)
            code, text = cli(*flags, "--token-file", self.folder / "none")
            self.assertEqual(code, 7, text)
            # Probes of every kind work without.
            self.assertEqual(server.health(), 1)
            self.assertEqual(server.health("sparsegdn.v1.PrefillService"), 1)
            self.assertEqual(server.http("/readyz")[0], 200)
            self.assertEqual(server.http("/livez")[0], 200)
            self.assertGreater(server.metric(
                'sparsegdn_requests_total{code="UNAUTHENTICATED",method="Prefill"}'), 0)

    def test_a_token_does_not_travel_in_clear_text(self):
        with self.assertRaisesRegex(ValueError, "clear text"):
            PrefillClient("prefill.example:50051", token_file=self.alice)
        code, text = cli("info", "--server", "prefill.example:50051", "--token-file", self.alice)
        self.assertEqual(code, 2, text)
        self.assertIn("clear text", text)
        self.client("prefill.example:50051", token_file=self.alice, allow_plain_text_token=True)

    def test_snapshots_belong_to_their_tenant(self):
        with Server("--auth-tokens", self.tokens) as server:
            alice = self.client(server.target, token_file=self.alice)
            bob = self.client(server.target, token_file=self.bob)
            ids = set()
            for _ in range(20):
                done = alice.prefill(IDS, keep=True)
                kept = done.result.snapshot_id
                self.assertRegex(kept, "^[0-9a-f]{32}$")
                ids.add(kept)
            self.assertEqual(len(ids), 20)
            imported = alice.import_snapshot(done.snapshot).snapshot_id
            for held in (kept, imported):
                theirs = self.fails("NOT_FOUND", "SNAPSHOT_NOT_FOUND", bob.prefill, [7],
                                    resume_from=held, tenant="alice")
                none = self.fails("NOT_FOUND", "SNAPSHOT_NOT_FOUND", bob.prefill, [7],
                                  resume_from="0" * 32)
                # No word tells one that is another's from one that is nobody's.
                self.assertEqual(theirs.message.replace(held, ""),
                                 none.message.replace("0" * 32, ""))
                self.fails("NOT_FOUND", "SNAPSHOT_NOT_FOUND", bob.release, held, tenant="alice")
                self.assertEqual(alice.prefill([7], resume_from=held).result.usage.cached_tokens,
                                 63)
                alice.release(held)

    def test_what_one_tenant_keeps_is_bounded(self):
        config = self.write("config.json", "{}")
        with Server("--config", config, "--auth-tokens", self.tokens) as server:
            alice = self.client(server.target, token_file=self.alice)
            bob = self.client(server.target, token_file=self.bob)
            done = alice.prefill(IDS, keep=True, pin=True)
            one = int(server.metric("sparsegdn_kept_snapshot_bytes"))
            self.assertGreater(one, 0)
            self.write("config.json", json.dumps({"limits": {"max_tenant_kept_bytes": 2 * one}}))
            server.process.send_signal(signal.SIGHUP)
            self.assertTrue(eventually(lambda: server.log_lines("limits reloaded")))
            alice.prefill(IDS, keep=True, pin=True)
            full = ("RESOURCE_EXHAUSTED", "TENANT_SNAPSHOT_LIMIT")
            refused = self.fails(*full, alice.prefill, IDS, keep=True)
            self.assertGreater(refused.retry_after_seconds, 0)
            self.assertNotIn("alice", refused.message)
            self.fails(*full, alice.import_snapshot, done.snapshot)
            self.fails("RESOURCE_EXHAUSTED", "NEVER_FITS", alice.prefill, IDS * 200, keep=True)
            # Nobody else is bounded by it, and what needs no room goes on.
            kept = [bob.prefill(IDS, keep=True).result.snapshot_id for _ in range(3)]
            self.fails("NOT_FOUND", "SNAPSHOT_NOT_FOUND", bob.prefill, [7], resume_from=kept[0])
            bob.prefill([7], resume_from=kept[2])
            alice.prefill([7], resume_from=done.result.snapshot_id)
            alice.release(done.result.snapshot_id)
            alice.import_snapshot(done.snapshot)

    def test_rotation(self):
        with Server("--auth-tokens", self.tokens, "--auth-refresh-seconds", 1) as server:
            client = self.client(server.target, token_file=self.alice)
            client.model_info()
            self.write("tokens", f"alice {BOB[::-1]}xx\n")
            self.assertTrue(eventually(lambda: len(server.log_lines("tokens loaded")) == 2))
            self.fails("UNAUTHENTICATED", "TOKEN_UNKNOWN", client.model_info)
            self.write("alice", f"{BOB[::-1]}xx\n")  # the same client takes the new one
            client.model_info()
            self.write("tokens", "alice short\n")
            failed = eventually(lambda: server.log_lines("tokens not reloaded, the old ones stay"))
            self.assertIn("line 1", failed[0]["error"])
            self.assertNotIn("short\n", failed[0]["error"])
            client.model_info()

    def test_sighup_takes_tokens_at_once(self):
        with Server("--auth-tokens", self.tokens, "--auth-refresh-seconds", 3600) as server:
            client = self.client(server.target, token_file=self.bob)
            client.model_info()
            self.write("tokens", f"alice {ALICE}\n")
            server.process.send_signal(signal.SIGHUP)
            self.assertTrue(eventually(lambda: len(server.log_lines("tokens loaded")) == 2))
            self.fails("UNAUTHENTICATED", "TOKEN_UNKNOWN", client.model_info)

    def test_a_file_that_others_may_read_is_warned_of(self):
        warning = "token file: others may read or change it, wanted mode 0600 or 0440"
        for mode, warned in ((0o600, 0), (0o440, 0), (0o644, 1), (0o660, 1)):
            self.tokens.chmod(mode)
            with self.subTest(oct(mode)), Server("--auth-tokens", self.tokens) as server:
                self.assertEqual(len(server.log_lines(warning)), warned)

    def test_a_file_that_is_none_ends_the_start(self):
        for text, message in (("", "no token"), (f"a {ALICE}\nb {ALICE}\n", "line 2")):
            path = self.write("bad", text)
            code, output = run_to_exit("--model", "x", "--listen", "127.0.0.1:0",
                                       "--metrics-listen", "", "--auth-tokens", path)
            self.assertEqual(code, 2, output)
            self.assertIn("--auth-tokens", output)
            self.assertIn(message, output)
            self.assertNotIn(ALICE, output)


class Logs(Case):
    def test_nothing_of_a_prompt_or_a_secret_is_logged(self):
        """Planted numbers and words, through calls that end well and in each way badly."""
        tokens = self.write("tokens", TOKENS)
        token = self.write("alice", ALICE)
        planted = [400 + i for i in range(7)]  # as one run of digits nobody logs by chance
        outside = 987654321
        with Server("--auth-tokens", tokens, "--log-level", "debug",
                    "--max-prompt-tokens", 3000) as server:
            client = self.client(server.target, token_file=token)
            kept = client.prefill(planted * 20, keep=True, tenant="tenant-planted").result
            self.fails("INVALID_ARGUMENT", "INVALID_FIELD", client.prefill,
                       [*planted, outside])
            self.fails("OUT_OF_RANGE", "PROMPT_TOO_LONG", client.prefill, planted * 1000)
            self.fails("NOT_FOUND", "SNAPSHOT_NOT_FOUND", client.prefill, planted,
                       resume_from="feedfacefeedface")
            self.fails("NOT_FOUND", "SNAPSHOT_NOT_FOUND", client.release, "feedfacefeedface")
            client.prefill(planted, resume_from=kept.snapshot_id)
            client.release(kept.snapshot_id)
            self.fails("UNAUTHENTICATED", "TOKEN_MISSING", self.client(server.target).prefill,
                       planted)
            ended = eventually(lambda: len(server.log_lines("prefill ended")) >= 6)
            self.assertTrue(ended, server.log())
            self.assertEqual(server.stop(), 0)
            log = server.log()
        for secret in (str(outside), "feedfacefeedface", kept.snapshot_id, ALICE, BOB, "alice",
                       "tenant-planted", *(f"{a},{b}" for a, b in zip(planted, planted[1:])),
                       *(f"{a}, {b}" for a, b in zip(planted, planted[1:])),
                       *(f"{a} {b}" for a, b in zip(planted, planted[1:]))):
            self.assertNotIn(secret, log)
        self.assertIn("token_ids[7]", log)  # but where to look is
        for line in log.splitlines():
            json.loads(line)


class MutualTls(Case):
    def setUp(self):
        super().setUp()
        self.authority = Authority(self.folder)
        self.authority.sign("server", "/CN=localhost", "DNS:localhost")
        self.authority.sign("alice", "/CN=alice")
        self.flags = ["--tls-cert", self.folder / "server.pem",
                      "--tls-key", self.folder / "server.key",
                      "--tls-client-ca", self.folder / "ca.pem", "--auth-refresh-seconds", 1]

    def options(self, ca: str = "ca.pem", who: str | None = "alice") -> dict:
        options = {"tls_ca": self.folder / ca, "tls_server_name": "localhost"}
        if who:
            options |= {"tls_cert": self.folder / f"{who}.pem", "tls_key": self.folder / f"{who}.key"}
        return options

    def cli_info(self, server: Server, **options) -> tuple[int, str]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return cli("info", "--server", server.target, "--timeout", 10, *flags)

    def test_clients_with_and_without_certificates(self):
        stranger = Authority(self.folder, "other")
        stranger.sign("stranger", "/CN=stranger")
        with Server(*self.flags) as server:
            self.assertEqual(self.cli_info(server, **self.options())[0], 0)
            info = self.client(server.target, **self.options()).model_info(timeout=10)
            self.assertEqual(info.model_name, "tiny-hybrid")
            for name, options in (("no certificate", self.options(who=None)),
                                  ("another authority's", self.options(who="stranger")),
                                  ("server not trusted", self.options(ca="other.pem"))):
                with self.subTest(name):
                    self.fails("UNAUTHENTICATED", "TLS_HANDSHAKE",
                               self.client(server.target, **options).model_info)
                    code, text = self.cli_info(server, **options)
                    self.assertEqual(code, 3, text)
                    self.assertIn("UNAUTHENTICATED, TLS_HANDSHAKE", text)
            self.assertEqual(server.http("/readyz")[0], 200)  # plain, also under mTLS

    def test_tokens_beside_certificates_name_the_tenant(self):
        tokens, token = self.write("tokens", TOKENS), self.write("bob", BOB)
        with Server(*self.flags, "--auth-tokens", tokens) as server:
            self.fails("UNAUTHENTICATED", "TOKEN_MISSING",
                       self.client(server.target, **self.options()).model_info)
            bob = self.client(server.target, token_file=token, **self.options())
            kept = bob.prefill(IDS, keep=True).result.snapshot_id
            bob.release(kept)

    def test_rotated_certificates_are_taken_without_a_restart(self):
        """A new authority signs everything anew; the server never stops."""
        with Server(*self.flags) as server:
            self.assertEqual(self.cli_info(server, **self.options())[0], 0)
            new = self.folder / "new"
            new.mkdir()
            authority = Authority(new)
            authority.sign("server", "/CN=localhost", "DNS:localhost")
            authority.sign("alice", "/CN=alice")
            old = self.folder / "old"
            old.mkdir()
            for name in ("ca.pem", "alice.pem", "alice.key"):
                shutil.copy(self.folder / name, old / name)
            for name in ("server.key", "server.pem", "ca.pem", "alice.key", "alice.pem"):
                (new / name).rename(self.folder / name)
            self.assertTrue(eventually(
                lambda: self.cli_info(server, **self.options())[0] == 0, 20), server.log())
            code, text = self.cli_info(server, tls_ca=old / "ca.pem", tls_cert=old / "alice.pem",
                                       tls_key=old / "alice.key", tls_server_name="localhost")
            self.assertEqual(code, 3, text)
            self.assertIsNone(server.process.poll())

    def test_a_key_of_another_certificate_ends_the_start(self):
        self.authority.sign("other", "/CN=localhost", "DNS:localhost")
        code, text = run_to_exit("--model", "x", "--listen", "127.0.0.1:0", "--metrics-listen", "",
                                 "--tls-cert", self.folder / "server.pem",
                                 "--tls-key", self.folder / "other.key")
        self.assertEqual(code, 2, text)
        self.assertIn("is not the key of --tls-cert", text)


class Wire(Case):
    def test_headers_and_streams_are_bounded(self):
        with Server() as server:
            with self.assertRaises(grpc.RpcError) as caught:
                server.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10,
                                         metadata=[("x", "y" * (64 << 10))])
            self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            with server.new_channel() as channel:
                stub = prefill_pb2_grpc.PrefillServiceStub(channel)
                self.assertTrue(server.prefill(prompt(20), stub=stub).whole)

    def test_what_is_half_received_is_bounded(self):
        limit, calls = 64 << 20, 16
        def resident() -> int:
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10
        with Server("--grpc-memory-bytes", limit) as server:
            before = resident()
            # Three times 1 GiB that no handler has seen: 256 calls, each a byte short of a message
            # of 4 MiB. The quota is soft: a first GiB thrown within half a second may come in
            # whole before the first call is cut; what follows finds the door shut.
            flood = []
            for _ in range(3):
                flood += [Connection(server.port, method, 4 << 20, calls)
                          for method in ("/sparsegdn.v1.PrefillService/Prefill",
                                         "/sparsegdn.v1.PrefillService/ImportSnapshot") * 8]
                pump(flood, 0.5)
            for connection in flood:
                self.addCleanup(connection.close)
            self.assertLess(resident() - before, 5 << 28)
            self.assertGreater(sum(c.cancelled + (not c.open) * calls for c in flood), calls)
            self.assertTrue(eventually(lambda: self.works(server), 30))
            for connection in flood:
                connection.close()
            self.assertTrue(eventually(lambda: self.works(server), 30))
            self.assertEqual(server.stop(), 0)

    def works(self, server: Server) -> bool:
        try:
            return server.prefill(prompt(500), timeout=10).whole
        except grpc.RpcError:
            return False

    def test_fields_are_bounded(self):
        rows = {"request_id": "x" * 129, "resume_from": "x" * (1 << 20), "tenant": "t" * 257}
        with Server() as server:
            for field, value in rows.items():
                with self.subTest(field):
                    error = server.refusal(prompt(20, **{field: value}))
                    self.assertIn(error.code(), (grpc.StatusCode.INVALID_ARGUMENT,
                                                 grpc.StatusCode.NOT_FOUND))
                    self.assertEqual(Details(error).field, field)
                    self.assertLess(len(error.details()), 2000)
            self.assertTrue(server.prefill(prompt(20)).whole)


if __name__ == "__main__":
    unittest.main()
