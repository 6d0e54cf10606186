#!/usr/bin/env bash
# From a bare Debian 12 to an answer: installs what is missing, builds, serves the bundled
# checkpoint (on the GPU if there is one, else on the CPU), sends a long prompt with a needle in it,
# decodes the needle from the snapshot, and checks that it all held. Exit 0 only if it did.
#   deploy/quickstart.sh [MODEL_DIR]      QUICKSTART_TOKENS=32768 sets the prompt's length
# Models named needle-* are asked for a needle; any other gets random tokens.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. deploy/packages.sh

model=${1:-tests/data/models/needle-gdn}
tokens=${QUICKSTART_TOKENS:-32768}
new_tokens=16
bin=build/release/bin
work=$(mktemp -d "${TMPDIR:-/tmp}/sparsegdn-quickstart.XXXXXX")
server_pid=
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { printf '$ %s\n' "$*"; "$@"; }
cleanup() {
  if [ -n "$server_pid" ]; then
    kill -TERM "$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap cleanup EXIT

say "1. Packages and build"
ensure_packages "${build_packages[@]}" "${client_packages[@]}"
mkdir -p build
{ cmake --preset release &&
  cmake --build --preset release -j "$(nproc)" --target sparsegdn-server sparsegdn \
    sparsegdn_python_stubs; } >build/quickstart.build.log 2>&1 || {
  tail -n 40 build/quickstart.build.log >&2
  echo "error: the build failed (build/quickstart.build.log)" >&2
  exit 1
}
grep -- '-- CUDA backend' build/quickstart.build.log || true

say "2. The server, on $model"
"$bin/sparsegdn-server" --model "$model" --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 \
  --port-file "$work/ports" 2>"$work/server.log" &
server_pid=$!
for _ in $(seq 600); do
  [ -s "$work/ports" ] && break
  kill -0 "$server_pid" 2>/dev/null || { cat "$work/server.log" >&2; exit 1; }
  sleep 0.1
done
mapfile -t ports <"$work/ports"
export SPARSEGDN_SERVER=127.0.0.1:${ports[0]}
show "$bin/sparsegdn" info --wait 300 || { cat "$work/server.log" >&2; exit 1; }

say "3. A prompt of $tokens tokens, at the server's default budget"
needle=()
case $(basename "$model") in
  needle-*)
    PYTHONPATH=tests/quality /usr/bin/python3 -m tasks.plant "$tokens" "$work"
    needle=(--answer "$work/answer.txt" --sparse "$work/sparse.safetensors")
    new_tokens=2
    ;;
  *)
    vocab=$("$bin/sparsegdn" info --json | /usr/bin/python3 -c 'import json, sys; print(json.load(sys.stdin)["vocab_size"])')
    /usr/bin/python3 - "$tokens" "$vocab" >"$work/prompt.txt" <<'PY'
import random
import sys
draw = random.Random(20261201)
print(*(draw.randrange(int(sys.argv[2])) for _ in range(int(sys.argv[1]))))
PY
    ;;
esac
show "$bin/sparsegdn" prefill "$work/prompt.txt" --out "$work/sparse.safetensors"

say "4. Decoding continues from that snapshot"
awk '{print $NF}' "$work/prompt.txt" >"$work/last.txt"
show "$bin/sparsegdn" generate --from "$work/sparse.safetensors" "$work/last.txt" -n "$new_tokens"

say "5. Checks: the needle, dense continuation against recomputing, budget against what was computed"
PYTHONPATH=client/python:build/release/python /usr/bin/python3 deploy/quickstart_check.py \
  --server "$SPARSEGDN_SERVER" --metrics "http://127.0.0.1:${ports[1]}/metrics" \
  --prompt "$work/prompt.txt" --new-tokens 16 "${needle[@]}"

say "6. The server drains and stops"
kill -TERM "$server_pid"
status=0
wait "$server_pid" || status=$?
server_pid=
[ "$status" -eq 0 ] || { cat "$work/server.log" >&2; echo "error: the server exited with $status" >&2; exit 1; }
echo "quickstart: all of it worked"
