#!/usr/bin/env python3
"""What the service adds to the engine's own time, and how fast it streams.

    service_overhead.py BIN_DIR STUBS_DIR OUT_JSON [--model DIR] [--tokens N] [--rounds R]

BIN_DIR holds sparsegdn-server and sparsegdn-service-bench, STUBS_DIR the generated Python stubs
(build/<preset>/python). Goals: at most 5 % of the engine's time for a 16K-token prompt on the
bundled checkpoint; snapshot streaming at least 70 % of a bare gRPC loop with the same frames in
the same run.

Method. A real server on loopback. One warm-up call, then R calls one at a time. The overhead of a
call is (seen by the client - Timings.engine_seconds) / engine_seconds: from before the call to its
OK status, every frame received but not verified or assembled. The request is made before the clock
starts. The figure is the median of the calls; all of them are written. Streaming is measured by
sparsegdn-service-bench in one process, which alternates the two servers.

Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
OVERHEAD_GOAL, STREAM_GOAL = 0.05, 0.70
START_SECONDS = 120


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin_dir", type=pathlib.Path)
    parser.add_argument("stubs_dir", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path,
                        default=ROOT / "tests/data/models/tiny-hybrid")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parsed = parser.parse_args()
    if parsed.rounds < 5:
        parser.error("--rounds: got fewer than 5 calls, of which no median is taken")
    return parsed


def machine() -> dict:
    model = next((line.split(":", 1)[1].strip() for line in
                  pathlib.Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "system": platform.system(),
            "load_average": os.getloadavg()[0]}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def start(server: pathlib.Path, model: pathlib.Path, folder: pathlib.Path):
    """(process, port) of a server that serves."""
    ports = folder / "ports"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARSEGDN_")}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [server, "--model", model, "--backend", "cpu", "--listen", "127.0.0.1:0",
             "--metrics-listen=", "--prefix-cache-bytes", "0", "--port-file", ports], stdout=log, stderr=log, env=environment)
    end = time.monotonic() + START_SECONDS
    while not ports.exists():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise SystemExit((folder / "log").read_text())
        time.sleep(0.05)
    return process, int(ports.read_text().split()[0])


def one_call(stub, request) -> tuple[float, float, int]:
    """Seconds seen by the client, seconds of the engine, bytes of tensors."""
    result, received = None, 0
    begin = time.perf_counter()
    for event in stub.Prefill(request, timeout=600, wait_for_ready=True):
        kind = event.WhichOneof("event")
        if kind == "chunk":
            received += len(event.chunk.data)
        elif kind == "result":
            result = event.result
    seen = time.perf_counter() - begin
    return seen, result.timings.engine_seconds, received


def overhead(options: argparse.Namespace) -> dict:
    sys.path.insert(0, str(options.stubs_dir))
    import grpc
    from sparsegdn.v1 import prefill_pb2 as pb
    from sparsegdn.v1 import prefill_pb2_grpc
    request = pb.PrefillRequest(token_ids=[(i * 31) % 512 for i in range(options.tokens)])
    with tempfile.TemporaryDirectory() as name:
        process, port = start(options.bin_dir / "sparsegdn-server", options.model,
                              pathlib.Path(name))
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = prefill_pb2_grpc.PrefillServiceStub(channel)
                end = time.monotonic() + START_SECONDS
                while True:  # refused while the model loads
                    try:
                        one_call(stub, request)
                        break
                    except grpc.RpcError as error:
                        if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                            raise
                        time.sleep(0.1)
                calls = [one_call(stub, request) for _ in range(options.rounds)]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    shares = [(seen - engine) / engine for seen, engine, _ in calls]
    return {"prompt_tokens": options.tokens, "model": options.model.name,
            "snapshot_bytes": calls[0][2],
            "client_seconds": [round(seen, 6) for seen, _, _ in calls],
            "engine_seconds": [round(engine, 6) for _, engine, _ in calls],
            "overhead_shares": [round(share, 5) for share in shares],
            "overhead_median": round(statistics.median(shares), 5), "goal_at_most": OVERHEAD_GOAL}


def main() -> int:
    options = arguments()
    figures = {"overhead": overhead(options)}
    bench = subprocess.run([options.bin_dir / "sparsegdn-service-bench"], check=True,
                           capture_output=True, text=True)
    figures["streaming"] = json.loads(bench.stdout)
    report = {"command": " ".join(["python3", *sys.argv]), "machine": machine(),
              "commit": commit(), "figures": figures}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"overhead {figures['overhead']['overhead_median']:.2%} (goal at most "
          f"{OVERHEAD_GOAL:.0%}), streaming {figures['streaming']['ratio']:.0%} of bare gRPC "
          f"(goal at least {STREAM_GOAL:.0%})")
    return 0 if (figures["overhead"]["overhead_median"] <= OVERHEAD_GOAL
                 and figures["streaming"]["ratio"] >= STREAM_GOAL) else 1


if __name__ == "__main__":
    sys.exit(main())
