"""The chunked delta rule against the recurrence: values and gradients.

Method: fp64 on both sides, so that differences are the algorithm's: 1e-11 of the largest value
(a chain of some 1e3 roundings of 1e-16, amplified by the solve of near-parallel keys). In fp32 the
chunked form against fp64 must stay within 2e-4 of the largest value: sums over 128 and chains of
up to 320 tokens, 6e-8 a rounding.
"""

import unittest

import torch

from train import delta_rule

ROWS = {
    # name: (batch, tokens, k heads, v heads, k dim, v dim, gates, keys, initial state)
    "one token": (1, 1, 1, 1, 8, 8, "mixed", "random", False),
    "short": (2, 63, 1, 2, 16, 8, "mixed", "random", True),
    "one chunk": (2, 64, 2, 4, 16, 16, "mixed", "random", False),
    "tail": (1, 130, 2, 4, 16, 24, "mixed", "random", True),
    "no decay": (1, 192, 1, 2, 16, 16, "zero", "random", True),
    "cliff": (1, 192, 1, 2, 16, 16, "cliff", "random", True),
    "same key": (1, 192, 1, 2, 16, 16, "zero", "same", True),
    "near parallel": (1, 192, 1, 2, 16, 16, "zero", "near", True),
    "real heads": (1, 320, 2, 4, 128, 128, "mixed", "random", True),
}


def inputs(row, dtype=torch.float64):
    batch, tokens, k_heads, v_heads, k_dim, v_dim, gates, keys, initial = row
    source = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    k = normal(batch, tokens, k_heads, k_dim)
    if keys != "random":
        k = k[:, :1] + (0.05 if keys == "near" else 0.0) * k
    k = torch.nn.functional.normalize(k, dim=-1)
    q = torch.nn.functional.normalize(normal(batch, tokens, k_heads, k_dim), dim=-1) / k_dim**0.5
    v = normal(batch, tokens, v_heads, v_dim)
    beta = torch.sigmoid(2 * normal(batch, tokens, v_heads))
    log_gate = torch.nn.functional.logsigmoid(normal(batch, tokens, v_heads) + 3)
    if gates == "zero":
        log_gate = torch.zeros_like(log_gate)
    if gates == "cliff":
        log_gate[:, 64::7] = -90.0
        log_gate[:, 100] = -1000.0
    state = normal(batch, v_heads, k_dim, v_dim) if initial else None
    found = [q, k, v, beta, log_gate] + ([state] if initial else [])
    return [x.to(dtype).requires_grad_() for x in found]


def run(function, arguments):
    """Output, state, and the gradient of a fixed random projection of both."""
    out, state = function(*arguments)
    source = torch.Generator().manual_seed(2)
    weight = torch.randn(out.shape, generator=source, dtype=torch.float64).to(out.dtype)
    other = torch.randn(state.shape, generator=source, dtype=torch.float64).to(out.dtype)
    loss = (out * weight).sum() + (state * other).sum()
    return [out, state, *torch.autograd.grad(loss, arguments)]


class DeltaRule(unittest.TestCase):
    def compare(self, dtype, tolerance):
        names = ["o", "state", "dq", "dk", "dv", "dbeta", "dlog_gate", "dinitial"]
        for title, row in ROWS.items():
            wanted = run(delta_rule.recurrent, inputs(row))
            found = run(delta_rule.chunked, inputs(row, dtype))
            for name, want, got in zip(names, wanted, found):
                with self.subTest(row=title, tensor=name):
                    self.assertEqual(got.shape, want.shape)
                    self.assertTrue(torch.isfinite(got).all())
                    error = (got.double() - want).abs().max() / want.abs().max().clamp_min(1e-3)
                    self.assertLess(error.item(), tolerance)

    def test_fp64_values_and_gradients(self):
        self.compare(torch.float64, 1e-11)

    def test_fp32_values_and_gradients(self):
        self.compare(torch.float32, 2e-4)

    def test_inverse_and_its_gradient(self):
        lower = torch.randn(3, 64, 64, dtype=torch.float64).tril(-1).mul_(0.2).requires_grad_()
        eye = torch.eye(64, dtype=torch.float64)
        found = delta_rule.UnitLowerInverse.apply(lower)
        wanted = torch.linalg.solve_triangular(eye + lower, eye.expand(3, 64, 64), upper=False,
                                               unitriangular=True)
        self.assertLess((found - wanted).abs().max() / wanted.abs().max(), 1e-12)
        weight = torch.randn(3, 64, 64, dtype=torch.float64)
        ours, = torch.autograd.grad((found * weight).sum(), lower)
        theirs, = torch.autograd.grad((wanted * weight).sum(), lower)
        self.assertLess((ours - theirs.tril(-1)).abs().max() / theirs.abs().max(), 1e-11)

    def test_scan_gradient_numerically(self):
        shapes = ((3, 2, 4, 4), (3, 2, 4, 5), (3, 2), (2, 4, 5))
        arguments = [torch.randn(shape, dtype=torch.float64, requires_grad=True)
                     for shape in shapes]
        self.assertTrue(torch.autograd.gradcheck(delta_rule.DecayScan.apply, arguments))

    def test_resume_at_any_token_equals_the_whole(self):
        q, k, v, beta, log_gate, state = (x.detach() for x in inputs(ROWS["tail"]))
        whole, last = delta_rule.chunked(q, k, v, beta, log_gate, state)
        for cut in (1, 64, 100):
            head = [x[:, :cut] for x in (q, k, v, beta, log_gate)]
            tail = [x[:, cut:] for x in (q, k, v, beta, log_gate)]
            first, middle = delta_rule.chunked(*head, state)
            second, end = delta_rule.chunked(*tail, middle)
            self.assertLess((torch.cat([first, second], 1) - whole).abs().max(), 1e-12)
            self.assertLess((end - last).abs().max(), 1e-12)


if __name__ == "__main__":
    unittest.main()
