#!/usr/bin/env python3
"""The selector study: what each score costs in recall, NLL and KL at equal retention.

    run_study.py --model needle-gdn --folder tests/data/models/needle-gdn --out study.json
        [--lengths 8192,32768,131072] [--retentions 0.29,0.15,0.08] [--selectors beta,learned]
        [--examples 12] [--kind phrases] [--minutes 10]

Every prompt asks all of 24 needles. Evaluation seeds are 0 .. examples - 1, in three groups whose
spread is reported; the learned score is fitted on other seeds. Needs torch, numpy, safetensors.
"""

import argparse
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from study import measure, scores, sparse  # noqa: E402
from train import checkpoint, model as model_module  # noqa: E402

CALIBRATION_SEED = 1000  # first of the seeds that the learned score is fitted on


def dense_hidden(model, tokens):
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16,
                                         enabled=tokens.is_cuda):
        return model.hidden(tokens)[0].float()


def fit_learned(model, device, length, examples):
    """{GDN layer: [Hk, features]}: ridge regression of log |u| on the features."""
    sums = {}

    def watch(layer, w):
        x = scores.features(w).double()
        y = (scores.oracle_surprise(w) + 1e-4).log().double()
        a = torch.einsum("bthf,bthg->hfg", x, x)
        b = torch.einsum("bthf,bth->hf", x, y)
        before = sums.get(layer, (0, 0))
        sums[layer] = (before[0] + a, before[1] + b)

    batch = measure.Batch("needle_recall", length, CALIBRATION_SEED, examples, device,
                          kind="phrases")
    sparse.Sparse(model, "oracle_surprise", 0.29, watch=watch).hidden(batch.tokens)
    return {layer: torch.linalg.solve(
        a + 1e-3 * torch.diag_embed(a.diagonal(dim1=-2, dim2=-1)) / 10
        + 1e-6 * torch.eye(a.shape[-1], device=a.device), b).float()
        for layer, (a, b) in sums.items()}


def layer_profile(model, batch, dense, retention):
    """KL when one GDN layer alone is sparse, per layer."""
    linear = sum(layer.kind == model_module.LINEAR for layer in model.layers)
    found = []
    for layer in range(linear):
        shares = [1.0] * linear
        shares[layer] = retention
        hidden = sparse.Sparse(model, "beta", shares).hidden(batch.tokens)
        found.append(measure.summary(measure.measure(batch, model, hidden, dense))["kl"][0])
    return found


def shares_of(profile, retention):
    """Retention per layer, mean as given, in the ratio of the roots of `profile`, at most 2 : 1."""
    weight = torch.tensor(profile).clamp_min(1e-9).sqrt()
    weight = (weight / weight.mean()).clamp(0.6, 1.5)
    return (retention * weight / weight.mean()).clamp_max(1.0).tolist()


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=sorted(model_module.CONFIGS), required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--retentions", default="0.29,0.15,0.08")
    parser.add_argument("--selectors", default=",".join(scores.SCORES))
    parser.add_argument("--examples", type=int, default=12)
    parser.add_argument("--kind", default="phrases")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    began = time.monotonic()
    device = torch.device(options.device)
    model = checkpoint.load(options.folder, model_module.CONFIGS[options.model]).to(device)
    names = options.selectors.split(",")
    lengths = [int(length) for length in options.lengths.split(",")]
    weights = {}
    if "learned" in names:
        weights = fit_learned(model, device, min(8192, max(lengths)), min(4, options.examples))
    report = {"model": options.model, "kind": options.kind, "examples": options.examples,
              "weights": {str(k): v.tolist() for k, v in weights.items()}, "rows": []}

    def add(length, name, retention, lines, runner=None, **more):
        row = {"length": length, "selector": name, "retention": retention,
               **measure.summary(lines), **more}
        if runner is not None:
            row["taken"] = [share.tolist() for share in runner.taken]
        report["rows"].append(row)
        print(f"{time.monotonic() - began:6.1f} s {length:7d} {name:16s} {retention:5.2f} "
              + " ".join(f"{key} {row[key][0]:.4f}+-{row[key][1]:.4f}"
                         for key in ("recall", "nll", "kl", "top1") if key in row), flush=True)
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)

    for length in lengths:
        batch = measure.Batch("needle_recall", length, 0, options.examples, device,
                              kind=options.kind)
        dense = dense_hidden(model, batch.tokens)
        add(length, "dense", 1.0, measure.measure(batch, model, dense))
        profile = None
        for retention in (float(share) for share in options.retentions.split(",")):
            variants = [(name, {}, retention) for name in names]
            if "beta" in names:
                if profile is None:
                    profile = layer_profile(model, batch, dense, 0.15)
                    report.setdefault("layer_kl", {})[str(length)] = profile
                variants += [("beta", {"spread": False, "label": "beta, pairs equal"}, retention),
                             ("beta", {"label": "beta, layers by KL"},
                              shares_of(profile, retention)),
                             ("beta", {"self_term": False, "label": "beta, no self term"},
                              retention)]
            for name, extra, share in variants:
                if time.monotonic() - began > 60 * options.minutes:
                    print("stopped at the time limit")
                    return 3
                label = extra.pop("label", name)
                runner = sparse.Sparse(model, name, share, weights=weights, **extra)
                hidden = runner.hidden(batch.tokens)
                add(length, label, retention, measure.measure(batch, model, hidden, dense), runner)
    return 0


if __name__ == "__main__":
    sys.exit(main())
