"""From a client's options to channel credentials, and the bearer token of each call."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import grpc

from sparsegdn_client.errors import PrefillError

_MAX_TOKEN_BYTES = 512
_TLS_SIGNS = ("SSL_ERROR", "andshake", "ertificate")


def read_token(path: str | Path) -> str:
    """The bearer token in a file, without white space around it. ValueError when it holds none."""
    with open(path, "rb") as file:
        token = file.read(_MAX_TOKEN_BYTES + 256).strip()
    if not 0 < len(token) <= _MAX_TOKEN_BYTES or any(not 0x21 <= c <= 0x7E for c in token):
        raise ValueError(f"{path}: wanted one token of 1 .. {_MAX_TOKEN_BYTES} printable characters")
    return token.decode("ascii")


def _is_loopback(item: str) -> bool:
    """Parsed, not by how it begins: 127.0.0.1.example.com is a name like any other."""
    host = item if item.endswith("]") else item.rpartition(":")[0] or item
    if host in ("localhost", "[::1]"):
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def check_token_may_travel(target: str, encrypted: bool, allowed: bool) -> None:
    """ValueError when a token would cross the network in clear text."""
    rest = target
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        rest = rest.removeprefix(scheme)
    # Of a list every server must be this machine's own.
    local = target.startswith("unix:") or all(map(_is_loopback, rest.split(",")))
    if not (encrypted or allowed or local):
        raise ValueError(f"a bearer token would travel in clear text to {target}: turn on TLS, or "
                         f"pass allow_plain_text_token=True")


def tls_credentials(
    ca: str | Path | None, cert: str | Path | None, key: str | Path | None
) -> grpc.ChannelCredentials:
    """Credentials from PEM files, read now; without `ca` the system's authorities count."""
    if (cert is None) != (key is None):
        raise ValueError("tls_cert and tls_key must be given together")

    def read(path: str | Path | None) -> bytes | None:
        return None if path is None else Path(path).read_bytes()

    return grpc.ssl_channel_credentials(read(ca), read(key), read(cert))


def explain_tls(error: PrefillError, uses_tls: bool) -> PrefillError:
    """UNAUTHENTICATED where gRPC says UNAVAILABLE because certificates were refused."""
    said = error.message
    # In TLS 1.3 a server looks at the client's certificate after the client's part is done: all that
    # the client sees of a refusal is a connection that closes before it was of any use.
    closed_at_once = "last error" in said and ("Socket closed" in said or "reset by peer" in said)
    refused = closed_at_once or any(sign in said for sign in _TLS_SIGNS)
    if not (uses_tls and error.code == "UNAVAILABLE" and refused):
        return error
    return PrefillError(
        "UNAUTHENTICATED",
        "the TLS handshake failed: one side does not accept the other's certificate, or has none: "
        + error.message,
        reason="TLS_HANDSHAKE",
    )
