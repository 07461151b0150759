"""A malicious worker of the cluster: it knows the token, and sends arbitrary messages to another's data plane."""

from __future__ import annotations

import hmac
import secrets
import socket

from tests.conftest import TOKEN


class Member:
    """A connection to a worker's data port; a context manager.

    Args:
        address: `host:port` of the data plane.
        token: the cluster's.
    """

    def __init__(self, address: str, token: bytes = TOKEN):
        host, port = address.rsplit(":", 1)
        self.token = token
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.admitted = False

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, path: str, *fields: str) -> str:
        """Request `/v1/{path}` with header fields, after a proof of the token; return the header of the answer."""
        lines = [f"GET /v1/{path} HTTP/1.1", "Host: mission", *fields]
        if not self.admitted:
            own = secrets.token_bytes(16)
            nonce = f"Mission-Nonce: {own.hex()}"
            refusal = self._say([*lines, nonce])
            (challenge,) = [line for line in refusal.split("\r\n") if line.startswith("WWW-Authenticate")]
            message = b"mission-control client " + own + bytes.fromhex(challenge.split()[2]) + b" ranges "
            proof = hmac.new(self.token, message, "sha256").hexdigest()
            lines += [nonce, f"Authorization: Mission {proof}"]
            self.admitted = True
        return self._say(lines)

    def _say(self, lines: list[str]) -> str:
        self.socket.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = self.socket.recv(1)
            assert piece, f"it closed the connection after {head!r}"
            head += piece
        return head.decode()
