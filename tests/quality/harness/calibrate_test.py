"""`sparsegdn calibrate` on servers that it starts, with needle-gdn: two short prompts, three budgets.

Goal: the files are what the server reads, the budget follows the target, a profile is kept only
where it helps, a running server can be measured too, and no server outlives the command.
TEST_SERVER_BINARY, TEST_CLI.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

from tasks import registry

MODEL = pathlib.Path(__file__).resolve().parents[2] / "data/models/needle-gdn"


class Calibrate(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.out = os.path.join(self.folder, "out")
        self.prompts = self.write("prompts.jsonl", "".join(
            json.dumps([int(i) for i in registry.make("needle_multi_key", 1024, seed).prompt])
            + "\n" for seed in (0, 1)))

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def call(self, *arguments, prompts=None):
        environment = {**os.environ, "TMPDIR": self.folder}
        return subprocess.run(
            [os.environ["TEST_CLI"], "calibrate", "--prompts", prompts or self.prompts, "--out",
             self.out, *arguments], capture_output=True, text=True, timeout=240, env=environment)

    def own(self, *arguments, **more):
        return self.call("--model", str(MODEL), "--server-binary",
                         os.environ["TEST_SERVER_BINARY"], "--server-flags", "--backend=cpu",
                         *arguments, **more)

    def read(self, name):
        with open(os.path.join(self.out, name), encoding="utf-8") as file:
            return file.read()

    def test_profile_budget_and_files(self):
        done = self.own("--target-kl", "0.02", "--retentions", "0.5,0.1,0.03")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads(self.read("calibration.json"))
        self.assertEqual((report["prompts"], report["layers"]), (2, [0, 1, 2, 3]))
        # The first layer is hardly read, the last all the time (docs/quality.md).
        self.assertEqual(max(range(4), key=report["layer_kl"].__getitem__), 3)
        self.assertLess(report["layer_kl"][0], 0.2 * report["layer_kl"][3])
        rows = report["shared"]
        self.assertEqual([row["retention"] for row in rows], [0.5, 0.1, 0.03])
        for row, alike in zip(rows, report["alike"]):
            self.assertTrue(0.5 < row["top1"] <= 1, row)
            self.assertGreaterEqual(row["worst_prompt_kl"], row["kl"])
            # 64 tokens are always kept, and a part of the rest.
            self.assertAlmostEqual(row["kept"], row["retention"]
                                   + (1 - row["retention"]) * 64 / 1023, delta=0.01)
            self.assertAlmostEqual(row["kept"], alike["kept"], delta=0.01)
        self.assertGreater(report["alike"][2]["kl"], 2 * report["alike"][0]["kl"])
        meets = [row["retention"] for row in rows if row["kl"] <= 0.02]
        self.assertEqual(report["recommended_retention"], min(meets))
        page = self.read("report.html")
        self.assertIn(f"Retention {min(meets):g} is the smallest measured", page)
        self.assertEqual(page.count("<svg"), 2)
        self.assertIn(f"Retention {min(meets):g} is the smallest measured", done.stdout)
        self.assertLess(rows[2]["kl"], report["alike"][2]["kl"])
        profile = json.loads(self.read("budget_profile.json"))
        self.assertEqual(profile["relative_retention"], report["profile"])
        self.assertAlmostEqual(sum(report["profile"]) / 4, 1.0, places=3)
        self.assertGreater(report["profile"][3], report["profile"][0])
        # No server, and none of their folders, is left.
        self.assertEqual(sorted(os.listdir(self.folder)), ["out", "prompts.jsonl"])
        self.follow(os.path.join(self.out, "budget_profile.json"), rows[1]["kl"])

    def follow(self, profile, kl):
        """A server that was started with the file is measured through --server: the same figure."""
        ports = os.path.join(self.folder, "ports")
        with subprocess.Popen(
                [os.environ["TEST_SERVER_BINARY"], "--model", str(MODEL), "--backend=cpu",
                 "--budget-profile", profile, "--listen", "127.0.0.1:0", "--metrics-listen", "",
                 "--port-file", ports], stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL) as server:
            try:
                while not os.path.exists(ports) or not os.path.getsize(ports):
                    self.assertIsNone(server.poll())
                with open(ports, encoding="ascii") as file:
                    port = file.readline().strip()
                done = self.call("--server", f"127.0.0.1:{port}", "--wait", "60", "--target-kl",
                                 "1e-9", "--retentions", "0.1", "--json", "--quiet")
            finally:
                server.terminate()
        self.assertEqual(done.returncode, 8, done.stderr)  # no budget is that good
        self.assertIn("NO_BUDGET", done.stderr)
        report = json.loads(done.stdout)
        self.assertIsNone(report["recommended_retention"])
        self.assertAlmostEqual(report["alike"][0]["kl"], kl, places=6)
        # The profile of the run before does not stay beside a report that has none.
        self.assertEqual(sorted(os.listdir(self.out)), ["calibration.json", "report.html"])

    def test_refusals(self):
        bad = self.write("bad.jsonl", "[1, 2]\n\"x\"\n")
        for arguments, more, code, message in (
                (("--target-kl", "1"), {"prompts": bad}, 2, "bad.jsonl:2: must be a JSON list"),
                (("--target-kl", "0"), {}, 2, "--target-kl is needed, and must be above 0"),
                (("--target-kl", "1", "--server", "x:1"), {}, 2, "needs one of --model"),
                (("--target-kl", "1", "--retentions", "0.5,2"), {}, 2, "--retentions: \"2\""),
                (("--target-kl", "1"), {"prompts": "/nowhere"}, 7, "/nowhere"),
                (("--target-kl", "1", "--out", "x", "--out", "y"), {}, 2, "given twice")):
            with self.subTest(arguments=arguments, more=more):
                done = self.own(*arguments, **more)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(message, done.stderr)
        done = self.call("--model", "/nowhere", "--target-kl", "1", "--server-binary",
                         os.environ["TEST_SERVER_BINARY"])
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("the server ended before it was ready", done.stderr)
        self.assertIn("/nowhere", done.stderr)


if __name__ == "__main__":
    unittest.main()
