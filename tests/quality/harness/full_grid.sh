#!/usr/bin/env bash
# The full grid of requests/full.json on a server that this script starts: on the GPU if the build and
# the machine have one. Hours on a CPU.
#   tests/quality/harness/full_grid.sh [MODEL_DIR] [OUT] [REQUEST]     BUILD=build/release PYTHON=python3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
model=${1:-tests/data/models/needle-gdn}
out=${2:-build/quality-$(basename "$model")}
request=${3:-tests/quality/harness/requests/full.json}
build=${BUILD:-build/release}
mkdir -p "$out"
rm -f "$out/ports"
"$build/bin/sparsegdn-server" --model "$model" --listen 127.0.0.1:0 --metrics-listen "" \
  --port-file "$out/ports" 2>"$out/server.log" &
server=$!
trap 'kill -TERM "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' EXIT
while [ ! -s "$out/ports" ]; do
  kill -0 "$server" 2>/dev/null || { cat "$out/server.log" >&2; exit 1; }
  sleep 0.1
done
PYTHONPATH=client/python:$build/python "${PYTHON:-python3}" tests/quality/harness/run_quality.py \
  --server "127.0.0.1:$(head -1 "$out/ports")" --request "$request" --out "$out"
