"""Goal: the command line tool as a user meets it. Method: the built binary against the server in
Python. TEST_CLI names the binary."""

import json
import os
import pty
import resource
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from fake_server import FAULTS, FakeServer, make_snapshot, next_token
from own_mounts import refused, with_tmpfs
from sparsegdn_client import load_snapshot_file, save_snapshot
from sparsegdn_client._stubs import prefill_pb2 as pb

CLI = os.environ["TEST_CLI"]
TOKENS = list(range(3, 43))
TEXT = " ".join(map(str, TOKENS))


def greedy(tokens, count):
    tokens, out = list(tokens), []
    for _ in range(count):
        out.append(next_token(tokens))
        tokens.append(out[-1])
    return out


class CliTest(unittest.TestCase):
    def setUp(self):
        self.server = FakeServer()
        self.addCleanup(self.server.__exit__)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_cli(self, *arguments, stdin=TEXT, **options):
        environment = dict(os.environ, SPARSEGDN_SERVER=self.server.target)
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        done = subprocess.run([CLI, *map(str, arguments)], input=data, capture_output=True,
                              timeout=60, env=environment, **options)
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    def ok(self, *arguments, **options):
        done = self.run_cli(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def fails(self, code, *arguments, **options):
        done = self.run_cli(*arguments, **options)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn("error: ", done.stderr)
        return done.stderr

    def test_prefill_table(self):
        text = self.ok("prefill", "--snapshot-at", "after_last", "--keep")
        for words in ("40 tokens", "next token", str(next_token(TOKENS)), "GDN core", "queue",
                      "retained share", "layer 0", "50.0 %", "kept-1"):
            self.assertIn(words, text)

    def test_token_inputs(self):
        path = self.folder / "tokens"
        rows = {
            "text": (TEXT.replace(" ", ","), []),
            "json": (json.dumps(TOKENS), []),
            "int32": (b"".join(t.to_bytes(4, "little") for t in TOKENS), ["--format", "int32"]),
        }
        for name, (content, flags) in rows.items():
            with self.subTest(name):
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                self.ok("prefill", path, *flags, stdin="")
                self.assertEqual(list(self.server.requests[-1].token_ids), TOKENS)

    def test_prefill_json_and_file(self):
        out = self.folder / "s.safetensors"
        result = json.loads(self.ok("prefill", "--json", "--out", out, "--dense"))
        self.assertEqual(result["position"], len(TOKENS) - 1)
        self.assertEqual(result["budget"]["mode"], "dense")
        self.assertEqual(result["usage"]["computed_tokens"], len(TOKENS))
        snapshot, loaded = load_snapshot_file(out)  # the C++ file, read by Python
        self.assertEqual(f"{snapshot.digest:016x}", result["digest"])
        self.assertEqual(snapshot.digest, make_snapshot(TOKENS[:-1]).digest)
        self.assertEqual(loaded.usage.computed_tokens, len(TOKENS))
        self.assertEqual(list(self.folder.iterdir()), [out])

    def test_generate(self):
        for at in ("before_last", "after_last"):
            with self.subTest(at):
                result = json.loads(self.ok("generate", "-n", "7", "--snapshot-at", at, "--json",
                                            "--retention", "0.5"))
                self.assertEqual(result["tokens"], greedy(TOKENS, 7))
                self.assertEqual(self.server.kept, {})  # everything released
        budgets = [r.budget for r in self.server.requests]
        self.assertEqual(budgets[0].retention, 0.5)
        self.assertEqual({b.mode for b in budgets if not b.HasField("retention")},
                         {pb.BUDGET_MODE_DENSE})
        text = self.ok("generate", "-n", "3")
        self.assertEqual(text.splitlines()[0], " ".join(map(str, greedy(TOKENS, 3))))

    def test_generate_stops_and_keeps(self):
        expected = greedy(TOKENS, 7)
        result = json.loads(self.ok("generate", "-n", "7", "--stop", expected[2], "--keep", "--json"))
        self.assertEqual(result["tokens"], expected[: expected.index(expected[2]) + 1])
        self.assertEqual(list(self.server.kept), [result["snapshot_id"]])

    def test_generate_from_a_file(self):
        path = self.folder / "s.safetensors"
        self.ok("prefill", "--snapshot-at", "after_last", "--out", path)
        alone = json.loads(self.ok("generate", "--from", path, "-n", "5", "--json", stdin=""))
        self.assertEqual(alone["tokens"], greedy(TOKENS, 5))
        save_snapshot(path, make_snapshot(TOKENS[:-1]))  # the Python file, read by C++
        one = json.loads(self.ok("generate", "--from", path, "-", "-n", "5", "--json",
                                 stdin=str(TOKENS[-1])))
        self.assertEqual(one["tokens"], greedy(TOKENS, 5))
        save_snapshot(path, make_snapshot(TOKENS[:-4]))
        several = json.loads(self.ok("generate", "--from", path, "-", "-n", "5", "--json",
                                     stdin=" ".join(map(str, TOKENS[-4:]))))
        self.assertEqual(several["tokens"], greedy(TOKENS, 5))
        self.assertEqual(self.server.kept, {})
        self.fails(2, "generate", "--from", path, stdin="")

    def test_import_and_release(self):
        path = self.folder / "s.safetensors"
        self.ok("prefill", "--out", path)
        ref = json.loads(self.ok("import", path, "--ttl", "9", "--json"))
        self.assertEqual((ref["position"], ref["ttl_seconds"]), (len(TOKENS) - 1, 9))
        self.assertIn("released", self.ok("release", ref["snapshot_id"]))
        self.fails(3, "release", ref["snapshot_id"])

    def test_info(self):
        self.assertIn("fake", self.ok("info"))
        self.assertEqual(json.loads(self.ok("info", "--json"))["vocab_size"], 97)

    def test_bench(self):
        arguments = ("bench", "--lengths", "8,16", "--requests", "5", "--concurrency", "2")
        result = json.loads(self.ok(*arguments, "--json", stdin=""))
        self.assertEqual([c["length"] for c in result["lengths"]], [8, 16])
        for cell in result["lengths"]:
            self.assertEqual((cell["requests"], cell["errors"]), (5, 0))
            self.assertLessEqual(cell["snapshot_seconds"]["median"], cell["snapshot_seconds"]["p90"])
            self.assertGreater(cell["tokens_per_second"], 0)
        self.assertEqual(len(self.ok(*arguments, stdin="").splitlines()), 4)
        self.fails(3, "bench", "--resume-from", "none", "--requests", "2", stdin="")

    def test_exit_codes(self):
        rows = {
            "no command": (2, ["nonsense"]),
            "flag": (2, ["prefill", "--nonsense"]),
            "token": (2, ["prefill"], "1 x"),
            "prompt empty": (3, ["prefill"], " "),
            "not found": (3, ["prefill", "--resume-from", "none"]),
            "full": (4, ["prefill", "--request-id", "full"]),
            "no server": (4, ["info", "--server", "127.0.0.1:1"]),
            "deadline": (5, ["prefill", "--request-id", "stall", "--timeout", "0.2"]),
            "integrity": (6, ["prefill", "--request-id", "fault:digest_wrong"]),
            "no input": (7, ["prefill", self.folder / "none"]),
            "no folder": (7, ["prefill", "--out", self.folder / "no" / "s"]),
            "not a snapshot": (7, ["import", __file__]),
            "endless input": (2, ["prefill", "/dev/zero"]),
            "out to a pipe": (7, ["prefill", "--out", self.pipe()]),
            "from a pipe": (7, ["import", self.pipe()]),
        }
        for name, (code, arguments, *stdin) in rows.items():
            with self.subTest(name):
                self.fails(code, *arguments, **({"stdin": stdin[0]} if stdin else {}))
        self.assertIn("retry after 2.5s", self.fails(4, "prefill", "--request-id", "full"))
        self.assertIn("field token_ids", self.fails(3, "prefill", stdin=""))
        full = open("/dev/full", "w")
        self.addCleanup(full.close)
        done = subprocess.run([CLI, "info", "--server", self.server.target], stdout=full,
                              stderr=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 7)

    def pipe(self):
        path = Path(tempfile.mkdtemp(dir=self.folder)) / "pipe"
        os.mkfifo(path)
        return path

    def test_closed_standard_streams(self):
        """A connection or a file that gets their numbers is neither read nor written into."""
        out = self.folder / "s"
        (self.folder / "tokens").write_text(TEXT)
        rows = [(0, 7, "-", "standard input, which is closed"), (1, 7, self.folder / "tokens", "standard output"),
                (2, 0, self.folder / "tokens", "")]
        for fd, code, tokens, words in rows:
            with self.subTest(fd):
                done = subprocess.run(
                    ["sh", "-c", f'exec "$@" {fd}>&-', "sh", CLI, "prefill", "--server",
                     self.server.target, tokens, "--out", out],
                    stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(words, done.stderr.decode())
                if fd > 0:
                    self.ok("import", out)

    def test_help(self):
        self.assertIn("Exit codes", self.ok("--help"))
        for command in "prefill generate info bench import release".split():
            self.assertIn("--server", self.ok(command, "--help"))

    def test_a_broken_stream_writes_nothing(self):
        out = self.folder / "s.safetensors"
        for fault in FAULTS:
            with self.subTest(fault):
                self.run_cli("prefill", "--request-id", f"fault:{fault}", "--out", out)
                self.assertEqual(list(self.folder.iterdir()), [])

    def start_stalled(self, out, **options):
        process = subprocess.Popen(
            [CLI, "prefill", "--server", self.server.target, "--request-id", "stall", "--out", out],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        process.stdin.write(TEXT.encode())
        process.stdin.close()
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        for _ in range(1000):
            if self.server.requests:
                break
            time.sleep(0.01)
        time.sleep(0.1)
        return process

    def test_interrupt_and_kill_leave_nothing(self):
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)):
            with self.subTest(number.name):
                self.server.requests.clear()
                process = self.start_stalled(self.folder / "s.safetensors")
                process.send_signal(number)
                self.assertEqual(process.wait(30), code)
                self.assertEqual(list(self.folder.iterdir()), [])
                self.assertTrue(self.server.saw_cancel.wait(10))
                self.server.saw_cancel.clear()

    def test_file_size_limit_leaves_nothing(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

        out = self.folder / "s.safetensors"
        self.fails(7, "prefill", "--out", out, stdin=" ".join(["1"] * 2000), preexec_fn=limit)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_full_disk_leaves_nothing(self):
        """A tmpfs of 64 KiB."""
        folder = "/dev/shm"
        if why := refused(folder):
            print(f"SKIPPED: no tmpfs of its own for {self.id()}: {why}", flush=True)
            self.skipTest(why)
        script = (
            'printf old > "$1/s" && "$2" prefill --server "$3" --out "$1/s"; '
            'echo "exit $?"; ls -A "$1"; cat "$1/s"'
        )
        command = ["sh", "-c", script, "sh", folder, CLI, self.server.target]
        done = subprocess.run(with_tmpfs(folder, command, "size=64k"),
                              input=" ".join(["1"] * 2000).encode(), capture_output=True,
                              timeout=60)
        self.assertEqual(done.stdout.decode().splitlines(), ["exit 7", "s", "old"], done.stderr)
        self.assertIn(b"No space left on device", done.stderr)

    def test_progress_bar_only_on_a_terminal(self):
        self.assertEqual(self.run_cli("prefill").stderr, "")
        for flags, visible in (([], True), (["--quiet"], False)):
            ours, theirs = pty.openpty()
            subprocess.run([CLI, "prefill", "--server", self.server.target, *flags],
                           input=TEXT.encode(), stdout=subprocess.DEVNULL, stderr=theirs)
            os.close(theirs)
            seen = b""
            try:
                while piece := os.read(ours, 4096):
                    seen += piece
            except OSError:  # the other end of a terminal closes with an error
                pass
            os.close(ours)
            self.assertEqual(b"queued" in seen, visible, seen)


if __name__ == "__main__":
    unittest.main()
