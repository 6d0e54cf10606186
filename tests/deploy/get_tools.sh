#!/usr/bin/env bash
# Unpacks what the deploy tests need under build/, without installing anything on the machine:
#   build/tools/prometheus      promtool and prometheus, from the Debian package `prometheus`
#   build/tools/docker-compose  for the compose schema that it carries
#   build/tools/debootstrap     for the replay of the Dockerfile
#   build/deploy-tools          Python packages: Helm's own library, the Kubernetes schemas, PyYAML
# Exit 77 (skipped) with the reason when a download is refused; what is already there is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p build/tools
exec 9>build/tools/.lock
flock 9 # several build trees share the folder

python=/usr/bin/python3
pip_packages=(helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 PyYAML==6.0.4
  'grafana-foundation-sdk==1769699998!10.1.0')
log=build/tools/get_tools.log
: >"$log"

skip() {
  tail -n 5 "$log" >&2
  echo "SKIPPED: $*"
  exit 77
}

# unpack_deb PACKAGE FOLDER: the package's files, its maintainer scripts never run.
unpack_deb() {
  [ -e "$2/.done" ] && return 0
  rm -rf "$2"
  mkdir -p "$2/deb"
  (cd "$2/deb" && { apt-get download "$1" || { apt-get update && apt-get download "$1"; }; }) \
    >>"$log" 2>&1 || return 1
  dpkg -x "$2"/deb/*.deb "$2"
  rm -rf "$2/deb"
  touch "$2/.done"
}

unpack_deb prometheus "$PWD/build/tools/prometheus" ||
  skip "the Debian package prometheus (promtool) cannot be downloaded"

unpack_deb docker-compose "$PWD/build/tools/docker-compose" ||
  skip "the Debian package docker-compose (the compose schema) cannot be downloaded"

unpack_deb debootstrap "$PWD/build/tools/debootstrap" ||
  skip "the Debian package debootstrap cannot be downloaded"

wanted="${pip_packages[*]}"
site=build/deploy-tools
if [ "$(cat "$site/.done" 2>/dev/null)" != "$wanted" ]; then
  # pip itself comes from a wheel inside a Debian package, so that none need be installed.
  unpack_deb python3-pip-whl "$PWD/build/tools/pip" ||
    skip "the Debian package python3-pip-whl cannot be downloaded"
  rm -rf "$site"
  wheel=$(echo build/tools/pip/usr/share/python-wheels/pip-*.whl)
  "$python" "$wheel/pip" install --quiet --no-cache-dir --no-compile --only-binary :all: \
    --target "$site" "${pip_packages[@]}" >>"$log" 2>&1 ||
    skip "these Python packages cannot be had: $wanted"
  # The wheel carries the library three times under its version names.
  for library in "$site"/helm_python/lib/libhelm_c.so "$site"/helm_python/lib/libhelm_c.so.0; do
    rm -f "$library"
  done
  echo "$wanted" >"$site/.done"
fi
build/tools/prometheus/usr/bin/promtool --version 2>&1 | head -n 1
PYTHONPATH=$site "$python" -c 'import helm_python as h, kubernetes_validate.utils as u
print("Helm library", h.helm_sdk_version(), "Kubernetes schemas", ", ".join(u.all_versions()[-3:]))'
