"""Calibration on the built server with needle-gdn: two short prompts, three retentions.

Goal: the profile is better than none at equal retention, the budget follows the target, files are
what the server reads. TEST_SERVER_BINARY.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import shutil
import tempfile
import unittest

from harness import calibrate
from tasks import registry

MODEL = pathlib.Path(__file__).resolve().parents[2] / "data/models/needle-gdn"


class Calibrate(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.model = os.path.join(self.folder, "needle-gdn")  # the server writes beside it
        shutil.copytree(MODEL, self.model)
        self.prompts = os.path.join(self.folder, "prompts.jsonl")
        with open(self.prompts, "w", encoding="utf-8") as file:
            for seed in (0, 1):
                ids = registry.make("needle_multi_key", 1024, seed).prompt
                file.write(json.dumps([int(i) for i in ids]) + "\n")

    def run_main(self, target):
        out = os.path.join(self.folder, "out")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = calibrate.main([
                "--model", self.model, "--prompts", self.prompts, "--target-kl", str(target),
                "--out", out, "--server-binary", os.environ["TEST_SERVER_BINARY"],
                "--retentions", "0.5,0.29,0.15", "--server-flag=--backend=cpu"])
        print(printed.getvalue())
        with open(os.path.join(out, "calibration.json"), encoding="utf-8") as file:
            return code, json.load(file), out

    def test_profile_budget_and_files(self):
        code, report, out = self.run_main(0.03)
        self.assertEqual(code, 0)
        self.assertEqual(report["layers"], [0, 1, 2, 3])
        # The first layer is hardly read, the last all the time (docs/quality.md).
        self.assertEqual(max(range(4), key=report["layer_kl"].__getitem__), 3)
        self.assertLess(report["layer_kl"][0], 0.01 * report["layer_kl"][3])
        with open(os.path.join(out, "budget_profile.json"), encoding="utf-8") as file:
            profile = json.load(file)["relative_retention"]
        self.assertEqual(profile, report["profile"])
        self.assertAlmostEqual(sum(profile) / 4, 1.0, places=3)
        alike, shared = dict((row[0], row[1]) for row in report["alike"]), {}
        for share, kl, top1 in report["shared"]:
            shared[share] = kl
            self.assertTrue(0.5 < top1 <= 1, top1)
        self.assertLess(shared[0.29], 0.8 * alike[0.29])
        meets = [share for share, kl in shared.items() if kl <= 0.03]
        self.assertEqual(report["recommended_retention"], min(meets))
        with open(os.path.join(out, "report.html"), encoding="utf-8") as file:
            text = file.read()
        self.assertIn(f"retention {min(meets):g} is the smallest measured", text)
        # A server with the model reads the file and selects by it.
        shutil.copy(os.path.join(out, "budget_profile.json"), self.model)
        options = argparse.Namespace(server_binary=os.environ["TEST_SERVER_BINARY"],
                                     model=self.model, server_flag=["--backend=cpu"])
        with calibrate.serve(options, profile) as client:
            ids = calibrate.read_prompts(self.prompts, None)[0]
            done = client.prefill(ids, budget=calibrate.Budget(retention=0.29, keep_last=0),
                                  snapshot_at="after_last").result
        shares = [sum(pairs) / len(pairs) for _, pairs in sorted(done.retained.items())]
        self.assertAlmostEqual(sum(shares) / 4, 0.29, delta=0.003)
        self.assertGreater(shares[3], 2 * shares[0])

    def test_candidates(self):
        self.assertEqual(calibrate.candidates([1.0, 1.0])[1:], [[1.0, 1.0]] * 3)
        last = calibrate.candidates([1e-6, 0.1, 0.3])[-1]
        self.assertGreater(last[2], last[1])
        self.assertGreater(last[0], 0.04)

    def test_prompts_are_refused_by_line(self):
        path = os.path.join(self.folder, "bad.jsonl")
        for text, message in (("[1, 2]\n\"x\"\n", ":2: must be a list of token ids"),
                              ("\n", "no prompt in it")):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            with self.assertRaisesRegex(ValueError, message):
                calibrate.read_prompts(path, None)


if __name__ == "__main__":
    unittest.main()
