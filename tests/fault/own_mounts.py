"""Commands with mounts of their own, which nobody else on the machine sees."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

# Mounts must not travel back. Where / is a mount point all of them are made private; in a chroot it
# is not, and the mount that holds the folder has to be found.
SCRIPT = """
if ! mount --make-rprivate / 2>/dev/null; then
  holder=$(findmnt --noheadings --output TARGET --target "$1" | tail -n 1)
  mount --make-private "${holder:-nothing that holds $1}" || exit 125
fi
mount -t tmpfs -o "$2" tmpfs "$1" || exit 125
shift 2
exec "$@"
"""


def with_tmpfs(folder: str, command: list[str], options: str = "mode=1777") -> list[str]:
    """The command where `folder` is an empty tmpfs of its own; exit code 125 where that fails."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", "--propagation", "unchanged", *user, "sh", "-c", SCRIPT, "sh",
            folder, options, *command]


@functools.cache
def refused(folder: str) -> str:
    """Why with_tmpfs cannot be had here, or ''."""
    if shutil.which("unshare") is None:
        return "no unshare here"
    done = subprocess.run(with_tmpfs(folder, ["true"]), capture_output=True, text=True)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
