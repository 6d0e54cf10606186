#!/usr/bin/env bash
# Builds the fuzz targets with clang for libFuzzer (ASan and UBSan) in a folder of their own and runs
# each for a fixed time from the seeds that it writes itself.
#   run_libfuzzer.sh BUILD_DIR [SECONDS [TARGET...]]   60 seconds, every target
# Exit code 77, with the reason, where clang++ or its libFuzzer is missing. CXX names the compiler.
# A finding ends the script; the input lies in BUILD_DIR/findings.
set -euo pipefail
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -ge 1 ] || { sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed -n 3,6p >&2; exit 2; }
build=$(realpath -m "$1") seconds=${2:-60}
shift $(($# > 2 ? 2 : $#))

skip() { echo "SKIPPED: libFuzzer: $*"; exit 77; }
cxx=${CXX:-$(command -v clang++ || true)}
[ -n "$cxx" ] || skip "no clang++ (Debian: clang libclang-rt-dev)"
cc=${cxx/clang++/clang}
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' \
  >"$probe/probe.cc"
"$cxx" -std=c++20 -fsanitize=fuzzer,address,undefined "$probe/probe.cc" -o "$probe/probe" \
  2>"$probe/log" || skip "$cxx cannot link -fsanitize=fuzzer: $(grep -m 1 error "$probe/log" || true)"
"$probe/probe" -runs=1 >/dev/null 2>&1 || skip "a program of $cxx with -fsanitize=fuzzer does not run"

mkdir -p "$build"
cmake -S "$source_dir" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1" -DSPARSEGDN_CUDA=OFF \
  "-DCMAKE_C_COMPILER=$cc" "-DCMAKE_CXX_COMPILER=$cxx" -DSPARSEGDN_LIBFUZZER=ON \
  -DSPARSEGDN_SANITIZER=address,undefined,fuzzer-no-link >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log" >&2; exit 1; }
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  mapfile -t targets < <(ninja -C "$build" -t targets all |
    sed -nE 's/^libfuzzer_([a-z_]+): phony$/\1/p' | sort)
fi
[ ${#targets[@]} -gt 0 ] || { echo "no fuzz target in $build" >&2; exit 1; }
ninja -C "$build" sparsegdn_fuzz "${targets[@]/#/libfuzzer_}" >"$build/build.log" 2>&1 ||
  { grep -E -A 8 "^FAILED|error:" "$build/build.log" >&2; exit 1; }

export ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
mkdir -p "$build/findings"
for target in "${targets[@]}"; do
  corpus=$build/corpus/$target
  mkdir -p "$corpus"
  "$build/bin/sparsegdn_fuzz" "$target" --write-seeds "$corpus" >/dev/null
  log=$build/$target.log
  if ! (cd "$build/findings" && "$build/bin/libfuzzer_$target" -max_len=65536 -timeout=60 \
    -rss_limit_mb=4096 "-max_total_time=$seconds" "-artifact_prefix=$target-" "$corpus") \
    >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    echo "libFuzzer: $target failed; the input lies in $build/findings" >&2
    exit 1
  fi
  echo "$target: $(grep -E '^Done [0-9]+ runs' "$log")"
done
