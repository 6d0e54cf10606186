#!/usr/bin/env bash
# Fetches the headers of cuDNN's frontend (Apache-2.0 and MIT) for the CUDA build, once, to
# build/tools/cudnn-frontend/include. Without them the build works and attention runs on our own
# kernel. Needs pip and PyPI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=1.32.0
sha256=c6006556017a4d1c914c52a556c71b1267f2d6a0500f742e7b4edef539878df0
to=build/tools/cudnn-frontend
[ -e "$to/include/cudnn_frontend.h" ] && [ "$(cat "$to/version" 2>/dev/null)" = "$version" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "nvidia-cudnn-frontend==$version --hash=sha256:$sha256" >"$work/requirements.txt"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --platform manylinux_2_28_x86_64 --python-version 3.11 --require-hashes \
  -r "$work/requirements.txt" -d "$work"
rm -rf "$to"
mkdir -p "$to"
python3 - "$work"/*.whl "$to" <<'PY'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith("include/")])
PY
echo "$version" >"$to/version"
