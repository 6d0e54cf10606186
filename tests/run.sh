#!/usr/bin/env bash
# Installs what is missing, builds, and runs the tests this machine can run.
#   tests/run.sh          at most 25 minutes from an empty tree on 2 cores
#   tests/run.sh --all    adds the long ones: soak, longer fuzzing, image build in a fresh chroot
# Three builds: release (everything), asan (unit tests under ASan and UBSan), tsan (kernels/cpu and
# the engine with a fake model; no gRPC linked). Ends with the line that ctest prints for release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. deploy/packages.sh

all=0
for arg in "$@"; do
  case $arg in
    --all) all=1 ;;
    *)
      echo "usage: tests/run.sh [--all]" >&2
      exit 2
      ;;
  esac
done

jobs=$(nproc)
start=$SECONDS
step() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - start)); }

step "packages"
ensure_packages "${build_packages[@]}" "${client_packages[@]}" redis-tools  # has redis-server
[ "$all" = 0 ] || ensure_packages "${fuzz_packages[@]}"

build() { # PRESET TARGET...
  local preset=$1 log
  shift
  step "build $preset"
  mkdir -p build
  log=build/$preset.configure.log
  cmake --preset "$preset" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
  grep -E '^-- (CUDA backend|CUDA attention|Tests left out)' "$log" || true
  cmake --build --preset "$preset" -j "$jobs" --target "$@" | tail -n 3
}

if command -v nvcc >/dev/null; then
  deploy/get_cudnn_frontend.sh ||
    echo "not built: attention by cuDNN (its frontend's headers could not be fetched: no pip, or no PyPI)"
fi
build release all
build asan unit_tests
build tsan unit_tests

exclude='^$'
[ "$all" = 1 ] || exclude='^long$'
skips=build/skipped.txt
: >"$skips"
run_tests() { # PRESET [ctest arguments]
  local preset=$1 log=build/$1.ctest.log
  shift
  step "test $preset"
  if ! ctest --test-dir "build/$preset" --output-on-failure --timeout 600 "$@" >"$log" 2>&1; then
    grep -vE '^ +(Start|[0-9]+/[0-9]+ Test +#[0-9]+: .* Passed)|^ *[0-9]+/[0-9]+ Test .*Passed' \
      "$log" | tail -n 200 >&2
    return 1
  fi
  # A skipped test prints "SKIPPED: reason" or googletest's "[  SKIPPED ]" after the reason.
  grep -E '\*\*\*Skipped' "$log" | sed -E "s/^.*Test +#[0-9]+: /$preset: /" >>"$skips" || true
  grep -E '^SKIPPED: ' "build/$preset/Testing/Temporary/LastTest.log" | sort -u >>"$skips" || true
}
# UBSan has no exit code of its own unless told; leaks are checked where ptrace allows.
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:suppressions=$PWD/tests/tsan.supp
run_tests asan -j "$jobs" -LE long
grep -E 'tests passed' build/asan.ctest.log
run_tests tsan -j "$jobs" -LE long
grep -E 'tests passed' build/tsan.ctest.log

step "test release"
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 ||
  echo "not run: the CUDA rows of the kernel tests (no GPU here); the CUDA code is compiled when nvcc is found"
[ "$all" = 1 ] || echo "not run: tests labelled long (tests/run.sh --all runs them)"
run_tests release -LE "$exclude"
if [ -s "$skips" ]; then
  echo "skipped by ctest:"
  sed 's/^/  /' "$skips"
fi
step "done"
grep -E 'tests passed' build/release.ctest.log
