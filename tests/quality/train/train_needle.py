#!/usr/bin/env python3
"""Trains needle-gdn or needle-hybrid, in runs that go on where the last one stopped.

    train_needle.py --model needle-gdn --out DIR [--minutes 8.75]    train, or go on
    train_needle.py --model needle-gdn --out DIR --sparse FOLDER  on from a checkpoint, with half of
                                                       the rows sparse
    train_needle.py --model needle-gdn --out DIR --export FOLDER  write the checkpoint folder
    train_needle.py --model needle-gdn --probe                    time a step of every stage
    train_needle.py --model needle-gdn --evaluate FOLDER [--lengths 1024,8192] [--examples 32]

DIR holds state/ (four files below 16 MiB), scale, log.jsonl and curve.png. Needs torch, numpy and
safetensors; matplotlib for the curve. Exit 0: plan finished; 3: stopped at the time limit.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from train import checkpoint, curve, data, evaluate, trainer  # noqa: E402
from train import model as model_module  # noqa: E402

UNFINISHED = 3
SPARSE_RATE = 6e-4
RETENTIONS = (0.29, 0.29, 0.15, 0.08)  # of the steps with --sparse, with these odds


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=sorted(model_module.CONFIGS), required=True)
    parser.add_argument("--out", help="folder of the run")
    parser.add_argument("--minutes", type=float, default=8.75,
                        help="stop and save after this time")
    parser.add_argument("--save-seconds", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every stage's steps")
    parser.add_argument("--fit-seconds", type=float, default=0.0,
                        help="time the steps first and choose --scale so that the plan takes this")
    parser.add_argument("--tokens-scale", type=float, default=1.0,
                        help="multiplies the tokens of a step: below 1 for a smoke run on a CPU")
    parser.add_argument("--rate", type=float, help="default: 0.002, with --sparse 0.0006")
    parser.add_argument("--sparse", metavar="FOLDER", help="start from this checkpoint; name it "
                        "again with --export")
    parser.add_argument("--write-cost", type=float, default=0.02, help="with --sparse")
    parser.add_argument("--workers", type=int, default=min(12, max(0, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None,
                        help="fuse elementwise chains with torch.compile; default: on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--export", metavar="FOLDER")
    parser.add_argument("--evaluate", metavar="FOLDER")
    parser.add_argument("--lengths", default="1024,4096,8192,32768,131072")
    parser.add_argument("--examples", type=int, default=32)
    options = parser.parse_args(arguments)
    if not (options.evaluate or options.probe or options.out):
        parser.error("--out is needed to train or to export")
    return options


def make_trainer(options, device):
    config = model_module.CONFIGS[options.model]
    plan = data.default_plan(options.scale, options.tokens_scale,
                             gaps=model_module.FULL in config.layer_types,
                             stages=data.SPARSE_STAGES if options.sparse else None)
    if not options.sparse:
        return trainer.Trainer(config, plan, options.seed, device,
                               trainer.Hyper(rate=options.rate or trainer.Hyper.rate))
    hyper = trainer.Hyper(rate=options.rate or SPARSE_RATE, warmup=50, retentions=RETENTIONS,
                          write_cost=options.write_cost)
    return trainer.Trainer(config, plan, options.seed, device, hyper,
                           start=checkpoint.start_of(options.sparse, config))


def prepare_device(options, device):
    """Numerics and fusing of a training process; call before the first step."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    if options.compile or (options.compile is None and device.type == "cuda"):
        model_module.compile_pieces()


def step_seconds(run, warm=3, timed=5):
    """Seconds of a step of every stage, measured on `run`, which must be thrown away after."""
    on_gpu = run.device.type == "cuda"
    found = {}
    for stage in run.plan.stages:
        if (stage.length, stage.tokens) in found:
            continue
        alone = data.Plan((dataclasses.replace(stage, steps=1, stream=1),), gaps=run.plan.gaps)
        batch = data.batch(alone, run.seed, 0, 0)
        started = 0.0
        for i in range(warm + timed):
            if i == warm:
                if on_gpu:
                    torch.cuda.synchronize()
                started = time.monotonic()
            batch.step = run.step
            run.train_step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        found[stage.length, stage.tokens] = (time.monotonic() - started) / timed
    return [found[stage.length, stage.tokens] for stage in run.plan.stages]


def plan_seconds(plan, seconds):
    """What the plan's steps take, from those of step_seconds."""
    total = 0.0
    for i, stage in enumerate(plan.stages):
        own = 1.0 if i == 0 else 0.75 if stage.stream > 1 else 0.6
        before = sum(seconds[:i]) / i if i else 0.0
        total += stage.steps * (own * seconds[i] + (1 - own) * before)
    return total


def probe(options):
    """Prints milliseconds and tokens a second of a step of every stage, and the plan's seconds."""
    run = make_trainer(options, options.device)
    prepare_device(options, run.device)
    seconds = step_seconds(run)
    for stage, each in zip(run.plan.stages, seconds):
        print(f"length {stage.length}: {1e3 * each:.1f} ms a step, "
              f"{stage.rows * stage.length / each:,.0f} tokens/s", flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if run.device.type == "cuda" else float("nan")
    print(f"plan: {plan_seconds(run.plan, seconds):.0f} s, peak {peak:.1f} GiB")
    return 0


def fit(options, device):
    """Sets options.scale so that the plan takes options.fit_seconds here; warms the device up."""
    run = make_trainer(options, device)
    seconds = step_seconds(run)
    options.scale *= options.fit_seconds / plan_seconds(run.plan, seconds)
    print("fit: " + ", ".join(
        f"{stage.length}: {1e3 * each:.1f} ms {stage.rows * stage.length / each:,.0f} tok/s"
        for stage, each in zip(run.plan.stages, seconds)) + f" | --scale {options.scale:.4f}",
          flush=True)


def report(run, line, started_tokens, started):
    elapsed = time.monotonic() - started
    rate = (run.tokens - started_tokens) / elapsed
    line.update(seconds=round(run.seconds, 1), tokens=run.tokens, tokens_per_second=round(rate))
    best = " ".join(f"{name}={value:.2f}" for name, value in line["accuracy"].items())
    print(f"step {line['step']}/{run.plan.steps} len {line['length']} prose {line['prose']:.3f} "
          f"answer {line['answer']:.3f} norm {line['norm']:.2f} {rate:,.0f} tok/s "
          f"{run.seconds:.0f} s | {best}", flush=True)


def read_scale(options):
    """The path of the file that keeps --scale; a run that exists goes on with its own."""
    path = os.path.join(options.out, "scale")
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            options.scale = float(file.read())
    return path


def train(options):
    """Runs until the plan ends or the time is up; returns the exit code."""
    started = time.monotonic()
    state, log_path = (os.path.join(options.out, name) for name in ("state", "log.jsonl"))
    os.makedirs(options.out, exist_ok=True)
    # The workers fork before anything touches the GPU; a state says where they start.
    scale_path, resumed = read_scale(options), os.path.isdir(state)
    run = make_trainer(options, "cpu")
    if resumed:
        run.load(state)
    loader = data.Loader(run.plan, options.seed, run.step, trainer.POOL_SLOTS, options.workers)
    prepare_device(options, torch.device(options.device))
    if options.fit_seconds and not resumed:
        fit(options, options.device)
    with open(scale_path, "w", encoding="ascii") as file:
        file.write(repr(options.scale))
    if options.device != "cpu" or options.fit_seconds:
        run = make_trainer(options, options.device)
        if resumed:
            run.load(state)
        loader.plan = run.plan
    lines = trainer.read_log(log_path, run.step)
    with open(log_path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"{options.model}: step {run.step} of {run.plan.steps}, {run.device}, "
          f"{options.workers} workers, ready after {time.monotonic() - started:.1f} s", flush=True)
    before, saved, started_tokens = run.seconds, time.monotonic(), run.tokens
    begun = time.monotonic()
    batches, logs = [], []

    def flush():
        nonlocal batches, logs
        run.seconds = before + time.monotonic() - started
        if not batches:
            return
        line = trainer.summarise(batches, logs)
        batches, logs = [], []
        report(run, line, started_tokens, begun)
        if line["skipped"] > options.log_every // 2:
            raise FloatingPointError(f"step {line['step']}: {line['skipped']} gradients are not "
                                     f"finite; the state of the last save is untouched")
        trainer.write_line(log_path, line)
        lines.append(line)

    try:
        for batch in loader:
            logs.append(run.train_step(batch))
            batches.append(batch)
            if len(batches) == options.log_every:
                flush()  # also waits for the device, so that the time limit below is honest
                if time.monotonic() - saved > options.save_seconds:
                    run.save(state)
                    saved = time.monotonic()
                if time.monotonic() - started > 60 * options.minutes:
                    break
        flush()
    finally:
        loader.close()
    run.save(state)
    curve.draw(lines, os.path.join(options.out, "curve.png"),
               f"{options.model}: {run.step} steps, {run.tokens / 1e6:.0f} M tokens, "
               f"{run.seconds:.0f} s")
    finished = run.step == run.plan.steps
    print(f"{'finished' if finished else 'stopped'} at step {run.step} of {run.plan.steps} after "
          f"{run.seconds:.0f} s of training in all", flush=True)
    return 0 if finished else UNFINISHED


def export(options):
    read_scale(options)
    run = make_trainer(options, "cpu")
    run.load(os.path.join(options.out, "state"))
    total = checkpoint.save(run.model, options.export)
    print(f"{options.export}: step {run.step} of {run.plan.steps}, {total} bytes of tensors")
    return 0


def show(options):
    model = checkpoint.load(options.evaluate, model_module.CONFIGS[options.model])
    model = model.to(options.device)
    lengths = [int(length) for length in options.lengths.split(",")]
    print("task".ljust(20), *(str(length).rjust(8) for length in lengths))
    for task, row in evaluate.table(model, lengths, options.examples).items():
        print(task.ljust(20), *(f"{row[length]:8.3f}" for length in lengths), flush=True)
    return 0


def main(arguments=None):
    options = parse(arguments)
    if options.evaluate:
        return show(options)
    if options.probe:
        return probe(options)
    return export(options) if options.export else train(options)


if __name__ == "__main__":
    sys.exit(main())
