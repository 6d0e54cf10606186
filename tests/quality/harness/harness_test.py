"""The harness on the built server with needle-gdn: the reduced grid, controls, text, reports.

Goal: dense recalls, 29 % recalls about as much, masks that no selector would choose do not: the
harness can tell. Figures are those of fixed seeds on one build; bounds leave 0.08 for other builds
(one or two of a grid's 72 needles). The server and the numpy model around libsparsegdn.so agree to
1e-3 in the NLL: fp32 both, other summation orders. TEST_SERVER_BINARY, TEST_LIBRARY.
"""

import contextlib
import csv
import io
import json
import os
import pathlib
import sys
import tempfile
import unittest

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/integration"))

from harness import drive, kernel_model, report, request, run_quality  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from sparsegdn_client import Budget, PrefillClient  # noqa: E402
from tasks import registry, text, tokenizer  # noqa: E402

REQUESTS = pathlib.Path(__file__).resolve().parent / "requests"
LIBRARY = os.environ["TEST_LIBRARY"]


class OnServer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = ServerProcess("needle-gdn")
        cls.addClassCleanup(cls.server.stop)
        cls.client = PrefillClient(cls.server.target)
        cls.addClassCleanup(cls.client.close)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name

    def run_request(self, name, data):
        path, out = (os.path.join(self.folder, name + end) for end in (".json", ""))
        with open(path, "w", encoding="utf-8") as file:
            json.dump(data, file)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = run_quality.main([
                "--server", self.server.target, "--request", path, "--out", out,
                "--library", LIBRARY, "--model", str(self.server.model)])
        self.assertEqual(code, 0)
        print(printed.getvalue())
        with open(os.path.join(out, "results.json"), encoding="utf-8") as file:
            found = json.load(file)
        with open(os.path.join(out, "results.csv"), encoding="utf-8") as file:
            self.assertEqual(len(list(csv.DictReader(file))), len(found["rows"]))
        return found, {(row["task"], row["budget"]): row for row in found["rows"]}, out

    def test_reduced_grid(self):
        with open(REQUESTS / "reduced.json", encoding="utf-8") as file:
            found, rows, out = self.run_request("reduced", json.load(file))
        self.assertEqual(found["identity"], self.server.info.model_identity)
        recall = {budget: row for (task, budget), row in rows.items() if task == "needle_recall"}
        self.assertGreater(recall["dense"]["score"], 0.9)
        self.assertGreater(recall["29 %"]["score"], recall["dense"]["score"] - 0.08)
        self.assertGreater(recall["15 %"]["score"], recall["dense"]["score"] - 0.12)
        for control in ("random", "shuffled"):
            self.assertLess(recall[f"{control} 29 %"]["score"], 0.3)
            self.assertGreater(recall[f"{control} 29 %"]["nll_delta"],
                               2 * recall["29 %"]["nll_delta"])
        self.assertTrue(recall["dense"]["counts"])
        self.assertEqual((recall["dense"]["kl"], recall["dense"]["top1"]), (0.0, 1.0))
        self.assertLess(recall["29 %"]["kl"], recall["15 %"]["kl"])
        self.assertLess(recall["15 %"]["nll_delta"], 0.2)
        # 29 % of the prompt's tokens but the last 64, and those.
        prompt = len(registry.make("needle_recall", 1024, 0).prompt)
        self.assertAlmostEqual(recall["29 %"]["retained"], (0.29 * (prompt - 64) + 64) / prompt,
                               delta=0.003)
        pairs = found["lines"][1]["pairs"]
        self.assertEqual({len(shares) for shares in pairs.values()}, {2})
        self.assertAlmostEqual(np.mean(list(pairs.values())), found["lines"][1]["retained"],
                               places=3)
        if report._plots([], [], out):  # matplotlib is here
            for name in ("score.png", "kl.png", "nll_delta.png", "retained_1.png"):
                with open(os.path.join(out, name), "rb") as file:
                    self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")

    def test_controls_are_the_same_model(self):
        """The numpy graph around the library gives the server's NLL, dense and selected."""
        model = kernel_model.KernelModel(LIBRARY, self.server.model)
        self.addCleanup(model.close)
        example = registry.make("needle_single", 700, 5)
        for selector, budget in (("dense", drive.DENSE), ("selected", Budget(retention=0.29))):
            # The server is sent the prompt alone, so it keeps the prompt's last tokens.
            prompt = example.prompt
            logits = model.logits(prompt, selector, 0.29).astype(np.float64)
            logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            nll = -logp[np.arange(len(prompt) - 1), prompt[1:]].mean()
            outcome = drive.run(self.client, self.server.info, example, budget)
            self.assertEqual(outcome.score, 1.0)
            self.assertAlmostEqual(outcome.nll, nll, delta=1e-3)
        self.assertEqual(model.score(example, "dense", 1.0)[0], 1.0)
        self.assertEqual(model.score(example, "random", 0.05)[0], 0.0)

    def test_resumed_answers_equal_one_pass(self):
        """Answers decoded call by call are those of one dense pass over the true answers."""
        example = registry.make("needle_recall", 1024, 1)  # dense finds all of them
        outcome = drive.run(self.client, self.server.info, example, drive.DENSE)
        model = kernel_model.KernelModel(LIBRARY, self.server.model)
        self.addCleanup(model.close)
        self.assertEqual(outcome.score, 1.0)
        self.assertEqual(model.score(example, "dense", 1.0)[0], 1.0)

    def test_text(self):
        """needle-gdn has never seen text: the path works, and the task does not count."""
        data = {"tasks": ["needle_single"], "lengths": [600], "seeds": [0], "tokenizer": "bytes",
                "budgets": [{"name": "29 %", "retention": 0.29}]}
        found, rows, _ = self.run_request("text", data)
        self.assertEqual([row["budget"] for row in found["rows"]], ["dense", "29 %"])
        row = rows["needle_single", "29 %"]
        self.assertFalse(row["counts"])
        self.assertGreater(row["nll"], 3)
        self.assertGreater(row["kl"], 0)

    def test_text_with_a_tokenizer_built_here(self):
        if tokenizer.missing():
            self.skipTest(tokenizer.missing())
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        built = Tokenizer(models.BPE())
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        sample = text.make("qa_documents", 2000, 9, tokenizer.Bytes()).prompt
        built.train_from_iterator([sample], trainers.BpeTrainer(
            vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False))
        folder = os.path.join(self.folder, "tokenizer")
        os.makedirs(folder)
        built.save(os.path.join(folder, "tokenizer.json"))
        data = {"tasks": ["qa_documents"], "lengths": [800], "seeds": [0], "tokenizer": folder,
                "budgets": [{"name": "15 %", "retention": 0.15}], "chat": True}
        found, _, _ = self.run_request("built", data)
        self.assertEqual(len(found["lines"]), 2)


class Files(unittest.TestCase):
    def test_requests_in_the_tree_are_valid(self):
        for path in sorted(REQUESTS.glob("*.json")):
            self.assertTrue(request.load(path).budgets, path)

    def test_refusals(self):
        good = {"tasks": ["needle_single"], "lengths": [1024], "seeds": [0], "budgets": []}
        self.assertEqual(request.parse(good).controls, ())
        for change, message in (
                ({"tasks": []}, "tasks: none"), ({"tasks": ["x"]}, "tasks: 'x', must be one of"),
                ({"lengths": [100]}, r"lengths: 100, must be in \[256"),
                ({"lengths": 5}, "lengths: 5, must be a list"), ({"seeds": [-1]}, "seeds: -1"),
                ({"budgets": [{"share": 1}]}, "budgets: field 'share', must be one of"),
                ({"budgets": [{"name": "dense"}]}, "must differ"),
                ({"controls": ["best"]}, "controls: 'best', must be one of random"),
                ({"controls": ["random"], "tokenizer": "bytes"}, "controls: with a tokenizer"),
                ({"tokens": 1}, "tokens: unknown field")):
            with self.assertRaisesRegex(ValueError, message):
                request.parse({**good, **change})

    def test_summary(self):
        lines = [{"task": "t", "length": 1, "seed": seed, "budget": budget, "score": score,
                  "nll": nll, "kl": 0.0, "top1": 1.0, "seconds": 1.0, "retained": 0.5, "pairs": {}}
                 for seed, budget, score, nll in ((0, "dense", 0.4, 2.0), (0, "b", 0.5, 2.5),
                                                  (1, "dense", 0.6, 3.0), (1, "b", 0.1, 3.1))]
        rows = report.summarise(lines)
        self.assertEqual([row["budget"] for row in rows], ["dense", "b"])
        self.assertAlmostEqual(rows[1]["nll_delta"], 0.3)
        self.assertAlmostEqual(rows[1]["nll_delta_spread"], 0.4 / 2**0.5)
        self.assertAlmostEqual(rows[1]["score"], 0.3)
        self.assertFalse(rows[1]["counts"])  # dense: 0.5
        self.assertEqual(report.heat(lines, "b"), (None, []))

    def test_positions(self):
        self.assertEqual(drive.positions(5, 512).tolist(), [0, 1, 2, 3, 4])
        places = drive.positions(100000, 248320)
        self.assertEqual(len(places), 67)
        self.assertEqual((places[0], places[-1]), (0, 99999))

    def test_distance(self):
        p = np.log([[0.5, 0.5], [0.9, 0.1]])
        q = np.log([[0.25, 0.75], [0.9, 0.1]])
        kl, top1 = drive.distance(p, q)
        self.assertAlmostEqual(kl, 0.5 * (0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)))
        self.assertEqual(top1, 0.5)


if __name__ == "__main__":
    unittest.main()
