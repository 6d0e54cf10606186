#!/usr/bin/env python3
"""CPU GDN core against transformers' torch_chunk_gated_delta_rule, on the same cores in one run.

    python3 tests/bench/cpu_gdn_vs_torch.py --library build/release/lib/libsparsegdn.so

Needs torch and transformers. Checks correctness first: dense against the peer itself, sparse
against the peer run on beta * mask plus the self term (the oracle identity of docs/algorithm.md).
Then times peer and library alternately, and writes medians and 90th percentiles as JSON. FLOP rates
use the dense chunk form's count, 10.5 MFLOP per 64 tokens and value head at D 128 (6 C D^2 + 4 C^2 D
for chunk C), for every row: for a sparse row that is the rate of the dense work it replaces.
"""
import argparse
import ctypes as C
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import python_ctypes as abi  # noqa: E402

DTYPES = {"f32": (torch.float32, 0), "bf16": (torch.bfloat16, 1)}
TOLERANCE = {"f32": 1e-4, "bf16": 1e-2}  # relative L2; the peer itself is fp32


class Core:
    """One prepared call on torch tensors [T, H, D]."""

    def __init__(self, gdn, inputs, dtype, mode, retention):
        torch_dtype, code = DTYPES[dtype]
        self.gdn = gdn
        self.x = {n: inputs[n].to(torch_dtype).contiguous() for n in ("q", "k", "v")}
        self.x |= {n: inputs[n].contiguous() for n in ("log_gate", "beta")}
        tokens, num_k_heads, dim_k = self.x["k"].shape
        num_v_heads, dim_v = self.x["v"].shape[1:]
        shape = abi.Shape(num_k_heads, num_v_heads, dim_k, dim_v)
        self.x["o"] = torch.empty_like(self.x["v"])
        self.state = torch.empty(num_v_heads, dim_k, dim_v)
        self.mask = torch.empty(tokens, num_k_heads, dtype=torch.uint8)
        self.cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
        self.timings = (C.c_int64 * 2)()
        self.sequence = abi.Sequence()
        gdn.lib.sparsegdn_sequence_init(C.byref(self.sequence))
        self.sequence.prompt_tokens, self.sequence.final_slot = tokens, 0
        self.sequence.mode, self.sequence.retention = mode, retention
        limits = abi.Limits()
        gdn.lib.sparsegdn_limits_init(C.byref(limits), C.c_size_t(C.sizeof(limits)))
        limits.shape, limits.max_tokens, limits.max_seqs, limits.dtype = shape, tokens, 1, code
        need = C.c_size_t()
        gdn.check(gdn.lib.sparsegdn_workspace_bytes(gdn.backend, C.byref(limits), C.byref(need)))
        self.workspace = torch.empty(need.value + 256, dtype=torch.uint8)

        self.args = args = abi.ForwardArgs()
        gdn.lib.sparsegdn_forward_args_init(C.byref(args), C.c_size_t(C.sizeof(args)))
        args.shape, args.num_tokens, args.num_seqs = shape, tokens, 1
        args.cu_seqlens = self.cu_seqlens.data_ptr()
        args.sequences = C.pointer(self.sequence)
        for name, t in self.x.items():
            dim = t.shape[2] if t.ndim == 3 else 1
            kind = code if t.dtype == torch_dtype else 0
            setattr(args, name, abi.Tensor(t.data_ptr(), kind, 0, t.shape[1] * dim, dim))
        args.final_state, args.final_slots = self.state.data_ptr(), 1
        args.mask_out = self.mask.data_ptr()
        args.workspace = (self.workspace.data_ptr() + 255) // 256 * 256
        args.workspace_bytes = need.value
        args.timings_ns = C.addressof(self.timings)

    def run(self):
        self.gdn.check(self.gdn.lib.sparsegdn_forward(self.gdn.backend, C.byref(self.args), None))


class Peer:
    """The torch function on fp32 copies; q and k are repeated per value head outside the timing."""

    def __init__(self, inputs):
        repeat = inputs["v"].shape[1] // inputs["k"].shape[1]
        self.q, self.k = (inputs[n].float().repeat_interleave(repeat, 1)[None] for n in "qk")
        self.v, self.g = inputs["v"].float()[None], inputs["log_gate"][None]
        self.beta = inputs["beta"][None]

    def run(self, beta=None):
        return torch_chunk_gated_delta_rule(self.q, self.k, self.v, self.g,
                                            self.beta if beta is None else beta,
                                            output_final_state=True)

    def sparse(self, mask):
        m = mask.float().repeat_interleave(self.v.shape[2] // mask.shape[1], 1)[None]
        o, state = self.run(self.beta * m)
        own = (1 - m) * self.beta * (self.q * self.k).sum(-1) * self.q.shape[-1] ** -0.5
        return o + own[..., None] * self.v, state


def make_inputs(a, dtype):
    torch.manual_seed(a.seed)
    unit = lambda *s: torch.nn.functional.normalize(torch.randn(*s), dim=-1)
    x = {"q": unit(a.tokens, a.k_heads, a.dim), "k": unit(a.tokens, a.k_heads, a.dim),
         "v": torch.randn(a.tokens, a.v_heads, a.dim),
         "log_gate": torch.nn.functional.logsigmoid(torch.randn(a.tokens, a.v_heads) + 3),
         "beta": torch.sigmoid(torch.randn(a.tokens, a.v_heads))}
    return {n: t.to(DTYPES[dtype][0]).float() if n in "qkv" else t for n, t in x.items()}


def relative(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


def check(core, peer, dtype, dense):
    core.run()
    o, state = peer.run() if dense else peer.sparse(core.mask)
    errors = relative(core.x["o"], o[0]), relative(core.state, state[0])
    if max(errors) > TOLERANCE[dtype]:
        raise SystemExit(f"wrong result: relative errors of o, state = {errors}")
    return errors


def summary(times):
    """times: (wall, CPU of all threads) in seconds. CPU time is what a busy machine leaves
    comparable; with one thread it is the wall time of an idle one."""
    wall, cpu = sorted(t[0] for t in times), [t[1] for t in times]
    return {"median_ms": 1e3 * statistics.median(wall),
            "p90_ms": 1e3 * wall[min(len(wall) - 1, int(0.9 * len(wall)))],
            "median_cpu_ms": 1e3 * statistics.median(cpu)}


def timed(f):
    wall, cpu = time.perf_counter(), time.process_time()
    f()
    return time.perf_counter() - wall, time.process_time() - cpu


def sgemm_rate():
    """Best of several square products: the rate the machine gives at this moment."""
    n = 1536
    x, y = torch.randn(n, n), torch.randn(n, n)
    return 2e-9 * n ** 3 / min(timed(lambda: x @ y)[0] for _ in range(5))


def cpu_model():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def commit():
    git = lambda *c: subprocess.run(["git", "-C", str(ROOT), *c], capture_output=True,
                                    text=True).stdout.strip()
    dirty = git("status", "--porcelain", "--untracked-files=no", "kernels")
    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if dirty else "")


def bench_row(gdn, a, dtype, mode):
    inputs = make_inputs(a, dtype)
    dense = mode == abi.DENSE
    core, peer = Core(gdn, inputs, dtype, mode, a.retention), Peer(inputs)
    errors = check(core, peer, dtype, dense)
    ours, theirs, gemm = [], [], []
    peer.run()
    for _ in range(a.repeats):
        theirs.append(timed(peer.run))
        gemm.append(sgemm_rate())
        ours += [timed(core.run) for _ in range(3)]
    flops = a.tokens * a.v_heads * (6 * a.dim ** 2 + 4 * 64 * a.dim)
    row = {"budget": "dense" if dense else f"retention {a.retention}", "dtype": dtype,
           "retained": core.mask.float().mean().item(),
           "relative_error_o": errors[0], "relative_error_state": errors[1],
           "ours": summary(ours), "torch_f32": summary(theirs),
           "selection_ms": core.timings[0] * 1e-6,
           "workspace_mib": core.args.workspace_bytes / 2 ** 20,
           "sgemm_gflops": statistics.median(gemm)}
    row["speedup"] = row["torch_f32"]["median_ms"] / row["ours"]["median_ms"]
    row["cpu_time_ratio"] = row["torch_f32"]["median_cpu_ms"] / row["ours"]["median_cpu_ms"]
    row["dense_gflops"] = 1e-6 * flops / row["ours"]["median_ms"]
    row["share_of_sgemm"] = row["dense_gflops"] / row["sgemm_gflops"]
    print(f"{row['budget']:>15} {dtype:>5}: {row['ours']['median_ms']:7.1f} ms, torch "
          f"{row['torch_f32']['median_ms']:7.1f} ms, {row['speedup']:5.1f}x (CPU time {row['cpu_time_ratio']:.1f}x), "
          f"{row['dense_gflops']:6.0f} GFLOP/s = {row['share_of_sgemm']:.0%} of sgemm "
          f"({row['sgemm_gflops']:.0f}), selection {row['selection_ms']:.2f} ms")
    return row


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--library", default="build/release/lib/libsparsegdn.so")
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--k-heads", type=int, default=16)
    p.add_argument("--v-heads", type=int, default=32)
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--retention", type=float, default=0.29)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output", default="docs/results/cpu_gdn_vs_torch.json")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    gdn = abi.Gdn(a.library, a.threads)
    with torch.no_grad():
        rows = [bench_row(gdn, a, dtype, mode) for mode in (abi.DENSE, abi.RETENTION)
                for dtype in ("f32", "bf16")]
    gdn.close()
    command = "python3 tests/bench/cpu_gdn_vs_torch.py " + " ".join(
        f"--{n.replace('_', '-')} {getattr(a, n)}" for n in
        ("tokens", "k_heads", "v_heads", "dim", "retention", "threads", "repeats", "seed"))
    result = {"benchmark": "cpu_gdn_vs_torch", "commit": commit(), "cpu": cpu_model(),
              "threads": a.threads, "torch": torch.__version__, "command": command,
              "peer": "transformers torch_chunk_gated_delta_rule, fp32",
              "shape": {"tokens": a.tokens, "num_k_heads": a.k_heads, "num_v_heads": a.v_heads,
                        "head_dim_k": a.dim, "head_dim_v": a.dim}, "rows": rows}
    pathlib.Path(a.output).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(a.output).write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", a.output)


if __name__ == "__main__":
    main()
