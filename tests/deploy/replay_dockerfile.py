#!/usr/bin/env python3
"""Replays the Dockerfile (BACKEND=cpu) in fresh chroots and runs the image: no container engine needed.

    replay_dockerfile.py ROOT MODEL_DIR

Each stage is a copy of a bootstrapped Debian; RUN, COPY, ARG, SHELL and WORKDIR are carried out, and
the last stage's ENTRYPOINT, CMD, USER and HEALTHCHECK are used as an engine would: read-only, under
the image's UID and under another one, a prefill by the client inside, SIGTERM, exit code 0.
Needs root, a Debian mirror and free ports 8500 and 9500. Exit 77 with the reason when it cannot run.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import deploy_lib as lib

BASE_IMAGE = "debian:bookworm-slim"
BUILD_ARGS = {"BACKEND": "cpu"}  # as --build-arg
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KNOWN = {"ARG", "FROM", "SHELL", "WORKDIR", "RUN", "COPY", "USER", "EXPOSE", "STOPSIGNAL",
         "HEALTHCHECK", "ENTRYPOINT", "CMD"}
PORTS = (8500, 9500)


def instructions(text):
    """(keyword, argument) of each instruction, continuation lines joined, comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if line.strip():
            keyword, argument = line.strip().split(None, 1)
            if keyword not in KNOWN:
                raise ValueError(f"Dockerfile: {keyword} is not known here")
            yield keyword, argument


class Stage:
    """One FROM: its files and what the later instructions set."""

    def __init__(self, base):
        self.files = base.files if isinstance(base, Stage) else base
        self.owned = False
        self.shell = ["/bin/sh", "-c"]
        self.workdir = "/"
        self.args = {}
        self.settings = {}

    def own(self, folder):
        """Gives the stage a copy of its base to write to."""
        if not self.owned:
            subprocess.run(["cp", "-a", f"{self.files}/.", folder], check=True)
            self.files, self.owned = pathlib.Path(folder), True


class Replay:

    def __init__(self, root, work, base):
        self.root, self.work, self.base = root, pathlib.Path(work), base
        self.stages, self.current = {}, None
        self.globals = {}

    def substitute(self, text, values):
        return re.sub(r"\$\{(\w+)\}", lambda m: values[m.group(1)], text)

    def carry_out(self):
        for keyword, argument in instructions((self.root / "Dockerfile").read_text()):
            print(f"{keyword} {argument[:110]}", flush=True)
            handler = {"FROM": self.start_stage, "ARG": self.arg, "SHELL": self.shell,
                       "WORKDIR": self.workdir, "RUN": self.run, "COPY": self.copy}.get(keyword)
            if handler:
                handler(argument)
            else:
                self.current.settings[keyword] = argument
        return self.current

    def arg(self, argument):
        name, _, value = argument.partition("=")
        if self.current is None:
            self.globals[name] = BUILD_ARGS.get(name, value)
        else:
            self.current.args[name] = self.globals[name]

    def start_stage(self, argument):
        image, _, name = self.substitute(argument, self.globals).partition(" AS ")
        self.current = Stage(self.stages.get(image, self.base if image == BASE_IMAGE else None))
        self.stages[name or "final"] = self.current

    def shell(self, argument):
        self.current.shell = json.loads(argument)

    def workdir(self, argument):
        self.own()
        self.current.workdir = argument
        (self.current.files / argument.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def own(self):
        if self.current.files is None:
            raise ValueError("a stage that only BACKEND=cuda uses is being built")
        self.current.own(tempfile.mkdtemp(prefix="stage.", dir=self.work))

    def run(self, argument):
        self.own()
        stage = self.current
        with mounted(stage.files, ["proc", "dev"]):
            subprocess.run(
                ["chroot", stage.files, "/usr/bin/env", "-i", f"PATH={PATH}", "HOME=/root",
                 *[f"{name}={value}" for name, value in stage.args.items()],
                 "/bin/sh", "-c", f'cd "{stage.workdir}" && exec "$@"', "sh",
                 *stage.shell, argument], check=True)

    def copy(self, argument):
        self.own()
        words = argument.split()
        source, ignored = self.root, self.dockerignore()
        if words[0].startswith("--from="):
            source, ignored = self.stages[words.pop(0)[len("--from="):]].files, set()
        *paths, target = words
        target = self.current.files / self.current.workdir.lstrip("/") / target.lstrip("/") \
            if not target.startswith("/") else self.current.files / target.lstrip("/")
        for path in paths:
            path = source / path.lstrip("/")
            if path.is_dir():
                shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True,
                                ignore=lambda folder, names, top=path: [
                                    n for n in names if pathlib.Path(folder) == top
                                    and n in ignored])
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def dockerignore(self):
        return {line.strip("/ ") for line in (self.root / ".dockerignore").read_text().splitlines()
                if line.strip()}


class mounted:
    """proc and a recursive bind of dev inside a root, for as long as the block runs."""

    def __init__(self, root, names, binds=(), read_only=False):
        self.root, self.names, self.binds, self.read_only = root, names, binds, read_only
        self.done = []

    def mount(self, target, *arguments):
        subprocess.run(["mount", *arguments, target], check=True)
        self.done.append(target)

    def __enter__(self):
        if self.read_only:
            self.mount(self.root, "--bind", self.root)
        for source, inside in self.binds:
            (self.root / inside).mkdir(exist_ok=True)
        if self.read_only:
            subprocess.run(["mount", "-o", "remount,ro,bind", self.root], check=True)
        if "proc" in self.names:
            self.mount(self.root / "proc", "-t", "proc", "proc")
        if "dev" in self.names:
            self.mount(self.root / "dev", "--rbind", "/dev")
            subprocess.run(["mount", "--make-rslave", self.root / "dev"], check=True)
        for source, inside in self.binds:
            self.mount(self.root / inside, "--bind", source)
            subprocess.run(["mount", "-o", "remount,ro,bind", self.root / inside], check=True)

    def __exit__(self, *unused):
        for target in reversed(self.done):
            subprocess.run(["umount", "-R", "-l", target], check=False)


def remove(folder):
    # Never into a mounted /dev.
    subprocess.run(["rm", "-rf", "--one-file-system", folder], check=False)


def bootstrap(folder):
    """A minimal Debian 12 in `folder`, with this machine's package sources."""
    site = subprocess.run(["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)"],
                          stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n")
    mirror = next((line.split()[0] for line in site if line.endswith(" bookworm")), None)
    if mirror is None:
        lib.skip("this machine's package sources have no Debian bookworm")
    script = lib.TOOLS / "debootstrap/usr"
    environment = dict(os.environ, DEBOOTSTRAP_DIR=str(script / "share/debootstrap"))
    subprocess.run([script / "sbin/debootstrap", "--variant=minbase", "bookworm", folder, mirror],
                   check=True, env=environment, stdout=subprocess.DEVNULL)
    for name in ("resolv.conf", "apt/apt.conf.d"):
        source, target = pathlib.Path("/etc") / name, folder / "etc" / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, target)


def run_image(stage, model, uid):
    """Starts the image as an engine would, uses it, stops it."""
    settings = stage.settings
    root = stage.files
    command = json.loads(settings["ENTRYPOINT"]) + json.loads(settings["CMD"])
    health = json.loads(settings["HEALTHCHECK"].partition(" CMD ")[2])
    inside = ["chroot", f"--userspec={uid}:{uid}", root, "/usr/bin/env", "-i", f"PATH={PATH}"]
    with mounted(root, ["proc", "dev"], [(model, "model")], read_only=True):
        server = subprocess.Popen([*inside, *command])
        try:
            deadline = time.monotonic() + 120
            while subprocess.run([*inside, *health], stderr=subprocess.DEVNULL,
                                 check=False).returncode != 0:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"not healthy; exit code {server.poll()}")
                time.sleep(0.2)
            prompt = " ".join(str(1 + i % 97) for i in range(600))
            subprocess.run([*inside, "/usr/local/bin/sparsegdn", "prefill", "--quiet",
                            "--server", "127.0.0.1:8500"], input=prompt, text=True, check=True)
            server.send_signal(getattr(signal, settings["STOPSIGNAL"]))
            code = server.wait(75)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
    if code != 0:
        raise AssertionError(f"exit code {code} after {settings['STOPSIGNAL']}")
    print(f"image ran as UID {uid}: healthy, one prefill, drained")


def main():
    root, model = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
    if os.geteuid() != 0:
        lib.skip("chroot needs root")
    if not (lib.TOOLS / "debootstrap/.done").exists():
        lib.skip("debootstrap is not unpacked (tests/deploy/get_tools.sh)")
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                lib.skip(f"port {port} is in use")
    if "SPARSEGDN_REPLAY" not in os.environ:
        allowed = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
        if allowed.returncode != 0:
            lib.skip(f"no mount namespace can be had: {allowed.stderr.decode().strip()}")
        # In a mount namespace of its own no mount outlives the test, however it ends.
        os.execvpe("unshare", ["unshare", "--mount", sys.executable, *sys.argv],
                   dict(os.environ, SPARSEGDN_REPLAY="1"))
    work = root / "build" / "replay"
    remove(work)
    try:
        base = work / "base"
        base.mkdir(parents=True)
        bootstrap(base)
        final = Replay(root, work, base).carry_out()
        uid = final.settings["USER"].split(":")[0]
        for user in (uid, "1000770000"):
            run_image(final, model, user)
    finally:
        remove(work)


if __name__ == "__main__":
    main()
