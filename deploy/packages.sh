# Sourced by quickstart.sh, tests/run.sh and the Dockerfile: the Debian packages the project needs
# (the same names on Debian 12 and Ubuntu 24.04), and a function that installs what is missing.

build_packages=(
  ca-certificates g++ cmake ninja-build pkg-config git ccache
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev libre2-dev
  libc-ares-dev libssl-dev zlib1g-dev prometheus-cpp-dev nlohmann-json3-dev libspdlog-dev
  libcpp-httplib-dev libopenblas-dev libhwy-dev libxxhash-dev
  libgtest-dev libgmock-dev libhiredis-dev libzstd-dev
)
fuzz_packages=(clang libclang-rt-dev)  # libFuzzer lies in the run-time package of clang's version
client_packages=(python3 python3-numpy python3-grpcio python3-protobuf python3-xxhash)

# ensure_packages NAME...: installs those that dpkg does not list as installed.
ensure_packages() {
  local missing=() name
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  echo "installing: ${missing[*]}"
  local run=()
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null; then
      run=(sudo)
    else
      echo "error: these Debian packages are missing, and neither root nor sudo is at hand:" \
        "${missing[*]}" >&2
      return 1
    fi
  fi
  local log
  log=$(mktemp)
  if ! { "${run[@]}" apt-get update &&
    DEBIAN_FRONTEND=noninteractive "${run[@]}" apt-get install -y --no-install-recommends \
      "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "error: apt-get could not install: ${missing[*]} (full log: $log)" >&2
    return 1
  fi
  rm -f "$log"
}
