"""Goal: what the running server streams is what transformers computes, in every form it offers.

Method: the built server on a bundled model, through the Python client, against tests/golden (made by
transformers in fp32 on other code) and against itself.

Tolerance: 1e-4 absolute (the fixtures' own) plus 2e-5 of the element, some hundred fp32 roundings:
other summation orders through four layers, in transformers or with the prompt cut elsewhere.
Everything else is exact: exports are conversions of one fp32 state, and two runs of one request are
bitwise equal.
"""

import threading
import unittest

import numpy as np
from server_process import GOLDEN, ServerProcess, read_safetensors
from sparsegdn_client import (
    Budget,
    Outputs,
    PrefillClient,
    bf16_to_float32,
    compute_model_identity,
    float32_to_bf16,
)
from sparsegdn_client.types import DENSE, NOTHING

ATOL = 1e-4
RTOL = 2e-5
FP32 = Outputs(state_dtype="fp32", kv_dtype="fp32")


def tokens(count, seed=1, vocab=512):
    return np.random.default_rng(seed).integers(0, vocab, count)


class ModelCase(unittest.TestCase):
    """One server and one client for all tests of a class."""

    model = "tiny-hybrid"

    @classmethod
    def setUpClass(cls):
        cls.server = ServerProcess(cls.model)
        cls.addClassCleanup(cls.server.stop)
        cls.client = PrefillClient(cls.server.target)
        cls.addClassCleanup(cls.client.close)

    def close(self, got, expected, atol=ATOL, rtol=RTOL):
        self.assertEqual(got.shape, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)

    def same_snapshot(self, got, expected):
        """Every state, conv state and KV row, whatever the storage."""
        self.assertEqual(list(got), list(expected))
        for name in expected:
            self.close(got.float32(name), expected.float32(name))


class GoldenTest(ModelCase):
    def check_states(self, snapshot, golden):
        compared = 0
        for name, expected in golden.items():
            kind, *rest = name.split(".")
            if kind == "states":
                layer = int(rest[0])
                got = snapshot.state(layer) if rest[1] == "recurrent" else snapshot.conv_state(layer)
            elif kind == "kv":
                got = snapshot.key(int(rest[0])) if rest[1] == "key" else snapshot.value(int(rest[0]))
            else:
                continue
            self.close(got, expected)
            compared += 1
        self.assertGreater(compared, 0)

    def test_states_and_logits(self):
        for count in (70, 300):
            with self.subTest(count):
                golden = read_safetensors(GOLDEN / f"{self.model}-{count}.safetensors")
                outputs = Outputs(kv_dtype="fp32", logits_positions=golden["rows"].tolist())
                done = self.client.prefill(golden["ids"], budget=DENSE, snapshot_at="after_last",
                                           outputs=outputs)
                self.assertEqual(done.snapshot.position, count)
                self.check_states(done.snapshot, golden)
                self.close(done.snapshot["logits"], golden["logits"])
                best = int(golden["logits"][-1].argmax())
                self.assertEqual(done.result.next_token, best)

    def test_identity_is_that_of_the_folder(self):
        self.assertEqual(compute_model_identity(self.server.model), self.server.info.model_identity)


class GdnGoldenTest(GoldenTest):
    model = "tiny-gdn"


class ContinuationTest(ModelCase):
    """Decoding from a snapshot, against the tokens and logits of transformers."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.golden = read_safetensors(GOLDEN / "tiny-hybrid-continuation.safetensors")
        cls.ids = cls.golden["ids"]

    def step(self, token, snapshot_id):
        outputs = Outputs(kv_dtype="fp32", logits_positions=[self.position])
        done = self.client.prefill([token], resume_from=snapshot_id, first_position=self.position,
                                   budget=DENSE, snapshot_at="after_last", keep=True,
                                   outputs=outputs)
        self.client.release(snapshot_id)
        self.position += 1
        return done

    def test_snapshot_before_the_last_token(self):
        done = self.client.prefill(self.ids, budget=DENSE, outputs=FP32)
        self.assertEqual(done.snapshot.position, len(self.ids) - 1)
        for layer in done.snapshot.layers("recurrent_state"):
            self.close(done.snapshot.state(layer), self.golden[f"states.{layer}.recurrent"])
            self.close(done.snapshot.conv_state(layer), self.golden[f"states.{layer}.conv"])
        for layer in done.snapshot.layers("key"):
            self.close(done.snapshot.key(layer), self.golden[f"kv.{layer}.key"])

    def test_greedy_tokens_logits_and_final_state(self):
        done = self.client.prefill(self.ids, budget=DENSE, outputs=NOTHING, keep=True)
        snapshot_id, token, greedy = done.result.snapshot_id, int(self.ids[-1]), []
        self.position = len(self.ids) - 1
        for expected in self.golden["logits"]:
            done = self.step(token, snapshot_id)
            self.close(done.snapshot["logits"][0], expected)
            snapshot_id, token = done.result.snapshot_id, done.result.next_token
            greedy.append(token)
        self.client.release(snapshot_id)
        self.assertEqual(greedy, self.golden["greedy"].tolist())
        name = next(n for n in self.golden if n.startswith("final."))
        self.close(done.snapshot.state(int(name.split(".")[1])), self.golden[name])

    def test_resume_token_by_token_equals_one_prefill(self):
        for first in (1, 3, 63, 64, 65, 130):
            for at in ("before_last", "after_last"):
                with self.subTest(first=first, at=at):
                    ids = tokens(first + 5, seed=first)
                    # Before the last token, the first step repeats it.
                    self.position = first - (at == "before_last")
                    done = self.client.prefill(ids[:first], budget=DENSE, outputs=NOTHING, keep=True,
                                               snapshot_at=at)
                    rows = []
                    for token in ids[self.position :]:
                        done = self.step(int(token), done.result.snapshot_id)
                        rows.append(done.snapshot["logits"][0])
                    self.client.release(done.result.snapshot_id)
                    positions = list(range(len(ids) - len(rows), len(ids)))
                    whole = self.client.prefill(
                        ids, budget=DENSE, snapshot_at="after_last",
                        outputs=Outputs(kv_dtype="fp32", logits_positions=positions))
                    self.close(np.stack(rows), whole.snapshot["logits"])
                    for layer in whole.snapshot.layers("recurrent_state"):
                        self.close(done.snapshot.state(layer), whole.snapshot.state(layer))
                        self.close(done.snapshot.conv_state(layer),
                                   whole.snapshot.conv_state(layer))
                    self.assertEqual(done.result.next_token, whole.result.next_token)

    def test_resumed_rows_join_to_the_whole(self):
        ids = tokens(200, seed=5)
        base = self.client.prefill(ids[:120], budget=DENSE, snapshot_at="after_last", keep=True,
                                   outputs=FP32)
        tail = self.client.prefill(ids[120:], budget=DENSE, snapshot_at="after_last", outputs=FP32,
                                   resume_from=base.result.snapshot_id)
        self.client.release(base.result.snapshot_id)
        self.assertEqual(tail.result.usage.cached_tokens, 120)
        whole = self.client.prefill(ids, budget=DENSE, snapshot_at="after_last", outputs=FP32)
        self.same_snapshot(tail.snapshot.joined(base.snapshot), whole.snapshot)

    def test_import_then_resume_equals_resume_from(self):
        ids = tokens(150, seed=6)
        for budget in (DENSE, Budget(retention=0.29)):
            kept = self.client.prefill(ids[:100], budget=budget, keep=True, outputs=FP32,
                                       snapshot_at="after_last")
            ref = self.client.import_snapshot(kept.snapshot)
            self.assertEqual(ref.position, 100)
            both = [self.client.prefill(ids[100:], budget=budget, resume_from=snapshot_id,
                                        outputs=FP32)
                    for snapshot_id in (kept.result.snapshot_id, ref.snapshot_id)]
            self.assertEqual(both[0].snapshot.digest, both[1].snapshot.digest)
            self.client.release(kept.result.snapshot_id)
            self.client.release(ref.snapshot_id)

    def test_import_takes_every_export(self):
        """An exported form comes back as itself: a second export of what was imported is equal."""
        ids = tokens(90, seed=7)
        # Resuming runs at least one token, so the state is compared after the same step.
        exact = None
        for outputs in (Outputs(), Outputs(state_layout="value_major"),
                        Outputs(conv_layout="three_columns")):
            done = self.client.prefill(ids, budget=DENSE, outputs=outputs, snapshot_at="after_last")
            ref = self.client.import_snapshot(done.snapshot)
            step = self.client.prefill([7], resume_from=ref.snapshot_id, budget=DENSE,
                                       snapshot_at="after_last", outputs=FP32)
            exact = exact or step.snapshot
            for layer in exact.layers("recurrent_state"):
                np.testing.assert_array_equal(step.snapshot.state(layer), exact.state(layer))
            self.client.release(ref.snapshot_id)
        for dtype, share in (("bf16", 2**-8), ("fp8_e4m3", 2**-4)):
            done = self.client.prefill(ids, budget=DENSE, outputs=Outputs(state_dtype=dtype),
                                       snapshot_at="after_last")
            ref = self.client.import_snapshot(done.snapshot)
            step = self.client.prefill([7], resume_from=ref.snapshot_id, budget=DENSE,
                                       snapshot_at="after_last", outputs=FP32)
            for layer in exact.layers("recurrent_state"):
                # One rounding of each element by `share` of the largest; a step shrinks it.
                bound = 2 * share * np.abs(exact.state(layer)).max()
                self.close(step.snapshot.state(layer), exact.state(layer), bound, 0)
            self.client.release(ref.snapshot_id)


class ExportTest(ModelCase):
    """Every form of the snapshot is the fp32 one, converted."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ids = tokens(200, seed=2)
        cls.exact = cls.client.prefill(cls.ids, outputs=FP32).snapshot

    def export(self, **outputs):
        return self.client.prefill(self.ids, outputs=Outputs(**outputs)).snapshot

    def linear_layers(self):
        return self.exact.layers("recurrent_state")

    def test_two_runs_are_bitwise_equal(self):
        self.assertEqual(self.export(state_dtype="fp32", kv_dtype="fp32").digest, self.exact.digest)

    def test_bf16(self):
        got = self.export(state_dtype="bf16", kv_dtype="bf16")
        for name in [f"layers.{i}.recurrent_state" for i in self.linear_layers()] + [
            "layers.3.key", "layers.3.value"]:
            np.testing.assert_array_equal(got[name], float32_to_bf16(self.exact[name]))

    def test_value_major_is_the_transpose(self):
        for dtype in ("fp32", "bf16"):
            got = self.export(state_layout="value_major", state_dtype=dtype)
            for layer in self.linear_layers():
                name = f"layers.{layer}.recurrent_state"
                self.assertEqual(got.infos[name].state_layout, "value_major")
                plain = self.exact[name].transpose(0, 2, 1)
                self.assertFalse(np.array_equal(plain, self.exact[name]))
                expected = plain if dtype == "fp32" else bf16_to_float32(float32_to_bf16(plain))
                np.testing.assert_array_equal(got.float32(name), expected)

    def test_fp8_scales_rows_of_the_exported_layout(self):
        for layout in ("key_major", "value_major"):
            got = self.export(state_dtype="fp8_e4m3", state_layout=layout)
            for layer in self.linear_layers():
                name = f"layers.{layer}.recurrent_state"
                exact = self.exact[name]
                if layout == "value_major":
                    exact = exact.transpose(0, 2, 1)
                largest = np.abs(exact).max(axis=-1)
                np.testing.assert_allclose(got[f"{name}_scale"], largest / 448, rtol=1e-6)
                # E4M3 keeps 3 bits of mantissa (2^-4 of the value) above a fixed grid of 2^-10.
                bound = np.maximum(np.abs(exact) * 2.0**-4,
                                   (largest / 448 * 2.0**-10)[..., np.newaxis])
                self.assertTrue((np.abs(got.float32(name) - exact) <= bound * 1.0001).all())

    def test_three_columns_are_the_newest(self):
        got = self.export(conv_layout="three_columns")
        for layer in self.linear_layers():
            name = f"layers.{layer}.conv_state"
            np.testing.assert_array_equal(got[name], self.exact[name][:, 1:])

    def test_left_out(self):
        for what, kinds in (("state", ["recurrent_state"]), ("conv_state", ["conv_state"]),
                            ("kv", ["key", "value"])):
            got = self.export(**{what: False})
            self.assertEqual([n for n in self.exact if self.exact.infos[n].kind not in kinds],
                             list(got))

    def test_top_k_and_logprobs_agree_with_the_logits(self):
        positions = list(range(150, 200))
        full = self.export(state=False, kv=False, conv_state=False, logits_positions=positions)
        top = self.export(state=False, kv=False, conv_state=False, logits_positions=positions,
                          top_k=5, prompt_logprobs_from=151)
        logits = full["logits"]
        order = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
        np.testing.assert_array_equal(top["top_k_ids"], order)
        np.testing.assert_array_equal(top["top_k_logits"], np.take_along_axis(logits, order, -1))
        wide = logits.astype(np.float64)
        norm = np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1)) + wide.max(-1)
        expected = wide[np.arange(49), self.ids[151:]] - norm[:49]
        # Four fp32 roundings of numbers below 16: a max, a sum's log, two differences.
        self.close(top["prompt_logprobs"], expected.astype(np.float32), 4 * 16 * 2.0**-24, 0)

    def test_checkpoints_are_prefills_of_the_prefix(self):
        got = self.client.prefill(self.ids, budget=DENSE, outputs=Outputs(checkpoint_every=64))
        positions = sorted({int(n.split(".")[1]) for n in got.snapshot if n.startswith("check")})
        self.assertEqual(positions, [64, 128, 192])
        for position in positions:
            prefix = self.client.prefill(self.ids[: position + 1], budget=DENSE).snapshot
            for layer in self.linear_layers():
                self.close(got.snapshot.state(layer, position), prefix.state(layer))
                self.close(got.snapshot.conv_state(layer, position), prefix.conv_state(layer))

    def test_sparse_checkpoint_at_a_window(self):
        # With one kept token, the first window's mask is a function of that window alone.
        budget, ids = Budget(retention=0.29, keep_last=1), tokens(4300, seed=9)
        got = self.client.prefill(ids, budget=budget,
                                  outputs=Outputs(kv=False, checkpoint_every=2048)).snapshot
        for position in (2048, 4096):
            prefix = self.client.prefill(ids[: position + 1], budget=budget,
                                         outputs=Outputs(kv=False)).snapshot
            for layer in self.linear_layers():
                self.close(got.state(layer, position), prefix.state(layer))

    def test_first_token_alone(self):
        snapshot = self.client.prefill([5]).snapshot
        self.assertEqual(snapshot.position, 0)
        for layer in self.linear_layers():
            self.assertFalse(snapshot.state(layer).any())
            self.assertFalse(snapshot.conv_state(layer).any())
        self.assertEqual(snapshot["layers.3.key"].shape, (0, 2, 64))


class BudgetTest(ModelCase):
    def test_effective_budget_and_counts(self):
        ids = tokens(5000, seed=3)
        rows = {
            "default": (None, "retention", 0.29),
            "dense": (DENSE, "dense", 1.0),
            "retention": (Budget(retention=0.15, keep_last=1), "retention", 0.15),
            "coverage": (Budget(coverage=0.9), "coverage", None),
            "all": (Budget(retention=1.0), "retention", 1.0),
        }
        for name, (budget, mode, share) in rows.items():
            with self.subTest(name):
                result = self.client.prefill(ids, budget=budget, outputs=NOTHING).result
                usage, effective = result.usage, result.budget
                self.assertEqual(effective.mode, mode)
                self.assertEqual(usage.prompt_tokens, 5000)
                pairs = self.server.info.num_k_heads
                layers = self.server.info.layers.count("linear_attention")
                self.assertEqual(usage.events_total, usage.computed_tokens * pairs * layers)
                shares = np.array([result.retained[i] for i in sorted(result.retained)])
                self.assertEqual(shares.shape, (layers, pairs))
                # Shares are float32 of counts / tokens.
                self.assertAlmostEqual(shares.sum() * usage.computed_tokens, usage.events_selected,
                                       delta=0.5)
                if share is not None:
                    # Rounding to whole events per window, and the kept tail, beyond the share.
                    kept = effective.keep_last or 0
                    expected = share + (1 - share) * kept / 5000
                    self.assertAlmostEqual(usage.events_selected / usage.events_total, expected,
                                           delta=0.002)
                if mode != "dense":
                    self.assertIsNotNone(effective.min_retention)
                    self.assertIsNotNone(effective.keep_last)
                self.assertNotIn(None, (effective.selector, effective.solver, effective.local))

    def test_the_default_is_published(self):
        default = self.server.info.default_budget
        self.assertEqual((default.mode, default.retention, default.solver, default.local),
                         ("retention", 0.29, "auto", "self"))

    def test_a_full_budget_is_dense(self):
        ids = tokens(300, seed=4)
        dense = self.client.prefill(ids, budget=DENSE, outputs=FP32).snapshot
        full = self.client.prefill(ids, budget=Budget(retention=1.0), outputs=FP32).snapshot
        self.same_snapshot(full, dense)

    def test_a_sparse_budget_is_another_state(self):
        ids = tokens(300, seed=4)
        dense = self.client.prefill(ids, budget=DENSE).snapshot.state(0)
        # Kept tokens at the end would hide it: this layer forgets fast.
        budget = Budget(retention=0.1, keep_last=1)
        sparse = self.client.prefill(ids, budget=budget).snapshot.state(0)
        self.assertGreater(np.abs(dense - sparse).max(), 0.1 * np.abs(dense).max())


class ConcurrencyTest(ModelCase):
    def test_clients_do_not_meet(self):
        """Each of four prompts alone, then all at once from clients of their own, twice over."""
        prompts = [tokens(n, seed=n) for n in (3000, 17, 2048, 400)]
        alone = [self.client.prefill(p, outputs=FP32).snapshot for p in prompts]
        got = {}

        def work(i):
            with PrefillClient(self.server.target) as client:
                got[i] = client.prefill(prompts[i % 4], outputs=FP32).snapshot

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(got), list(range(8)))
        for i, snapshot in got.items():
            self.same_snapshot(snapshot, alone[i % 4])


if __name__ == "__main__":
    unittest.main()
