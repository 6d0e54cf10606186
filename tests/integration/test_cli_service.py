"""Goal: the command line tool and the server do a user's whole job. Method: both as built; greedy
tokens against tests/golden, files against the Python client."""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from server_process import GOLDEN, ServerProcess, read_safetensors
from sparsegdn_client import load_snapshot

CLI = os.environ["TEST_CLI"]


class CliServiceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = ServerProcess("tiny-hybrid")
        cls.addClassCleanup(cls.server.stop)
        golden = read_safetensors(GOLDEN / "tiny-hybrid-continuation.safetensors")
        cls.ids, cls.greedy = golden["ids"].tolist(), golden["greedy"].tolist()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.prompt = cls.folder / "prompt.json"
        cls.prompt.write_text(json.dumps(cls.ids))

    def run_cli(self, *arguments):
        done = subprocess.run([CLI, *map(str, arguments), "--server", self.server.target, "--json"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_generate_is_what_transformers_generates(self):
        for at in ("before_last", "after_last"):
            with self.subTest(at):
                result = self.run_cli("generate", self.prompt, "--dense", "-n", "32",
                                      "--snapshot-at", at)
                self.assertEqual(result["tokens"], self.greedy)
                usage = result["prefill"]
                self.assertEqual(usage["events_selected"], usage["events_total"])

    def test_file_then_generate(self):
        path, last = self.folder / "s.safetensors", self.folder / "last"
        self.run_cli("prefill", self.prompt, "--dense", "--out", path)
        snapshot = load_snapshot(path)
        self.assertEqual(snapshot.position, len(self.ids) - 1)
        self.assertEqual(snapshot.model_identity, self.server.info.model_identity)
        last.write_text(str(self.ids[-1]))
        result = self.run_cli("generate", "--from", path, last, "-n", "32")
        self.assertEqual(result["tokens"], self.greedy)
        self.run_cli("prefill", self.prompt, "--dense", "--out", path, "--snapshot-at", "after_last")
        self.assertEqual(self.run_cli("generate", "--from", path, "-n", "32")["tokens"], self.greedy)

    def test_import_resume_release(self):
        path, rest = self.folder / "r.safetensors", self.folder / "rest"
        half = self.folder / "half"
        half.write_text(" ".join(map(str, self.ids[:100])))
        rest.write_text(" ".join(map(str, self.ids[100:])))
        self.run_cli("prefill", half, "--dense", "--out", path, "--snapshot-at", "after_last")
        ref = self.run_cli("import", path)
        done = self.run_cli("prefill", rest, "--dense", "--snapshot-at", "after_last",
                            "--resume-from", ref["snapshot_id"], "--first-position", 100)
        self.assertEqual(done["next_token"], self.greedy[0])
        self.assertEqual(done["usage"]["cached_tokens"], 100)
        self.assertTrue(self.run_cli("release", ref["snapshot_id"])["released"])

    def test_info_and_bench(self):
        info = self.run_cli("info")
        self.assertEqual(info["model_identity"], self.server.info.model_identity)
        self.assertEqual(info["default_budget"]["retention"], 0.29)
        cells = self.run_cli("bench", "--lengths", "64,2100", "--requests", 4, "--concurrency", 2)
        for cell in cells["lengths"]:
            self.assertEqual((cell["requests"], cell["errors"]), (4, 0))


if __name__ == "__main__":
    unittest.main()
