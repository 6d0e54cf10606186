"""A real redis-server as a child process on a loopback port. FAULT_REDIS_SERVER names the program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time


class Redis:
    """A context manager; ends by its process id."""

    def __init__(self, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._flags = flags
        self._folder = tempfile.TemporaryDirectory()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [os.environ["FAULT_REDIS_SERVER"], "--port", str(self.port), "--bind", "127.0.0.1",
             "--save", "", "--appendonly", "no", "--dir", self._folder.name, *self._flags],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            try:
                if self.command("PING") == b"PONG":
                    return
            except OSError:
                time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def command(self, *words: str | bytes) -> bytes | None:
        """The answer to one command: text, a number as text, or None. By hand: no client library."""
        parts = [w if isinstance(w, bytes) else w.encode() for w in words]
        message = b"*%d\r\n" % len(parts)
        message += b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            link.sendall(message)
            reader = link.makefile("rb")
            line = reader.readline().rstrip()
            if line[:1] == b"$":
                size = int(line[1:])
                return None if size < 0 else reader.read(size)
            return line[1:]

    def size(self) -> int:
        return int(self.command("DBSIZE"))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()
