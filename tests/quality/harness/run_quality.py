#!/usr/bin/env python3
"""Measures what sparsity costs a running server's model in accuracy.

    run_quality.py --server HOST:PORT --request FILE --out FOLDER
        [--library build/release/lib/libsparsegdn.so --model DIR]     for the request's controls

The request file is described in request.py; examples lie in requests/. FOLDER receives
results.json, results.csv and, where matplotlib is importable, PNG plots. Needs numpy, the Python client and its
stubs on PYTHONPATH (client/python and build/release/python).
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from sparsegdn_client import Budget, PrefillClient  # noqa: E402

from harness import drive, kernel_model, report, request as request_module  # noqa: E402
from tasks import registry, text, tokenizer as tokenizer_module  # noqa: E402


def _line(task, length, seed, budget, outcome, dense):
    kl, top1 = (0.0, 1.0) if outcome is dense else drive.distance(dense.logp, outcome.logp)
    return {"task": task, "length": length, "seed": seed, "budget": budget, "score": outcome.score,
            "nll": outcome.nll, "kl": kl, "top1": top1, "seconds": outcome.seconds,
            "retained": outcome.events[0] / outcome.events[1],
            "pairs": {str(layer): list(shares) for layer, shares in outcome.retained.items()}}


def _tokenizer(name):
    if not name:
        return None
    return tokenizer_module.Bytes() if name == "bytes" else tokenizer_module.load(name)


def measure(client, request, controls=None, show=print):
    """One line per example and budget; `controls`: the KernelModel of the request's controls."""
    info, reader, lines = client.model_info(), _tokenizer(request.tokenizer), []
    for task in request.tasks:
        for length in request.lengths:
            for seed in request.seeds:
                if reader:
                    example = text.make(task, length, seed, reader, request.chat, **request.params)
                else:
                    example = registry.make(task, length, seed, **request.params)
                dense = drive.run(client, info, example, drive.DENSE, reader)
                lines.append(_line(task, length, seed, "dense", dense, dense))
                for name, fields in request.budgets:
                    outcome = drive.run(client, info, example, Budget(**fields), reader)
                    lines.append(_line(task, length, seed, name, outcome, dense))
                    for control in request.controls:
                        score, nll = controls.score(example, control, fields["retention"], seed)
                        lines.append({**lines[-1], "budget": f"{control} {name}", "score": score,
                                      "nll": nll, "kl": None, "top1": None, "seconds": None,
                                      "retained": outcome.events[0] / outcome.events[1],
                                      "pairs": {}})
                show(f"{task} {length} seed {seed}: " + ", ".join(
                    f"{line['budget']} {line['score']:.3f}" for line in lines
                    if (line["task"], line["length"], line["seed"]) == (task, length, seed)))
    return lines


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--request", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--library", help="libsparsegdn.so, for controls")
    parser.add_argument("--model", help="folder of the server's model, for controls")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    request = request_module.load(options.request)
    controls = None
    if request.controls:
        if not (options.library and options.model):
            raise SystemExit("controls: --library and --model are needed for them")
        controls = kernel_model.KernelModel(options.library, options.model)
    with PrefillClient(options.server) as client:
        info = client.model_info()
        lines = measure(client, request, controls)
    about = {"model": info.model_name, "identity": info.model_identity, "backend": info.backend,
             "server": info.server_version, "request": vars(request)}
    rows, plots = report.write(options.out, about, lines)
    print("\n".join(report.table(rows)))
    print(f"written to {options.out}: results.json, results.csv"
          + "".join(f", {name}" for name in plots)
          + ("" if plots else "; no plots, matplotlib is not importable"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
