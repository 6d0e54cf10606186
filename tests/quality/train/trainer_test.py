"""Training learns, resumes bit for bit, and its command line does what it says. CPU, small."""

import contextlib
import io
import json
import os
import tempfile
import unittest
from unittest import mock

import torch

from study import sparse
from train import (checkpoint, data, evaluate, model as model_module, sparsity, train_needle,
                   trainer)

TINY = model_module.Config(
    layer_types=(model_module.LINEAR, model_module.FULL), hidden_size=64, intermediate_size=64,
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
STAGES = (data.Stage(256, 1024, 4), data.Stage(1024, 2048, 6))
STREAMS = data.Plan((*STAGES, data.Stage(256, 1024, 8, stream=2)), carry_share=0.9)
PLAN = data.Plan(STAGES, carry_share=0.9, gaps=True)


SPARSE = trainer.Hyper(warmup=5, retentions=(0.29, 0.08), write_cost=0.02)


def make(seed=0, plan=PLAN, hyper=trainer.Hyper(warmup=5)):
    return trainer.Trainer(TINY, plan, seed, "cpu", hyper)


def advance(run, steps):
    return [run.train_step(data.batch(run.plan, run.seed, run.step, trainer.POOL_SLOTS))
            for _ in range(steps)]


def everything(run):
    """All that a step reads, by name."""
    found = {"pool": run.pool, "stream": run.stream, **run.model.state_dict()}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        found.update({f"{name} {key}": run.optimizer.state[parameter][key]
                      for name, parameter in run.model.named_parameters()})
    return found


class Training(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "state")

    def test_resume_is_bitwise(self):
        # The plans must use carried states and streams, or those would not be tested.
        self.assertTrue(any(data.batch(PLAN, 0, step, trainer.POOL_SLOTS).carried is not None
                            for step in range(7, PLAN.steps)))
        self.assertTrue(data.batch(STREAMS, 0, 12, trainer.POOL_SLOTS).streams)
        for plan, stop, hyper in ((PLAN, 7, trainer.Hyper(warmup=5)),
                                  (STREAMS, 12, trainer.Hyper(warmup=5)), (STREAMS, 12, SPARSE)):
            with self.subTest(plan=plan, hyper=hyper):
                self.check_resume(plan, stop, hyper)

    def check_resume(self, plan, stop, hyper):
        whole = make(plan=plan, hyper=hyper)
        advance(whole, plan.steps)
        first = make(plan=plan, hyper=hyper)
        advance(first, stop)
        first.save(self.folder)
        first.save(self.folder)  # over an older one
        self.assertEqual(sorted(os.listdir(os.path.dirname(self.folder))), ["state"])
        second = make(plan=plan, hyper=hyper)
        second.load(self.folder)
        self.assertEqual((second.step, second.tokens), (first.step, first.tokens))
        advance(second, plan.steps - stop)
        self.assertEqual(second.tokens, whole.tokens)
        wanted, found = everything(whole), everything(second)
        self.assertEqual(set(wanted), set(found))
        for name, value in wanted.items():
            self.assertTrue(torch.equal(value, found[name]), name)

    def test_state_of_another_run_is_refused(self):
        run = make()
        advance(run, 1)
        run.save(self.folder)
        for other in (make(seed=1), make(plan=data.Plan(STAGES)), make(hyper=SPARSE),
                      make(hyper=trainer.Hyper(rate=1e-3))):
            with self.assertRaisesRegex(ValueError, "identity .* must be"):
                other.load(self.folder)
        later = os.path.join(os.path.dirname(self.folder), "later")
        advance(run, 1)
        run.save(later)
        os.replace(os.path.join(later, "carried.safetensors"),
                   os.path.join(self.folder, "carried.safetensors"))
        with self.assertRaisesRegex(ValueError, "carried.*of step 2, must be of step 1"):
            make().load(self.folder)
        with self.assertRaisesRegex(ValueError, "batch: of step 0, must be of step 2"):
            run.train_step(data.batch(PLAN, 0, 0, trainer.POOL_SLOTS))

    def test_loss_falls(self):
        """Fixed seed, so no chance; measured: prose 6.31 to 6.05, answers 6.37 to 5.43."""
        plan = data.Plan((data.Stage(256, 1024, 60),))
        logs = advance(make(plan=plan, hyper=trainer.Hyper(rate=5e-3, warmup=5)), plan.steps)
        prose = [log["prose"].item() for log in logs]
        answer = [log["answer"].item() for log in logs]
        self.assertLess(sum(prose[-5:]) / 5, sum(prose[:3]) / 3 - 0.15)
        self.assertLess(sum(answer[-5:]) / 5, sum(answer[:3]) / 3 - 0.6)

    def test_files_of_the_real_models_are_small_enough(self):
        for name, config in model_module.CONFIGS.items():
            run = trainer.Trainer(config, PLAN, 0, "cpu")
            for parameter in run.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            run.optimizer.step()
            run.save(self.folder)
            sizes = [os.path.getsize(os.path.join(self.folder, file))
                     for file in os.listdir(self.folder)]
            self.assertEqual(len(sizes), 4)
            self.assertLess(max(sizes), 16 * 2**20, name)

    def test_a_gradient_that_is_not_finite_changes_nothing(self):
        run = make()
        advance(run, 1)
        before = {name: value.clone() for name, value in run.optimizer.state[
            run.model.lm_head.weight].items()}
        for parameter in run.model.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        self.assertFalse(torch.isfinite(run._clip()))
        self.assertTrue(all((p.grad == 0).all() for p in run.model.parameters()))
        run.optimizer.step()
        after = run.optimizer.state[run.model.lm_head.weight]
        self.assertTrue(torch.isfinite(after["exp_avg"]).all())
        self.assertTrue((after["exp_avg"].abs() <= before["exp_avg"].abs()).all())

    def test_learning_rate(self):
        hyper = trainer.Hyper(rate=1.0, warmup=10)
        rates = [trainer.learning_rate(hyper, step, 110) for step in range(110)]
        self.assertEqual(max(rates), 1.0)
        self.assertAlmostEqual(rates[0], 0.1)
        self.assertAlmostEqual(rates[59], 0.05 + 0.95 * 0.5, delta=0.02)
        self.assertAlmostEqual(rates[-1], 0.05, delta=0.001)


class Sparse(unittest.TestCase):
    def setUp(self):
        self.model = model_module.Model(TINY).initialise(0)
        self.tokens = torch.randint(512, (2, 2200), generator=torch.Generator().manual_seed(0))

    def hidden(self, rows, free):
        rule = sparsity.Sparsity(torch.tensor(rows), torch.tensor(free), 0.2)
        with torch.no_grad():
            return self.model.hidden(self.tokens, sparse=rule)[0], rule

    def test_sparse_rows_run_as_the_study_does_and_others_densely(self):
        """The study's run is compared with the definition and the product elsewhere."""
        found, rule = self.hidden([True, False], [2200, 2200])
        wanted = sparse.Sparse(self.model, "beta", 0.2, keep_last=0).hidden(self.tokens)
        with torch.no_grad():
            dense = self.model.hidden(self.tokens)[0]
        self.assertLess(float((found[0] - wanted[0]).abs().max()), 1e-4)
        self.assertLess(float((found[1] - dense[1]).abs().max()), 1e-4)
        self.assertGreater(float((found[0] - dense[0]).abs().max()), 1e-2)
        self.assertEqual(len(rule.written), 1)  # one GDN layer

    def test_dense_from_the_answers_on(self):
        beta = torch.rand(2, 2200, 2, generator=torch.Generator().manual_seed(1))
        rule = sparsity.Sparsity(torch.tensor([True, True]), torch.tensor([1000, 2200]), 0.2)
        mask = rule.mask(beta, 1)
        self.assertTrue(mask[0, 1000:].all())
        # No token behind `free` takes from the budget of its window: 20 % of 2048.
        self.assertEqual(int(mask[0, :1000, 0].sum()), 410)
        self.assertEqual(int(mask[1, :2048, 0].sum()), 410)

    def test_retention_and_dense_end_of_a_batch(self):
        batch = data.batch(PLAN, 0, 5, trainer.POOL_SLOTS)
        rule = sparsity.of_batch(batch, 0, (0.29, 0.08), torch.device("cpu"))
        self.assertIn(rule.retention, (0.29, 0.08))
        for row, free in enumerate(rule.free.tolist()):
            self.assertEqual(free, max(0, int(batch.answers[row].argmax()) - sparsity.KEEP_LAST))

    def test_starts_from_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(self.model, folder)
            start = checkpoint.start_of(folder, TINY)
        run = trainer.Trainer(TINY, PLAN, 0, "cpu", SPARSE, start=start)
        self.assertTrue(torch.equal(run.model.lm_head.weight,
                                    self.model.lm_head.weight.bfloat16().float()))
        self.assertNotEqual(run._identity, make(hyper=SPARSE)._identity)


class Accuracy(unittest.TestCase):
    def test_evaluate_scores_a_model_that_knows(self):
        """A stand-in model that repeats the next true token scores 1, one that never does 0."""

        class Oracle(torch.nn.Module):
            def __init__(self, right):
                super().__init__()
                self.weight, self.right = torch.nn.Parameter(torch.zeros(1)), right

            def hidden(self, tokens):
                return torch.nn.functional.one_hot(tokens.roll(-1, 1), 512).float(), None

            def logits(self, hidden):
                return hidden if self.right else -hidden

        for right in (True, False):
            found = evaluate.accuracy(Oracle(right), "needle_recall", 512, 2)
            self.assertEqual(found, float(right))


class CommandLine(unittest.TestCase):
    def call(self, *arguments):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = train_needle.main(["--model", "tiny", *arguments])
        return code, printed.getvalue()

    def test_train_stop_resume_export_evaluate(self):
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.dict(model_module.CONFIGS, {"tiny": TINY}), \
                mock.patch.object(data, "DEFAULT_STAGES", STAGES):
            out, exported = os.path.join(folder, "run"), os.path.join(folder, "model")
            common = ("--out", out, "--device", "cpu", "--workers", "1", "--log-every", "2")
            # Fitted to 0 seconds, every stage has one step.
            code, text = self.call("--out", out + "2", *common[2:], "--fit-seconds", "1e-6")
            self.assertEqual(code, 0, text)
            self.assertIn("finished at step 2 of 2", text)
            code, text = self.call("--out", out + "2", "--export", exported)
            self.assertIn("step 2 of 2", text)
            code, text = self.call(*common, "--minutes", "0")
            self.assertEqual(code, train_needle.UNFINISHED, text)
            self.assertIn("stopped at step 2 of 10", text)
            trainer.write_line(os.path.join(out, "log.jsonl"), {"step": 4, "lost": True})
            code, text = self.call(*common)
            self.assertEqual(code, 0, text)
            self.assertIn("step 2 of 10, cpu", text)
            with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
            self.assertEqual([line["step"] for line in lines], [2, 4, 6, 8, 10])
            self.assertFalse(any("lost" in line for line in lines))
            self.assertGreater(lines[-1]["seconds"], lines[0]["seconds"])
            with open(os.path.join(out, "curve.png"), "rb") as file:
                self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")
            code, text = self.call("--out", out, "--export", exported)
            self.assertIn("step 10 of 10", text)
            model = checkpoint.load(exported, TINY)
            self.assertEqual(len(list(model.parameters())), 14 + 11 + 3)
            code, text = self.call("--evaluate", exported, "--lengths", "512", "--examples", "1",
                                   "--device", "cpu")
            self.assertEqual(code, 0)
            self.assertEqual(len(text.strip().split("\n")), 1 + 9)

    def test_sparse_run_from_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.dict(model_module.CONFIGS, {"tiny": TINY}), \
                mock.patch.object(data, "SPARSE_STAGES", STAGES):
            start, out = os.path.join(folder, "start"), os.path.join(folder, "run")
            checkpoint.save(model_module.Model(TINY).initialise(0), start)
            common = ("--out", out, "--device", "cpu", "--workers", "0", "--sparse", start)
            code, text = self.call(*common)
            self.assertEqual(code, 0, text)
            self.assertIn("finished at step 10 of 10", text)
            code, text = self.call(*common, "--export", os.path.join(folder, "model"))
            self.assertIn("step 10 of 10", text)
            with self.assertRaisesRegex(ValueError, "identity"):
                self.call("--out", out, "--export", os.path.join(folder, "model"))

    def test_probe_times_every_stage(self):
        with mock.patch.dict(model_module.CONFIGS, {"tiny": TINY}), \
                mock.patch.object(data, "DEFAULT_STAGES", STAGES):
            code, text = self.call("--probe", "--device", "cpu")
        self.assertEqual(code, 0)
        self.assertRegex(text, r"length 256: .* ms a step.*\nlength 1024: .*\nplan: \d+ s")

    def test_out_is_needed(self):
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            train_needle.main(["--model", "needle-gdn"])


if __name__ == "__main__":
    unittest.main()
