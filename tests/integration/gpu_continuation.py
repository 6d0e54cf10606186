#!/usr/bin/env python3
"""A worker goes on in transformers from the snapshot file of a server that is gone.

    gpu_continuation.py SERVER MODEL OUT_JSON [--tokens 8192] [--new 32] [--backend cuda|cpu]

Goal: the server is a prefill server. Method: SERVER holds MODEL; the Python client prefills a random
prompt through gRPC with a dense budget and at 29 %, and writes each snapshot to a file; the server is
stopped; then a second process, which knows the files alone, fills transformers' cache (bf16) and
decodes 32 tokens greedily. transformers alone is the judge.

Both runs are fed the judge's tokens, so that each of the steps is compared under one prefix. A step
may differ from the judge only where the judge's gap between its best two logits is below what bf16
costs: 3 sqrt(2) times the RMS error of the judge's own bf16 logits against fp32 on the same tokens
(eager delta rule, no TF32). The free greedy run is printed too, with the step where it parts. At
29 % the KL divergence from the judge's distribution is reported, in nats a token.

Exit code 1 where a dense step differs with a gap above that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 300
NAMES = ("dense", "retention_0.29")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--continue-from", type=pathlib.Path, help="the second process, internal")
    return parser.parse_args()


def prompt(options: argparse.Namespace) -> np.ndarray:
    config = json.loads((options.model / "config.json").read_text())
    vocab = config.get("text_config", config)["vocab_size"]
    return np.random.default_rng(options.tokens).integers(0, vocab, options.tokens)


def prefill(options: argparse.Namespace, folder: pathlib.Path) -> None:
    from sparsegdn_client import Budget, PrefillClient
    from sparsegdn_client.files import save_snapshot
    from sparsegdn_client.types import DENSE

    ports, log = folder / "ports", folder / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [options.server, "--model", options.model, "--backend", options.backend,
             "--state-slots", "2", "--max-batch-tokens", "16384",
             "--kv-tokens", str(options.tokens + 16384), "--prefix-cache-bytes", "0",
             "--listen", "127.0.0.1:0", "--metrics-listen=", "--port-file", ports],
            stdout=out, stderr=out)
    try:
        end = time.monotonic() + START_SECONDS
        while not ports.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        with PrefillClient(f"127.0.0.1:{ports.read_text().split()[0]}") as client:
            client.wait_until_ready(START_SECONDS)
            for name, budget in zip(NAMES, (DENSE, Budget(retention=0.29))):
                done = client.prefill(prompt(options), budget=budget)
                save_snapshot(folder / f"{name}.safetensors", done.snapshot)
                print(f"{name}: {done.snapshot}", flush=True)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    if code != 0:
        raise SystemExit(f"the server ended with {code}")


def steps(model, cache, feed) -> "torch.Tensor":
    """Logits [steps, vocabulary] of feeding `feed` one by one."""
    import torch

    rows = []
    for token in feed:
        ids = torch.tensor([[token]], device=model.device)
        rows.append(model(ids, past_key_values=cache, use_cache=True).logits[0, -1].float())
    return torch.stack(rows)


def greedy(model, cache, token: int, count: int) -> tuple[list[int], "torch.Tensor"]:
    import torch

    tokens, rows = [], []
    for _ in range(count):
        rows.append(steps(model, cache, [token])[0])
        token = int(rows[-1].argmax())
        tokens.append(token)
    return tokens, torch.stack(rows)


def local_cache(model, ids):
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    batch = torch.tensor(ids[None, :-1], device=model.device)
    model(batch, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def relative(values, reference) -> float:
    return round(float((values - reference).norm() / reference.norm()), 5)


def exact_steps(model, ids, feed) -> "torch.Tensor":
    """Logits in fp32, with the eager delta rule; `model` is fp32 afterwards."""
    model.float()
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            module = sys.modules[type(mixer).__module__]
            mixer.chunk_gated_delta_rule = module.torch_chunk_gated_delta_rule
            mixer.recurrent_gated_delta_rule = module.torch_recurrent_gated_delta_rule
    return steps(model, local_cache(model, ids), feed)


def go_on(options: argparse.Namespace) -> int:
    import torch
    from sparsegdn_client import load_snapshot
    from sparsegdn_client.transformers import load_into_cache
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, attn_implementation="sdpa",
        device_map="cuda" if options.backend == "cuda" else None).eval()
    ids = prompt(options)
    tokens, judge = greedy(model, local_cache(model, ids), int(ids[-1]), options.new)
    feed = [int(ids[-1]), *tokens[:-1]]
    top = judge.topk(2).values
    gaps = (top[:, 0] - top[:, 1]).tolist()
    report: dict = {"tokens": options.tokens, "new": options.new, "torch": torch.__version__,
                    "device": torch.cuda.get_device_name(0) if options.backend == "cuda" else "cpu",
                    "judge_tokens": tokens, "judge_gaps": [round(g, 4) for g in gaps]}
    runs = {}
    for name in NAMES:
        path = options.continue_from / f"{name}.safetensors"
        free, _ = greedy(model, load_into_cache(model, load_snapshot(path)), feed[0], options.new)
        runs[name] = steps(model, load_into_cache(model, load_snapshot(path)), feed)
        parted = next((i for i, (a, b) in enumerate(zip(free, tokens)) if a != b), None)
        kl = torch.nn.functional.kl_div(runs[name].log_softmax(-1), judge.log_softmax(-1),
                                        reduction="none", log_target=True).sum(-1)
        report[name] = {"greedy_tokens": free, "free_run_parts_at": parted,
                        "kl_mean": round(float(kl.mean()), 6), "kl_max": round(float(kl.max()), 6),
                        "logits_relative": relative(runs[name], judge)}
    exact = exact_steps(model, ids, feed)
    error = float((judge - exact).pow(2).mean().sqrt())
    noise = 3 * math.sqrt(2) * error
    report.update(judge_bf16_rms_error=round(error, 5), bf16_noise_of_a_gap=round(noise, 5),
                  judge_to_fp32=relative(judge, exact), dense_to_fp32=relative(runs["dense"], exact),
                  greedy_equal_to_fp32={
                      name: int((run.argmax(-1) == exact.argmax(-1)).sum())
                      for name, run in (("judge", judge), ("dense", runs["dense"]))})
    print({key: report[key] for key in ("judge_to_fp32", "dense_to_fp32", "greedy_equal_to_fp32")})
    for name in NAMES:
        different = [i for i, row in enumerate(runs[name]) if int(row.argmax()) != tokens[i]]
        report[name]["steps_that_differ"] = [{"step": i, "gap": round(gaps[i], 4)} for i in different]
        report[name]["unexplained"] = [i for i in different if gaps[i] > noise]
        print(f"{name}: {options.new - len(different)} of {options.new} steps equal, free greedy run "
              f"parts at {report[name]['free_run_parts_at']}, KL {report[name]['kl_mean']} nats a "
              f"token; differing steps and gaps {report[name]['steps_that_differ']} "
              f"(bf16 noise of a gap: {noise:.4f})")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["dense"]["unexplained"] else 0


def main() -> int:
    options = arguments()
    if options.continue_from:
        return go_on(options)
    with tempfile.TemporaryDirectory() as name:
        prefill(options, pathlib.Path(name))
        return subprocess.run([sys.executable, __file__, *sys.argv[1:], "--continue-from", name],
                              env=dict(os.environ)).returncode


if __name__ == "__main__":
    sys.exit(main())
