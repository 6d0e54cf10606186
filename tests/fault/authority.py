"""A certificate authority for tests, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """A certificate authority in a folder, and what it signs."""

    EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def __init__(self, folder: str | Path, name: str = "ca") -> None:
        self.folder, self.name = Path(folder), name
        self.run("req", "-x509", *self.EC, "-days", "2", "-subj", f"/CN=test authority {name}",
                 "-keyout", f"{name}.key", "-out", f"{name}.pem")

    def run(self, *args: str) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, cwd=self.folder)

    def sign(self, name: str, subject: str, alternative: str = "") -> tuple[bytes, bytes]:
        """(key, certificate); also as files NAME.key and NAME.pem."""
        self.run("req", *self.EC, "-subj", subject, "-keyout", f"{name}.key",
                 "-out", f"{name}.csr")
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative}\n" if alternative else "")
        self.run("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self.name}.pem",
                 "-CAkey", f"{self.name}.key", "-CAcreateserial", "-days", "2",
                 "-extfile", extensions.name, "-out", f"{name}.pem")
        return self.path(f"{name}.key").read_bytes(), self.path(f"{name}.pem").read_bytes()

    def path(self, name: str) -> Path:
        return self.folder / name
