#!/usr/bin/env python3
"""Time to snapshot of a prompt whose beginning is stored, against the same prompt computed whole.

    prefix_hit.py BIN_DIR STUBS_DIR OUT_JSON [--model DIR] [--rounds R] [--redis PROGRAM]

BIN_DIR holds sparsegdn-server, STUBS_DIR the generated Python stubs (build/<preset>/python). Goal: a
prompt of 32,768 tokens of which 31,744 are stored takes at most a tenth of the time of a cold one.

Method. A real server on loopback. Each round has tokens of its own and runs, one call at a time:
  cold     the prompt with reuse off: nothing read, nothing stored
  storing  the prompt itself: computed whole, and stored
  hit      a prompt with the same first 31,744 tokens and another end: starts at the last window
           boundary before them (30,720) and computes the rest
  redis    the same as hit on a second server, which finds the beginning in Redis only (with --redis)
Timed from before the call to its OK status, every frame received; checked: tokens computed, and that
hit equals a cold run of its prompt bit for bit (first round). Figures are medians of the rounds and
the ratio of the medians. Prompts run in turn, so that a busy machine slows all of them; the server's
CPU time for the same calls, which others on the machine disturb less, stands beside them.

Exit code 1 when the goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import sys
import time

from service_overhead import ROOT, commit, machine

TOKENS, SHARED, WINDOW = 32768, 31744, 2048
REUSED = SHARED // WINDOW * WINDOW
GOAL = 10.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin_dir", type=pathlib.Path)
    parser.add_argument("stubs_dir", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path,
                        default=ROOT / "tests/data/models/tiny-hybrid")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--redis", type=pathlib.Path, help="a redis-server to start")
    return parser.parse_args()


OPTIONS = arguments()
for folder in (OPTIONS.stubs_dir, ROOT / "tests/fault"):
    sys.path.insert(0, str(folder.resolve()))
from harness import Server  # noqa: E402  needs the paths
from redis_process import Redis  # noqa: E402
from sparsegdn.v1 import prefill_pb2 as pb  # noqa: E402


def serve(stack: contextlib.ExitStack, *flags: object) -> Server:
    return stack.enter_context(Server("--prefix-cache-bytes", 2 << 30, *flags, model=OPTIONS.model,
                                      command=[OPTIONS.bin_dir / "sparsegdn-server"],
                                      start_seconds=120))


def cpu_seconds(server: Server) -> float:
    """User and system time of the server so far."""
    words = pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Bench:
    def __init__(self) -> None:
        self.computed: dict[str, int] = {}
        self.cpu: dict[str, list[float]] = {}  # the first of each name warms up

    def call(self, name: str, server: Server, tokens: list[int],
             reuse: bool = True) -> tuple[float, int]:
        """Seconds and the snapshot's digest."""
        request = pb.PrefillRequest(token_ids=tokens)
        if not reuse:
            request.prefix_reuse = pb.PREFIX_REUSE_OFF
        cpu, begin = cpu_seconds(server), time.perf_counter()
        for event in server.stub.Prefill(request, timeout=600):
            last = event
        seconds = time.perf_counter() - begin
        self.cpu.setdefault(name, []).append(cpu_seconds(server) - cpu)
        computed = last.result.usage.computed_tokens
        if self.computed.setdefault(name, computed) != computed:
            raise SystemExit(f"{name}: computed {computed} tokens, then {self.computed[name]}")
        return seconds, last.result.digest


def rounds(bench: Bench) -> dict:
    with contextlib.ExitStack() as stack:
        flags = []
        if OPTIONS.redis:
            os.environ["FAULT_REDIS_SERVER"] = str(OPTIONS.redis)
            flags = ["--redis", stack.enter_context(Redis()).url, "--redis-fetch-ms", 60000]
        server = serve(stack, *flags)
        other = serve(stack, *flags) if OPTIONS.redis else None
        times: dict[str, list[float]] = {}
        for number in range(OPTIONS.rounds + 1):  # the first warms up
            source = random.Random(number)
            whole = [source.randrange(512) for _ in range(TOKENS)]
            branch = whole[:SHARED] + [source.randrange(512) for _ in range(TOKENS - SHARED)]
            row = {"cold": bench.call("cold", server, whole, reuse=False),
                   "storing": bench.call("storing", server, whole),
                   "hit": bench.call("hit", server, branch)}
            if other is not None:
                time.sleep(3)  # the writer behind the request
                row["redis"] = bench.call("redis", other, branch)
            if number == 0:
                check = bench.call("check", server, branch, reuse=False)[1]
                if any(row[name][1] != check for name in row if name in ("hit", "redis")):
                    raise SystemExit("a hit is not the cold snapshot bit for bit")
                continue
            for name, (seconds, _) in row.items():
                times.setdefault(name, []).append(seconds)
        return times


def main() -> int:
    bench = Bench()
    times = rounds(bench)
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = median["cold"] / median["hit"]
    cpu = {name: statistics.median(bench.cpu[name][1:]) for name in times}
    figures = {"model": OPTIONS.model.name, "prompt_tokens": TOKENS, "shared_tokens": SHARED,
               "reused_tokens": REUSED, "computed_tokens": bench.computed,
               "seconds": {name: [round(v, 5) for v in values] for name, values in times.items()},
               "median_seconds": {name: round(value, 5) for name, value in median.items()},
               "median_server_cpu_seconds": {name: round(value, 3) for name, value in cpu.items()},
               "cold_over_hit_cpu": round(cpu["cold"] / cpu["hit"], 2),
               "cold_over_hit": round(ratio, 2), "goal_at_least": GOAL,
               "storing_over_cold": round(median["storing"] / median["cold"], 3)}
    if "redis" in median:
        figures["cold_over_redis_hit"] = round(median["cold"] / median["redis"], 2)
    report = {"command": " ".join(["python3", *sys.argv]), "machine": machine(),
              "commit": commit(), "figures": figures}
    OPTIONS.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in figures.items() if k != "seconds"}))
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
