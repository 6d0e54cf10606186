#!/usr/bin/env python3
"""The service under load: goodput, batch fill, and how a long and a short prompt share the steps.

    load_figures.py BIN_DIR STUBS_DIR OUT_JSON [--quick]

BIN_DIR holds sparsegdn-server, sparsegdn, sparsegdn-fake-server and the engine benches, STUBS_DIR
the generated Python stubs (build/<preset>/python). Prints a table with goal and verdict; exit code
1 when a goal is missed. Under four minutes; --quick, for tests, is one short round of each on the
fake model alone, judged by the median wait: its few short prompts have no 99th percentile.

Each figure is a ratio within one run, on the fake model (a step takes 1 ms and 10 us a token,
asleep: 98,800 tokens/s in full steps of 8,192) and on tiny-gdn, whose compute shares the cores with
service and callers. Prefix reuse is off.

- goodput: the computed tokens/s of completed prompts, open loop at 1.5 times what the engine can,
  over the tokens/s of the same engine without a service (sparsegdn-engine-bench: full steps of four
  2,048-token prompts). The fake gets a mix of lengths, the real model the engine's own 2,048.
  Engine and service in turn; the median of the pairs.
- fill: 64 callers in a closed loop of 256-token prompts; tokens over steps times 8,192, the
  partial steps at both ends included.
- wait and loss: a prompt of 131,072 tokens alone and beside one caller of 256-token prompts who
  pauses for up to one step between them, in turn. The long prompt's progress events are the clock: a
  moment is the number of its steps done, interpolated, so that the wait is in steps as they went.
  The wait of a short prompt is from its call to its snapshot, as its caller sees them, less one
  step, its own; 99th percentile of all. The loss is of the long prompt's tokens/s, medians.

Beside all of them /metrics, /livez and gRPC health are asked without end: a wrong answer ends the
run, and median, 99th percentile and maximum of the times stand beside the figures in OUT_JSON.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEP_TOKENS = 8192
LONG, SHORT = 131_072, 256
CHUNK = 2048
MIX = {256: 0.7, 2048: 0.2, 8192: 0.1}
OVERLOAD = 1.5
FAKE, REAL = "fake", "tiny-gdn"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin_dir", type=pathlib.Path)
    parser.add_argument("stubs_dir", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


OPTIONS = arguments()
for folder in (OPTIONS.stubs_dir, ROOT / "tests/fault", ROOT / "tests/bench"):
    sys.path.insert(0, str(folder.resolve()))
BIN = OPTIONS.bin_dir.resolve()
import harness  # noqa: E402  needs the paths
from prober import Prober  # noqa: E402
from service_overhead import commit, machine  # noqa: E402
from sparsegdn.v1 import prefill_pb2_grpc  # noqa: E402


def start(kind: str, *flags: object) -> harness.Server:
    program = "sparsegdn-fake-server" if kind == FAKE else "sparsegdn-server"
    return harness.Server("--prefix-cache-bytes", 0, "--log-level", "warning", *flags,
                          model=REAL, command=[BIN / program])


def run_json(*command: object) -> dict:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False,
                          env=harness.clean_environment())
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def probed(server: harness.Server):
    """A Prober whose every answer must have been right."""
    with Prober(server) as prober:
        yield prober
    if prober.failed:
        raise SystemExit(f"wrong answers under load: {prober.failed}")


def engine_best(kind: str, seconds: int) -> dict:
    name = "sparsegdn-fake-engine-bench" if kind == FAKE else "sparsegdn-engine-bench"
    return run_json(BIN / name, CHUNK, 16, seconds, "--model", harness.MODELS / REAL,
                    "--backend", "cpu")


def saturated(kind: str, best: float, seconds: int) -> dict:
    """What an open loop at OVERLOAD gets, while the rest is refused."""
    mix = MIX if kind == FAKE else {CHUNK: 1.0}
    mean = sum(length * weight for length, weight in mix.items()) / sum(mix.values())
    with start(kind, "--max-queue-requests", 32) as server, probed(server) as prober:
        report = run_json(
            BIN / "sparsegdn", "bench", "--server", server.target, "--json", "--rate",
            OVERLOAD * best / mean, "--seconds", seconds, "--mix",
            ",".join(f"{length}:{weight}" for length, weight in mix.items()),
            "--metrics", f"http://127.0.0.1:{server.http_port}/metrics",
            "--step-tokens", STEP_TOKENS)
    # The last token of a prompt is not computed: the snapshot is before it.
    computed = sum((group["length"] - 1) * group["completed"] for group in report["lengths"])
    return {"tokens_per_second": computed / report["wall_seconds"],
            "offered_tokens_per_second": report["offered_tokens_per_second"],
            "codes": report["codes"], "batch_fill": report["server"]["batch_fill"],
            "send_lag_seconds": report["send_lag_seconds"], "probes": prober.summary()}


def goodput(kind: str, rounds: int, seconds: int) -> dict:
    pairs = []
    for _ in range(rounds):
        best = engine_best(kind, seconds)
        service = saturated(kind, best["tokens_per_second"], seconds)
        pairs.append({"engine": best, "service": service,
                      "share": service["tokens_per_second"] / best["tokens_per_second"]})
    return {"pairs": pairs, "share": statistics.median(pair["share"] for pair in pairs)}


def fill(kind: str, requests: int) -> dict:
    with start(kind) as server:
        before = [server.metric(f"sparsegdn_batch_tokens_{x}") for x in ("sum", "count")]
        with probed(server) as prober:
            cell = run_json(BIN / "sparsegdn", "bench", "--server", server.target, "--json",
                            "--lengths", SHORT, "--requests", requests, "--concurrency", 64,
                            "--warmup", 0)
        after = [server.metric(f"sparsegdn_batch_tokens_{x}") for x in ("sum", "count")]
    if cell["lengths"][0]["errors"]:
        raise SystemExit("a call of the fill failed")
    tokens, steps = (b - a for a, b in zip(before, after))
    return {"steps": steps, "tokens": tokens, "fill": tokens / steps / STEP_TOKENS,
            "probes": prober.summary()}


class ShortCaller(threading.Thread):
    """256-token prompts, one at a time, until stopped; (call, snapshot) moments of each."""

    def __init__(self, server: harness.Server, pause: float, seed: int) -> None:
        super().__init__()
        self.stub = prefill_pb2_grpc.PrefillServiceStub(server.new_channel())
        self.server, self.pause, self.rng = server, pause, random.Random(seed)
        self.stopped = threading.Event()
        self.moments: list[tuple[float, float]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                request = harness.prompt(SHORT, self.rng.randrange(500))
                begin = time.monotonic()
                self.server.prefill(request, stub=self.stub)
                self.moments.append((begin, time.monotonic()))
                time.sleep(self.rng.uniform(0, self.pause))
        except BaseException as error:  # noqa: BLE001  raised by whoever joins
            self.error = error


class LongCall:
    """The prompt of 128K, run when made: its seconds in the engine and the moments of its steps."""

    def __init__(self, server: harness.Server, request) -> None:
        self.done: list[int] = []
        self.at: list[float] = []
        for event in server.stub.Prefill(request, timeout=600):
            kind = event.WhichOneof("event")
            if kind == "progress":
                self.done.append(event.progress.tokens_done)
                self.at.append(time.monotonic())
            elif kind == "result":
                self.seconds = event.result.timings.engine_seconds
        if self.done[-1] != LONG - 1:
            raise SystemExit("the long prompt was not computed to its end")

    def steps_at(self, moment: float) -> float | None:
        """Steps done by then; None before the first and after the last."""
        after = bisect.bisect(self.at, moment)
        if not 0 < after < len(self.at):
            return None
        share = (moment - self.at[after - 1]) / (self.at[after] - self.at[after - 1])
        return (self.done[after - 1] + share * (self.done[after] - self.done[after - 1])) / CHUNK

    def waits(self, moments: list[tuple[float, float]]) -> list[float]:
        pairs = [(self.steps_at(begin), self.steps_at(end)) for begin, end in moments]
        return [end - begin - 1 for begin, end in pairs if begin is not None and end is not None]


def neighbours(kind: str, rounds: int) -> dict:
    request = harness.prompt(LONG)
    alone, beside, waits, extra = [], [], [], []
    with start(kind) as server, probed(server) as prober:
        server.prefill(harness.prompt(4 * CHUNK))  # warm
        for index in range(rounds):
            alone.append(LongCall(server, request).seconds)
            caller = ShortCaller(server, alone[-1] / LONG * CHUNK, index)
            before = server.metric("sparsegdn_batch_tokens_count")
            caller.start()
            call = LongCall(server, request)
            extra.append(server.metric("sparsegdn_batch_tokens_count") - before - LONG / CHUNK)
            caller.stopped.set()
            caller.join()
            if caller.error:
                raise caller.error
            beside.append(call.seconds)
            waits += call.waits(caller.moments)
    waits.sort()
    return {"alone_seconds": alone, "beside_seconds": beside, "short_prompts": len(waits),
            # Steps that ran without the long prompt, as those at both its ends may.
            "steps_without": extra,
            "wait_steps": {"p50": statistics.median(waits),
                           "p99": waits[math.ceil(0.99 * len(waits)) - 1], "max": waits[-1]},
            "loss": 1 - statistics.median(alone) / statistics.median(beside),
            "probes": prober.summary()}


def figures() -> dict:
    if OPTIONS.quick:
        return {FAKE: {"goodput": goodput(FAKE, 1, 2), "fill": fill(FAKE, 640),
                       "neighbours": neighbours(FAKE, 1)}}
    return {FAKE: {"goodput": goodput(FAKE, 3, 5), "fill": fill(FAKE, 1280),
                   "neighbours": neighbours(FAKE, 6)},
            REAL: {"goodput": goodput(REAL, 2, 8), "fill": fill(REAL, 1280),
                   "neighbours": neighbours(REAL, 3)}}


def rows(measured: dict) -> list[dict]:
    out = []
    of_waits = "p50" if OPTIONS.quick else "p99"
    for kind, got in measured.items():
        wait = got["neighbours"]["wait_steps"][of_waits]
        for name, value, goal, met in (
                ("goodput at saturation over the engine's best", got["goodput"]["share"],
                 "at least 0.90", got["goodput"]["share"] >= 0.90),
                ("batch fill, 64 callers of 256 tokens", got["fill"]["fill"],
                 "at least 0.80", got["fill"]["fill"] >= 0.80),
                (f"{of_waits} wait of 256 tokens beside 128K, steps", wait, "at most 2", wait <= 2),
                ("what the 128K prompt loses", got["neighbours"]["loss"],
                 "at most 0.20", got["neighbours"]["loss"] <= 0.20)):
            out.append({"model": kind, "figure": name, "measured": round(value, 4), "goal": goal,
                        "met": met})
    return out


def main() -> int:
    begin = time.monotonic()
    measured = figures()
    table = rows(measured)
    report = {"command": " ".join(["python3", *sys.argv]), "machine": machine(),
              "commit": commit(), "seconds": round(time.monotonic() - begin, 1), "table": table,
              "figures": measured}
    OPTIONS.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'model':10} {'figure':46} {'measured':>9}  {'goal':14} verdict")
    for row in table:
        print(f"{row['model']:10} {row['figure']:46} {row['measured']:9.3f}  {row['goal']:14} "
              f"{'met' if row['met'] else 'MISSED'}")
    print(f"{report['seconds']:.0f} s, load average {report['machine']['load_average']:.1f}")
    return 0 if all(row["met"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
