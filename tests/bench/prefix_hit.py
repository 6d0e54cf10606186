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
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
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


class Process:
    """A child with a folder; ended by its id."""

    def __init__(self, folder: pathlib.Path, *words: str | pathlib.Path) -> None:
        folder.mkdir()
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        self.log = folder / "log"

    def wait_for(self, ready) -> None:
        end = time.monotonic() + 120
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(self.log.read_text())
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def serve(options: argparse.Namespace, folder: pathlib.Path, *flags: str):
    ports = folder / "ports"
    server = Process(folder, options.bin_dir / "sparsegdn-server", "--model", options.model,
                     "--backend", "cpu", "--listen", "127.0.0.1:0", "--metrics-listen=",
                     "--port-file", ports, "--prefix-cache-bytes", str(2 << 30), *flags)
    server.wait_for(ports.exists)
    return server, int(ports.read_text().split()[0])


def start_redis(options: argparse.Namespace, folder: pathlib.Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    redis = Process(folder, options.redis, "--port", str(port), "--bind", "127.0.0.1", "--save", "")

    def answers() -> bool:
        with socket.socket() as link:
            return link.connect_ex(("127.0.0.1", port)) == 0

    redis.wait_for(answers)
    return redis, f"redis://127.0.0.1:{port}"


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        sys.path.insert(0, str(options.stubs_dir))
        import grpc
        from sparsegdn.v1 import prefill_pb2 as pb
        from sparsegdn.v1 import prefill_pb2_grpc
        self.pb, self.grpc, self.make_stub = pb, grpc, prefill_pb2_grpc.PrefillServiceStub
        self.computed: dict[str, int] = {}
        self.cpu: dict[str, list[float]] = {}  # the first of each name warms up
        self.pids: dict[int, int] = {}

    def cpu_seconds(self, stub) -> float:
        """User and system time of the stub's server so far."""
        words = pathlib.Path(f"/proc/{self.pids[id(stub)]}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self, port: int, server: Process):
        stub = self.make_stub(self.grpc.insecure_channel(
            f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)]))
        self.pids[id(stub)] = server.process.pid
        while True:  # refused while the model loads
            try:
                stub.GetModelInfo(self.pb.GetModelInfoRequest(), wait_for_ready=True, timeout=60)
                return stub
            except self.grpc.RpcError as error:
                if error.code() != self.grpc.StatusCode.UNAVAILABLE:
                    raise
                time.sleep(0.1)

    def call(self, name: str, stub, tokens: list[int], reuse: bool = True) -> tuple[float, int]:
        """Seconds and the snapshot's digest."""
        request = self.pb.PrefillRequest(token_ids=tokens)
        if not reuse:
            request.prefix_reuse = self.pb.PREFIX_REUSE_OFF
        cpu, begin = self.cpu_seconds(stub), time.perf_counter()
        for event in stub.Prefill(request, timeout=600):
            last = event
        seconds = time.perf_counter() - begin
        self.cpu.setdefault(name, []).append(self.cpu_seconds(stub) - cpu)
        computed = last.result.usage.computed_tokens
        if self.computed.setdefault(name, computed) != computed:
            raise SystemExit(f"{name}: computed {computed} tokens, then {self.computed[name]}")
        return seconds, last.result.digest


def rounds(options: argparse.Namespace, bench: Bench, folder: pathlib.Path) -> dict:
    processes, flags = [], []
    try:
        if options.redis:
            redis, url = start_redis(options, folder / "redis")
            processes.append(redis)
            flags = ["--redis", url, "--redis-fetch-ms", "60000"]
        server, port = serve(options, folder / "first", *flags)
        processes.append(server)
        stub, other = bench.connect(port, server), None
        if options.redis:
            server, port = serve(options, folder / "second", *flags)
            processes.append(server)
            other = bench.connect(port, server)
        times: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):  # the first warms up
            source = random.Random(number)
            whole = [source.randrange(512) for _ in range(TOKENS)]
            branch = whole[:SHARED] + [source.randrange(512) for _ in range(TOKENS - SHARED)]
            row = {"cold": bench.call("cold", stub, whole, reuse=False),
                   "storing": bench.call("storing", stub, whole),
                   "hit": bench.call("hit", stub, branch)}
            if other is not None:
                time.sleep(3)  # the writer behind the request
                row["redis"] = bench.call("redis", other, branch)
            if number == 0:
                check = bench.call("check", stub, branch, reuse=False)[1]
                if any(row[name][1] != check for name in row if name in ("hit", "redis")):
                    raise SystemExit("a hit is not the cold snapshot bit for bit")
                continue
            for name, (seconds, _) in row.items():
                times.setdefault(name, []).append(seconds)
        return times
    finally:
        for process in reversed(processes):
            process.stop()


def main() -> int:
    options = arguments()
    bench = Bench(options)
    with tempfile.TemporaryDirectory() as name:
        times = rounds(options, bench, pathlib.Path(name))
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = median["cold"] / median["hit"]
    cpu = {name: statistics.median(bench.cpu[name][1:]) for name in times}
    figures = {"model": options.model.name, "prompt_tokens": TOKENS, "shared_tokens": SHARED,
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
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in figures.items() if k != "seconds"}))
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
