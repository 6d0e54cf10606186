"""Adds the generated messages to the package: see "Installing" in README.md."""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROTO = Path(__file__).resolve().parents[2] / "proto"
FILES = ["sparsegdn/v1/prefill.proto", "sparsegdn/rpc/status.proto"]


class BuildWithStubs(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return  # run against build/<preset>/python on PYTHONPATH instead
        protoc = shutil.which("protoc")
        if protoc is None:
            raise SystemExit("protoc was not found: apt install protobuf-compiler")
        if not (PROTO / FILES[0]).exists():
            raise SystemExit(f"{PROTO / FILES[0]} was not found: install from a whole checkout")
        out = Path(self.build_lib).resolve()
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([protoc, f"-I{PROTO}", f"--python_out={out}", *FILES], check=True, cwd=PROTO)


setup(cmdclass={"build_py": BuildWithStubs})
