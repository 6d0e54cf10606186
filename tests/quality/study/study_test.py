"""The study's budget and sparse run against plain loops and the dense model. CPU, small."""

import json
import os
import tempfile
import unittest
from unittest import mock

import torch

from study import budget, measure, run_study, scores, sparse
from train import checkpoint, delta_rule, model as model_module
from train.trainer_test import TINY


def plain_select(score, retention):
    """docs/algorithm.md, one example [n, Hk], in Python integers and lists."""
    count, pairs = score.shape
    z = [[min(round(float(s) * 65536), 2**25) for s in row] for row in score]
    factor = [count / (sum(row[p] for row in z) or 1) for p in range(pairs)]

    def key(item):
        t, p = item
        return -z[t][p] * factor[p], int(f"{t:011b}"[::-1], 2), p

    lo, hi = -(-retention * count / 4 // 1), min(1.0, 2 * retention) * count // 1
    ranked = [sorted(((t, p) for t in range(count)), key=key) for p in range(pairs)]
    taken = {item for row in ranked for item in row[:int(lo)]}
    used = [int(lo)] * pairs
    wanted = round(retention * count * pairs)
    for item in sorted((item for row in ranked for item in row), key=key):
        if len(taken) < wanted and item not in taken and used[item[1]] < hi:
            taken.add(item)
            used[item[1]] += 1
    return taken


class Budget(unittest.TestCase):
    def test_equals_the_definition(self):
        torch.manual_seed(0)
        for count, retention, scale in ((2048, 0.29, 1.0), (100, 0.15, 5.0), (333, 0.08, 1.0),
                                        (64, 0.5, 0.0)):
            score = torch.rand(1, count, 3) * torch.tensor([scale, 1.0, 0.2])
            score[:, ::7] = 0.5  # ties
            mask = budget.select(score, retention)[0]
            found = {(int(t), int(p)) for t, p in mask.nonzero()}
            self.assertEqual(found, plain_select(score[0], retention), (count, retention))

    def test_equal_shares_without_spread(self):
        score = torch.rand(2, 100, 2) * torch.tensor([1.0, 0.01])
        mask = budget.select(score, 0.3, spread=False)
        self.assertTrue((mask.sum(1) == 30).all())


class Run(unittest.TestCase):
    def setUp(self):
        self.model = model_module.Model(TINY).initialise(0)
        self.tokens = torch.randint(512, (2, 2200), generator=torch.Generator().manual_seed(0))

    def test_everything_kept_is_dense(self):
        dense = self.model.hidden(self.tokens)[0]
        found = sparse.Sparse(self.model, "beta", 1.0).hidden(self.tokens)
        self.assertLess(float((dense - found).abs().max()), 1e-4)

    def test_scores(self):
        """Right shapes; the oracle is the size of the true update; a copied key is not novel."""
        torch.manual_seed(1)
        q, k = (torch.nn.functional.normalize(torch.randn(1, 40, 1, 16), dim=-1) for _ in "qk")
        k[:, 20] = k[:, 15]
        w = scores.Window(q, k, torch.randn(1, 40, 2, 16), torch.rand(1, 40, 2),
                          -torch.rand(1, 40, 2), torch.zeros(1, 64, 1, 16),
                          torch.randn(1, 2, 16, 16), torch.Generator().manual_seed(0),
                          torch.randn(1, 8))
        for name, score in scores.SCORES.items():
            found = score(w)
            self.assertEqual(found.shape, (1, 40, 1), name)
            self.assertTrue((found >= 0).all(), name)
            self.assertIn(name, scores.COST)
        self.assertAlmostEqual(float(scores.novelty(w)[0, 20, 0]), 0.0, places=5)
        state, sizes = w.state[0], []
        for t in range(40):
            state = state * w.log_gate[0, t, :, None, None].exp()
            error = w.v[0, t] - torch.einsum("hkv,k->hv", state, k[0, t, 0])
            update = w.beta[0, t, :, None] * error
            sizes.append(update.norm(dim=-1).max())
            state = state + k[0, t, 0][None, :, None] * update[:, None]
        off = torch.stack(sizes) - scores.oracle_surprise(w)[0, :, 0]
        self.assertLess(float(off.abs().max()), 1e-4)

    def test_masked_run_equals_masked_recurrence(self):
        """Layer 0 alone: o = masked recurrence + self term, for a mask the selector made."""
        layer = self.model.layers[0].linear_attn
        x = torch.randn(1, 300, TINY.hidden_size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            q, k, v, beta, log_gate = layer.parts(x)
            mask = torch.ones(1, 300, 1, dtype=torch.bool)
            mask[:, :236] = budget.select(beta.amax(-1, keepdim=True)[:, :236], 0.2)
            out, _ = delta_rule.recurrent(q, k, v, beta * mask, log_gate)
            own = (q * k).sum(-1)
            out = out + (beta * ~mask * own)[..., None] * v
            runner = sparse.Sparse(self.model, "beta", 0.2)
            found = runner._mix(layer, 0, x)
            self.assertLess(float((layer.mix(x, out) - found).abs().max()), 1e-4)
            self.assertAlmostEqual(float(runner.taken[0][0]), (47 + 64) / 300, places=2)

    def test_command_line(self):
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.dict(model_module.CONFIGS, {"tiny": TINY}):
            out = os.path.join(folder, "study.json")
            checkpoint.save(self.model, os.path.join(folder, "model"))
            code = run_study.main(["--model", "tiny", "--folder", os.path.join(folder, "model"),
                                   "--out", out, "--lengths", "2304", "--retentions", "0.2",
                                   "--selectors", "beta,learned,random", "--examples", "3",
                                   "--device", "cpu"])
            self.assertEqual(code, 0)
            with open(out, encoding="utf-8") as file:
                rows = json.load(file)["rows"]
        self.assertEqual([row["selector"] for row in rows],
                         ["dense", "beta", "learned", "random", "beta, pairs equal",
                          "beta, layers by KL", "beta, no self term"])
        for row in rows[1:]:
            self.assertGreater(row["kl"][0], 0)
            # 20 % of 2304 - 64 and 64 kept tokens; one GDN layer.
            self.assertAlmostEqual(row["taken"][0][0], (448 + 64) / 2304, places=2)

    def test_summary(self):
        lines = [{"recall": value} for value in (1.0, 1.0, 0.5, 0.5, 0.0, 0.0)]
        mean, spread = measure.summary(lines)["recall"]
        self.assertEqual((mean, spread), (0.5, 0.5))


if __name__ == "__main__":
    unittest.main()
