"""Half-sent gRPC calls over plain HTTP/2: what a peer does that no gRPC library would do."""

from __future__ import annotations

import select
import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_HEADERS, ACK = 4, 1
MAX_FRAME = 16384


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing and without Huffman coding."""
    assert len(name) < 127 and len(value) < 127
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class Connection:
    """Opens calls whose message never ends, and sends what the peer's windows allow."""

    def __init__(self, port: int, method: str, message_bytes: int, calls: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.open = True
        self.cancelled = 0
        self._initial = self._window = 65535
        self._in = b""
        self._out = bytearray(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(SETTINGS, 0, 0, b""))
        headers = b"".join(literal(k.encode(), v.encode()) for k, v in {
            ":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost",
            "content-type": "application/grpc", "te": "trailers"}.items())
        self._left: dict[int, int] = {}
        self._windows: dict[int, int] = {}
        for stream in range(1, 2 * calls, 2):
            self._out += self._frame(HEADERS, END_HEADERS, stream, headers)
            # The prefix promises one byte more than ever comes.
            self._out += self._frame(DATA, 0, stream, b"\0" + struct.pack(">I", message_bytes))
            self._left[stream] = message_bytes - 1
            self._windows[stream] = self._initial - 5
            self._window -= 5
        self.socket.setblocking(False)

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + \
            struct.pack(">I", stream) + payload

    def fileno(self) -> int:
        return self.socket.fileno()

    def wants_to_write(self) -> bool:
        self._fill()
        return bool(self._out)

    def _fill(self) -> None:
        for stream, left in self._left.items():
            while len(self._out) < 1 << 18:
                n = min(left, MAX_FRAME, self._window, self._windows[stream])
                if n <= 0:
                    break
                self._out += self._frame(DATA, 0, stream, b"\x2a" * n)
                left -= n
                self._left[stream] = left
                self._window -= n
                self._windows[stream] -= n

    def write(self) -> None:
        try:
            del self._out[:self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def read(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return self.close()
        self._in += data
        while len(self._in) >= 9:
            size = int.from_bytes(self._in[:3], "big")
            if len(self._in) < 9 + size:
                break
            kind, flags = self._in[3], self._in[4]
            stream = int.from_bytes(self._in[5:9], "big") & 0x7fffffff
            self._take(kind, flags, stream, self._in[9:9 + size])
            self._in = self._in[9 + size:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at:at + 6])
                if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                    for open_stream in self._windows:
                        self._windows[open_stream] += value - self._initial
                    self._initial = value
            self._out += self._frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self._out += self._frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            grant = int.from_bytes(payload, "big") & 0x7fffffff
            if stream == 0:
                self._window += grant
            elif stream in self._windows:
                self._windows[stream] += grant
        elif kind in (RST_STREAM, HEADERS) and self._left.pop(stream, None) is not None:
            self.cancelled += 1

    def close(self) -> None:
        self.open = False
        self.socket.close()


def pump(connections: list[Connection], seconds: float) -> None:
    """Sends and reads on all of them until nothing moves for so long."""
    while live := [c for c in connections if c.open]:
        writers = [c for c in live if c.wants_to_write()]
        readable, writable, _ = select.select(live, writers, [], seconds)
        if not readable and not writable:
            return
        for connection in readable:
            connection.read()
        for connection in writable:
            if connection.open:
                connection.write()
