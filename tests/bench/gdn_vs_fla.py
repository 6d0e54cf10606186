#!/usr/bin/env python3
"""SparseGDN on CUDA against flash-linear-attention (FLA): same process, same tensors.

Loads libsparsegdn.so through ctypes on torch pointers. For every row both sides are first checked
against the masked recurrence in fp64 (FLA computes the masked problem without the self term, by
beta * mask), then timed through CUDA graphs, inputs rotated past L2, medians. Writes JSON and, where
matplotlib is installed, a PNG.

Accuracy bound of a row: relative L2 error of o and of the state at most max(1.25 x FLA's, 4e-3).
Needs torch with CUDA; FLA's columns need `fla` and are null without it.
"""
import argparse
import ctypes as C
import json
import os
import statistics
import subprocess
import sys

os.environ["FLA_FLASH_QLA"] = "0"  # FLA means its own Triton kernels
import torch  # noqa: E402

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("dtype", C.c_int32), ("reserved", C.c_int32),
                ("token_stride", C.c_int64), ("head_stride", C.c_int64)]


class Shape(C.Structure):
    _fields_ = [(n, C.c_int32) for n in ("hk", "hv", "dk", "dv")]


class Sequence(C.Structure):
    _fields_ = [("first_position", C.c_int64), ("prompt_tokens", C.c_int64), ("mode", C.c_int32),
                ("selector", C.c_int32), ("solver", C.c_int32), ("local", C.c_int32),
                ("retention", C.c_double), ("coverage", C.c_double), ("min_retention", C.c_double),
                ("max_retention", C.c_double), ("keep_first", C.c_int64), ("keep_last", C.c_int64),
                ("snapshot_every", C.c_int64), ("snapshot_index", C.c_int64),
                ("initial_slot", C.c_int32), ("final_slot", C.c_int32)]


class Args(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("shape", Shape), ("num_tokens", C.c_int64),
                ("num_seqs", C.c_int32), ("normalize_qk", C.c_int32), ("cu_seqlens", C.c_void_p),
                ("sequences", C.c_void_p), ("q", Tensor), ("k", Tensor), ("v", Tensor),
                ("log_gate", Tensor), ("beta", Tensor), ("o", Tensor), ("scale", C.c_float),
                ("reserved0", C.c_int32), ("initial_state", C.c_void_p),
                ("final_state", C.c_void_p), ("initial_slots", C.c_int32),
                ("final_slots", C.c_int32), ("initial_layout", C.c_int32),
                ("final_layout", C.c_int32), ("mask", C.c_void_p), ("mask_out", C.c_void_p),
                ("selected", C.c_void_p), ("snapshots", C.c_void_p), ("snapshot_slots", C.c_int64),
                ("nonfinite", C.c_void_p), ("status", C.c_void_p), ("workspace", C.c_void_p),
                ("workspace_bytes", C.c_size_t), ("timings_ns", C.c_void_p)]


class Limits(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("shape", Shape), ("max_tokens", C.c_int64),
                ("max_seqs", C.c_int32), ("dtype", C.c_int32), ("max_retention", C.c_double)]


class Library:
    def __init__(self, path):
        self.lib = C.CDLL(path)
        self.lib.sparsegdn_last_error.restype = C.c_char_p
        self.lib.sparsegdn_version.restype = C.c_char_p
        self.backend = C.c_void_p()
        self.check(self.lib.sparsegdn_create(b"cuda", 0, C.byref(self.backend)))

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.lib.sparsegdn_last_error().decode())


def make_inputs(tokens, hk, hv, gates, seed):
    """q, k [T, Hk, 128] unit rows, v [T, Hv, 128], bf16; log_gate, beta [T, Hv] fp32."""
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    unit = torch.nn.functional.normalize
    x = {"q": unit(normal(tokens, hk, 128), dim=-1).bfloat16(),
         "k": unit(normal(tokens, hk, 128), dim=-1).bfloat16(),
         "v": normal(tokens, hv, 128).bfloat16(),
         "g": torch.nn.functional.logsigmoid(normal(tokens, hv) + 3),
         "beta": torch.sigmoid(normal(tokens, hv))}
    if gates == "slow":  # a quarter of the heads hardly decay
        x["g"][:, ::4] = -1e-3 * torch.rand(tokens, (hv + 3) // 4, generator=gen, device="cuda")
    if gates == "skew":  # half of the pairs have their scores well above the others in every window
        half = hv // 2
        window = (torch.arange(tokens, device="cuda") // 512) % 2 == 0
        x["beta"][:, :half] *= torch.where(window, 1.0, 0.05)[:, None]
    return x


class Ours:
    """One prepared call; `run` enqueues it on the current stream."""

    def __init__(self, library, x, lengths, budget):
        self.library, self.x = library, x
        tokens, hv, _ = x["v"].shape
        hk = x["q"].shape[1]
        n = len(lengths)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.cu = torch.tensor(starts, dtype=torch.int32, device="cuda")
        host = (Sequence * n)()
        for i, length in enumerate(lengths):
            library.lib.sparsegdn_sequence_init(C.byref(host[i]))
            host[i].prompt_tokens = length
            host[i].final_slot = i
            if budget == "dense":
                host[i].mode = 0
            else:
                host[i].retention = budget
        self.sequences = torch.frombuffer(bytearray(bytes(host)), dtype=torch.uint8).cuda()
        self.o = torch.full_like(x["v"], float("nan"))
        self.state = torch.full((n, hv, 128, 128), float("nan"), device="cuda")
        self.mask = torch.full((tokens, hk), 7, dtype=torch.uint8, device="cuda")
        self.status = torch.full((1,), -1, dtype=torch.int32, device="cuda")
        limits = Limits()
        library.lib.sparsegdn_limits_init(C.byref(limits), C.c_size_t(C.sizeof(limits)))
        limits.shape = Shape(hk, hv, 128, 128)
        limits.max_tokens, limits.max_seqs, limits.dtype = tokens, n, 1
        size = C.c_size_t()
        library.check(library.lib.sparsegdn_workspace_bytes(library.backend, C.byref(limits),
                                                            C.byref(size)))
        self.workspace = torch.empty(size.value, dtype=torch.uint8, device="cuda")
        self.args = Args()
        library.lib.sparsegdn_forward_args_init(C.byref(self.args),
                                                C.c_size_t(C.sizeof(self.args)))
        a = self.args
        a.shape, a.num_tokens, a.num_seqs = Shape(hk, hv, 128, 128), tokens, n
        a.cu_seqlens, a.sequences = self.cu.data_ptr(), self.sequences.data_ptr()
        for name, t in (("q", x["q"]), ("k", x["k"]), ("v", x["v"]), ("log_gate", x["g"]),
                        ("beta", x["beta"]), ("o", self.o)):
            setattr(a, name, Tensor(t.data_ptr(), DTYPES[t.dtype], 0, t.stride(0), t.stride(1)))
        a.final_state, a.final_slots = self.state.data_ptr(), n
        a.status = self.status.data_ptr()
        a.workspace, a.workspace_bytes = self.workspace.data_ptr(), size.value

    def with_mask(self, on):
        self.args.mask_out = self.mask.data_ptr() if on else None
        return self

    def run(self):
        stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.library.check(self.library.lib.sparsegdn_forward(self.library.backend,
                                                              C.byref(self.args), stream))

    def select(self):
        stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.library.check(self.library.lib.sparsegdn_select(self.library.backend,
                                                             C.byref(self.args), stream))


def oracle(x, lengths, mask, heads, self_term):
    """The masked recurrence in fp64 for `heads`, all sequences side by side (equal lengths)."""
    n, length = len(lengths), lengths[0]
    ratio = x["v"].shape[1] // x["q"].shape[1]
    pairs = [h // ratio for h in heads]

    def take(t, index):
        return t[:, index].double().view(n, length, len(heads), *t.shape[2:])

    q, k, v = take(x["q"], pairs), take(x["k"], pairs), take(x["v"], heads)
    g, beta = take(x["g"], heads), take(x["beta"], heads)
    m = mask[:, pairs].double().view(n, length, len(heads))
    decay, write = g.exp(), beta * m
    extra = (1 - m) * beta * (q * k).sum(-1) if self_term else torch.zeros_like(beta)
    state = torch.zeros(n, len(heads), 128, 128, dtype=torch.float64, device="cuda")
    out = torch.empty_like(v)
    for t in range(length):
        state *= decay[:, t, :, None, None]
        u = write[:, t, :, None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t]))
        state += k[:, t, :, :, None] * u[:, :, None, :]
        out[:, t] = torch.einsum("nhkv,nhk->nhv", state, q[:, t]) + extra[:, t, :, None] * v[:, t]
    return out.view(n * length, len(heads), 128) * 128 ** -0.5, state


def fla_call(x, lengths, mask=None):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    beta = x["beta"]
    if mask is not None:
        beta = beta * mask.float().repeat_interleave(beta.shape[1] // mask.shape[1], dim=1)
    n = len(lengths)
    args = [t.view(n, -1, *t.shape[1:]) for t in (x["q"], x["k"], x["v"], x["g"], beta)]

    def run():
        with torch.no_grad():
            return chunk_gated_delta_rule(*args, output_final_state=True)

    return run


def time_graphs(calls, repeats):
    """Median and p90 in ms; each call is a graph on its own inputs, replayed in rotation."""
    graphs = []
    for call in calls:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[i % len(graphs)].replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    times.sort()
    return statistics.median(times), times[int(0.9 * (len(times) - 1))]


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def accuracy(library, row, have_fla):
    """Errors on a prefix short enough for the fp64 loop, same shapes and budget."""
    lengths = [min(row["tokens"] // row["seqs"], 4096)] * min(row["seqs"], 2)
    x = make_inputs(sum(lengths), row["hk"], row["hv"], row["gates"], 7)
    ours = Ours(library, x, lengths, row["budget"]).with_mask(True)
    ours.run()
    torch.cuda.synchronize()
    heads = sorted({0, 1, row["hv"] // 2, row["hv"] - 1})
    o, state = oracle(x, lengths, ours.mask, heads, True)
    result = {"o": relative(ours.o[:, heads], o), "state": relative(ours.state[:, heads], state),
              "status": ours.status.item(), "retained": ours.mask.float().mean().item()}
    bound_o = bound_state = 4e-3
    if have_fla:
        fla_o, fla_state = fla_call(x, lengths, ours.mask)()
        o, state = oracle(x, lengths, ours.mask, heads, False)
        result["fla_o"] = relative(fla_o.reshape(-1, row["hv"], 128)[:, heads], o)
        result["fla_state"] = relative(fla_state[:, heads], state)
        bound_o = max(bound_o, 1.25 * result["fla_o"])
        bound_state = max(bound_state, 1.25 * result["fla_state"])
    result["ok"] = (result["status"] == 0 and result["o"] <= bound_o and
                    result["state"] <= bound_state)
    return result


def measure(library, row, repeats, have_fla):
    lengths = [row["tokens"] // row["seqs"]] * row["seqs"]
    # Two input sets are past L2 from 4,096 tokens on at Hv 32 (100 MB a set).
    sets = [make_inputs(row["tokens"], row["hk"], row["hv"], row["gates"], s) for s in (1, 2)]
    calls = [Ours(library, x, lengths, row["budget"]) for x in sets]
    result = dict(row)
    result["ms"], result["p90_ms"] = time_graphs([c.run for c in calls], repeats)
    result["selection_ms"], _ = time_graphs([c.select for c in calls], repeats)
    result["workspace_mb"] = calls[0].workspace.numel() / 2 ** 20
    per_token = 2 * 128 * (2 * row["hk"] + 2 * row["hv"])
    result["floor_gb_s"] = per_token * row["tokens"] / result["ms"] / 1e6
    if have_fla:
        result["fla_ms"], _ = time_graphs([fla_call(x, lengths) for x in sets], repeats)
        result["speedup"] = result["fla_ms"] / result["ms"]
    return result


def rows(which):
    def row(tokens, budget, hk=16, hv=32, seqs=1, gates="std"):
        return {"tokens": tokens, "budget": budget, "hk": hk, "hv": hv, "seqs": seqs,
                "gates": gates}

    figures = [row(32768, 0.29), row(131072, 0.29), row(4096, 0.29), row(131072, 0.1),
               row(32768, "dense"), row(131072, "dense"), row(32768, "dense", seqs=8),
               row(32768, 0.29, seqs=8), row(32768, 0.29, hk=2, hv=8),
               row(32768, 0.29, gates="slow"), row(32768, 0.29, gates="skew")]
    if which == "figures":
        return figures
    sweep = [row(t, b) for t in (4096, 8192, 16384, 32768, 65536, 131072)
             for b in (0.05, 0.1, 0.2, 0.29, 0.5, "dense")]
    heads = [row(32768, b, hk, hv) for hk, hv in ((16, 16), (16, 48), (16, 64), (2, 8), (4, 16))
             for b in (0.29, "dense")]
    return figures + sweep + heads


def plot(results, path):
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    base = [r for r in results if "speedup" in r and r["seqs"] == 1 and r["gates"] == "std" and
            (r["hk"], r["hv"]) == (16, 32)]
    for budget in sorted({str(r["budget"]) for r in base}):
        line = sorted({(r["tokens"], r["speedup"]) for r in base if str(r["budget"]) == budget})
        label = budget if budget == "dense" else f"{float(budget):.0%}"
        axis.plot(*zip(*line), marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens (one sequence, Hk 16, Hv 32, D 128, bf16)")
    axis.set_ylabel("speed-up over FLA")
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.legend(title="retention")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="path of libsparsegdn.so")
    parser.add_argument("--rows", choices=("figures", "all"), default="figures")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", default="gdn_vs_fla.json")
    parser.add_argument("--png", default="gdn_vs_fla.png")
    options = parser.parse_args()
    library = Library(options.library)
    try:
        import fla
        fla_version = fla.__version__
    except ImportError:
        fla_version = None
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True, check=False).stdout.strip()
    report = {"gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
              "fla": fla_version, "library": library.lib.sparsegdn_version().decode(),
              "dtype": "bf16", "timing": "CUDA graphs, median", "rows": []}
    failed = 0
    for row in rows(options.rows):
        checked = accuracy(library, row, fla_version is not None)
        result = measure(library, row, options.repeats, fla_version is not None)
        result["accuracy"] = checked
        failed += not checked["ok"]
        report["rows"].append(result)
        print(f"T {row['tokens']:7d} x{row['seqs']} Hk {row['hk']:2d} Hv {row['hv']:2d} "
              f"{row['budget']!s:>5} {row['gates']:4}: {result['ms']:.4f} ms, selection "
              f"{result['selection_ms']:.4f}, FLA {result.get('fla_ms', float('nan')):.4f} = "
              f"{result.get('speedup', float('nan')):.2f}x; error o {checked['o']:.1e} "
              f"({checked.get('fla_o', float('nan')):.1e}) state {checked['state']:.1e} "
              f"({checked.get('fla_state', float('nan')):.1e})"
              f"{'' if checked['ok'] else ' OVER THE BOUND'}", flush=True)
        with open(options.json, "w", encoding="utf-8") as f:
            json.dump(report, f, indent=1)
        torch.cuda.empty_cache()
    plot(report["rows"], options.png)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
