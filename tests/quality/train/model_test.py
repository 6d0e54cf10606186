"""Exported folders in transformers' Qwen3_5ForCausalLM against the training model.

Both in fp32 on the CPU from the same bf16 weights, so that only the order of sums differs: some
hundred roundings of 6e-8 a layer on logits of about 10 in 4 layers, hence 1e-4 (measured: 6e-6).
Weights are drawn wide enough that every branch matters; the tests that break a branch show it.
"""

import json
import os
import tempfile
import unittest

import torch
from safetensors import safe_open

from train import checkpoint, model as model_module

TOLERANCE = 1e-4


def busy(name):
    """A model whose norms, gates and heads are all away from their initial values."""
    model = model_module.build(name, seed=3)
    source = torch.Generator().manual_seed(4)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=source)
        if parameter.dim() == 1:
            parameter.data += 0.2 * noise
        elif "lm_head" in parameter_name:
            parameter.data += 0.1 * noise
    return model


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def theirs(self, tokens):
        from transformers import Qwen3_5ForCausalLM
        model, report = Qwen3_5ForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager",
            output_loading_info=True)
        self.assertFalse(report["missing_keys"])
        self.assertFalse(report["unexpected_keys"])
        with torch.no_grad():
            # Its cache cannot tell the length of a model without full attention.
            return model(tokens, use_cache=False).logits

    def test_transformers_gives_the_same_logits(self):
        tokens = torch.randint(0, 512, (2, 150), generator=torch.Generator().manual_seed(5))
        for name, config in model_module.CONFIGS.items():
            with self.subTest(model=name), torch.no_grad():
                checkpoint.save(busy(name), self.folder)
                model = checkpoint.load(self.folder, config)
                hidden, _ = model.hidden(tokens)
                ours, theirs = model.logits(hidden), self.theirs(tokens)
                self.assertGreater(theirs.abs().max().item(), 2.0)
                error = (ours - theirs).abs().max().item()
                print(f"{name}: logits of {theirs.abs().max():.1f} differ by {error:.1e}")
                self.assertLess(error, TOLERANCE)

    def test_folder_is_small_and_complete(self):
        for name, layers in (("needle-gdn", 4 * 14), ("needle-hybrid", 3 * 14 + 11)):
            with self.subTest(model=name):
                model = busy(name)
                count = sum(parameter.numel() for parameter in model.parameters())
                self.assertLess(count, 4_000_000)
                total = checkpoint.save(model, self.folder)
                size = os.path.getsize(os.path.join(self.folder, checkpoint.SHARD))
                print(f"{name}: {count} parameters, {size} bytes")
                self.assertLess(size, 8_000_000)
                with safe_open(os.path.join(self.folder, checkpoint.SHARD), "pt") as file:
                    names = list(file.keys())
                    kinds = {key: file.get_slice(key).get_dtype() for key in names}
                self.assertEqual(len(names), layers + 3)
                self.assertEqual({key for key in names if not key.startswith(checkpoint.PREFIX)},
                                 {"lm_head.weight"})
                wide = {key for key in names
                        if key.endswith((".linear_attn.A_log", ".linear_attn.norm.weight"))}
                self.assertEqual({key for key, kind in kinds.items() if kind == "F32"}, wide)
                self.assertEqual({kind for key, kind in kinds.items() if key not in wide},
                                 {"BF16"})
                with open(os.path.join(self.folder, checkpoint.INDEX), encoding="utf-8") as file:
                    index = json.load(file)
                self.assertEqual(index["metadata"]["total_size"], total)
                self.assertEqual(sorted(index["weight_map"]), sorted(names))


class Forward(unittest.TestCase):
    def test_states_carry_a_linear_model_over_a_cut(self):
        """Only conv is not carried; with its taps on the current token alone the cut is exact."""
        model = busy("needle-gdn").double()
        for layer in model.layers:
            layer.linear_attn.conv1d.weight.data[:, :, :3] = 0
        tokens = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(6))
        with torch.no_grad():
            whole, last = model.hidden(tokens)
            _, middle = model.hidden(tokens[:, :70])
            tail, end = model.hidden(tokens[:, 70:], initial=middle)
        # Norms and gates round to fp32: 1e-5 as in Folder.
        self.assertLess((whole[:, 70:] - tail).abs().max().item(), 1e-4)
        self.assertLess((last - end).abs().max().item(), 1e-4)

    def test_positions_matter_to_the_hybrid_only_by_difference(self):
        model = busy("needle-hybrid")
        tokens = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            base, _ = model.hidden(tokens)
            moved, _ = model.hidden(tokens, torch.arange(40)[None] + 5000)
            torn = torch.arange(40)[None] + 5000 * (torch.arange(40) >= 20)
            gapped, _ = model.hidden(tokens, torn)
        self.assertLess((base - moved).abs().max().item(), 5e-3)  # fp32 angles of 5000 radians
        self.assertGreater((base - gapped).abs().max().item(), 5e-2)


if __name__ == "__main__":
    unittest.main()
