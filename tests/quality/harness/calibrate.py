#!/usr/bin/env python3
"""Finds out on your own prompts how small a budget may be, and how layers should share it.

    calibrate.py --model DIR --prompts FILE --target-kl X --out FOLDER
        [--server-binary build/release/bin/sparsegdn-server] [--tokenizer FOLDER|bytes]
        [--retentions 0.5,0.29,...] [--server-flag=--threads=8 ...]

FILE holds one prompt a line: a JSON list of token ids, or with --tokenizer a JSON string. Measured
is the KL from dense in nats a token, at up to 1024 places of each prompt. First every GDN layer is
made sparse alone, at the middle retention; from those figures come candidate profiles, and the one
with the least KL is kept (mean of its logarithm over the retentions). FOLDER receives
budget_profile.json (put it beside the model, or start the server with --budget-profile),
calibration.json and report.html.
Exit 0: a budget meets the target; 4: none does.
"""

import argparse
import contextlib
import html
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
from sparsegdn_client import Budget, Outputs, PrefillClient  # noqa: E402

from harness import drive  # noqa: E402
from tasks import tokenizer as tokenizer_module  # noqa: E402

NO_BUDGET = 4
_HEAVY = 1e9  # beside it, a layer of weight 1 is the only one that is not full
_EXPONENTS = (0.25, 0.5, 1.0)  # of a layer's own KL, in the candidate profiles
_FLOOR = 0.05  # of the mean weight


@contextlib.contextmanager
def serve(options, profile):
    """A client of a server with this profile (a list of weights, or None)."""
    with tempfile.TemporaryDirectory() as folder:
        ports, name = os.path.join(folder, "ports"), "none"
        if profile is not None:
            name = os.path.join(folder, "profile.json")
            with open(name, "w", encoding="utf-8") as file:
                json.dump({"relative_retention": profile}, file)
        with open(os.path.join(folder, "log"), "w+b") as log, subprocess.Popen(
                [options.server_binary, "--model", options.model, "--budget-profile", name,
                 "--listen", "127.0.0.1:0", "--metrics-listen", "", "--port-file", ports,
                 *options.server_flag], stdout=log, stderr=log) as process:
            try:
                while not os.path.exists(ports) or not os.path.getsize(ports):
                    if process.poll() is not None:
                        log.seek(0)
                        raise SystemExit(f"the server ended: {log.read().decode()}")
                    time.sleep(0.05)
                with open(ports, encoding="ascii") as file:
                    target = f"127.0.0.1:{file.readline().strip()}"
                with PrefillClient(target) as client:
                    client.wait_until_ready(3600)
                    yield client
            finally:
                process.terminate()


def _logp(client, prompts, budget):
    vocab = client.model_info().vocab_size
    found = []
    for ids in prompts:
        places = drive.positions(len(ids), vocab).tolist()
        done = client.prefill(ids, budget=budget, outputs=Outputs(
            state=False, conv_state=False, kv=False, logits_positions=places))
        found.append(drive.log_softmax(done.snapshot["logits"]))
    return found


def _distance(client, prompts, dense, retention):
    """(KL, share of equal top tokens) over all prompts."""
    found = _logp(client, prompts, Budget(retention=retention))
    kl, top1 = zip(*(drive.distance(a, b) for a, b in zip(dense, found)))
    return float(np.mean(kl)), float(np.mean(top1))


def candidates(layer_kl):
    """Profiles to try, None (all layers alike) first."""
    kl = np.maximum(np.asarray(layer_kl), 1e-9)
    found = [None]
    for exponent in _EXPONENTS:
        weight = kl ** exponent
        weight = np.maximum(weight / weight.mean(), _FLOOR)
        found.append([round(float(w), 4) for w in weight / weight.mean()])
    return found


def calibrate(options, prompts, show=print):
    """The report as a dict."""
    retentions = sorted(options.retentions, reverse=True)
    middle = retentions[len(retentions) // 2]
    with serve(options, None) as client:
        info = client.model_info()
        dense = _logp(client, prompts, drive.DENSE)
        alike = [(share, *_distance(client, prompts, dense, share)) for share in retentions]
    layers = [i for i, kind in enumerate(info.layers) if kind == "linear_attention"]
    layer_kl = []
    for i in range(len(layers)):
        weights = [_HEAVY] * len(layers)
        weights[i] = 1.0
        with serve(options, weights) as client:
            share = (len(layers) - 1 + middle) / len(layers)
            layer_kl.append(_distance(client, prompts, dense, share)[0])
        show(f"layer {layers[i]} alone at {middle:.0%}: KL {layer_kl[-1]:.5f}")
    tried = []
    for profile in candidates(layer_kl):
        rows = alike
        if profile is not None:
            with serve(options, profile) as client:
                rows = [(share, *_distance(client, prompts, dense, share)) for share in retentions]
        gain = float(np.mean([np.log(max(row[1], 1e-9) / max(base[1], 1e-9))
                              for row, base in zip(rows, alike)]))
        tried.append((gain, profile, rows))
        show(f"profile {profile or 'none'}: KL "
             + ", ".join(f"{kl:.5f} at {share:.0%}" for share, kl, _ in rows))
    _, profile, shared = min(tried, key=lambda entry: entry[0])
    enough = [share for share, kl, _ in shared if kl <= options.target_kl]
    return {"model": info.model_name, "identity": info.model_identity, "backend": info.backend,
            "prompts": len(prompts), "tokens": sum(len(ids) for ids in prompts),
            "target_kl": options.target_kl, "layers": layers, "layer_kl": layer_kl,
            "layer_kl_retention": middle, "profile": profile, "alike": alike, "shared": shared,
            "recommended_retention": min(enough) if enough else None}


def page(report):
    """report.html."""
    recommended = report["recommended_retention"]
    verdict = (f"retention {recommended:g} is the smallest measured with KL &le; "
               f"{report['target_kl']:g}" if recommended else
               f"no measured retention has KL &le; {report['target_kl']:g}")
    profile = report["profile"] or [1.0] * len(report["layers"])
    most = max(report["layer_kl"]) or 1.0
    layers = "".join(
        f"<tr><td>{layer}<td>{kl:.5f}<td><div style='background:#48c;height:.8em;"
        f"width:{12 * kl / most:.2f}em'></div><td>{weight:.3f}"
        for layer, kl, weight in zip(report["layers"], report["layer_kl"], profile))
    budgets = "".join(
        f"<tr{' style=background:#dfd' if a[0] == recommended else ''}><td>{a[0]:g}<td>{b[1]:.5f}"
        f"<td>{b[2]:.4f}<td>{a[1]:.5f}<td>{a[2]:.4f}"
        for a, b in zip(report["shared"], report["alike"]))
    return f"""<!doctype html><meta charset=utf-8><title>SparseGDN calibration</title>
<style>body{{font:15px sans-serif;margin:2em}}td,th{{padding:.2em 1em;text-align:right}}</style>
<h1>{html.escape(report['model'])}</h1>
<p>{report['prompts']} prompts, {report['tokens']:,} tokens, {report['backend']} backend,
identity {report['identity'][:16]}. <b>{verdict}.</b>
<h2>KL from dense, nats a token, and share of equal top tokens</h2>
<table><tr><th>retention<th>KL, layers alike<th>top-1<th>KL, with the profile<th>top-1
{budgets}</table>
<h2>Each GDN layer sparse alone at {report['layer_kl_retention']:g}</h2>
<table><tr><th>layer<th>KL<th><th>relative retention{layers}</table>
"""


def read_prompts(path, tokenizer):
    """Lists of ids from the file's lines. ValueError names the line."""
    prompts = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            value = json.loads(line)
            if tokenizer and isinstance(value, str):
                value = tokenizer.encode(value)
            if not isinstance(value, list) or not value or not all(
                    isinstance(i, int) for i in value):
                raise ValueError(f"{path}:{number}: must be a list of token ids"
                                 + (" or a string" if tokenizer else ""))
            prompts.append(value)
    if not prompts:
        raise ValueError(f"{path}: no prompt in it")
    return prompts


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for flag in ("--model", "--prompts", "--out"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--target-kl", type=float, required=True)
    parser.add_argument("--server-binary", default="build/release/bin/sparsegdn-server")
    parser.add_argument("--server-flag", action="append", default=[])
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--retentions", default="0.5,0.35,0.29,0.2,0.15,0.1,0.08",
                        type=lambda text: [float(share) for share in text.split(",")])
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    tokenizer = None
    if options.tokenizer:
        tokenizer = (tokenizer_module.Bytes() if options.tokenizer == "bytes"
                     else tokenizer_module.load(options.tokenizer))
    report = calibrate(options, read_prompts(options.prompts, tokenizer))
    os.makedirs(options.out, exist_ok=True)
    files = {"calibration.json": json.dumps(report, indent=1), "report.html": page(report)}
    if report["profile"] is not None:
        about = {key: report[key] for key in ("model", "identity", "prompts", "tokens")}
        files["budget_profile.json"] = json.dumps(
            {"relative_retention": report["profile"], "about": about})
    for name, content in files.items():
        with open(os.path.join(options.out, name), "w", encoding="utf-8") as file:
            file.write(content + "\n")
    for share, kl, top1 in report["shared"]:
        print(f"retention {share:g}: KL {kl:.5f}, top-1 {top1:.4f}")
    recommended = report["recommended_retention"]
    print(f"recommended retention: {recommended or 'none'}, written to {options.out}: "
          + ", ".join(files))
    return 0 if recommended else NO_BUDGET


if __name__ == "__main__":
    sys.exit(main())
