"""A cluster's connection to its control service: carries lines between the two, and decides nothing.

Core (`crates/core`, `service/follower.rs`) decides when to connect, to which replica, and what to send; it gets the
received lines. Reading and writing block, so they have separate threads.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import queue
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mission_control.errors import BadInput

logger = logging.getLogger(__name__)

SERVICE, TOKEN, TOKEN_FILE = "MISSION_SERVICE", "MISSION_SERVICE_TOKEN", "MISSION_SERVICE_TOKEN_FILE"
CA, CLUSTER, INSECURE = "MISSION_SERVICE_CA", "MISSION_CLUSTER", "MISSION_SERVICE_INSECURE"
"""Variables in a scheduler's environment that describe the service to join."""
TICK_S = 0.25
"""Interval of ticks for core in seconds: as long as its pause before it tries another replica."""
CONNECT_S = 2.0
"""Timeout of connecting in seconds; core uses the same."""
BACKLOG_MAX = 10_000
"""Most lines that wait to be written; with more the service does not read, and the connection is closed."""
HEAD_MAX = 16 << 10


def check_address(address: str, environment: Mapping[str, str]) -> None:
    """
    Raises:
        BadInput: The value is no address of a service, or would send a token in clear text.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or parts.scheme not in ("http", "https"):
        raise BadInput(f"{address!r} is no address of a service: use https://HOST:PORT, several with commas")
    if parts.scheme == "http" and not is_loopback(host) and environment.get(INSECURE) != "1":
        raise BadInput(
            f"{address} would show the token to the network: use https:// (mission serve --certificate), or set "
            f"{INSECURE}=1 where nobody else is on it"
        )


def is_loopback(host: str) -> bool:
    """Whether connections to this address stay on this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path) -> str:
    """
    Raises:
        BadInput: The path is no file with a token.
    """
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise BadInput(f"token file {path} cannot be read ({error.strerror}); name another file") from None
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput(f"{path} has no token: it is one line, as in operator.token of the service")
    return token


@dataclass(frozen=True)
class Service:
    """The address of the service, and the cluster's credentials."""

    addresses: tuple[str, ...]
    token: str
    cluster: str
    ca: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str], own_address: str) -> Service | None:
        """Read the settings from the environment; ``None``: there is no service.

        Args:
            environment: Environment variables of the process.
            own_address: Address of the scheduler; the default name of the cluster.

        Raises:
            BadInput: An address is invalid, or there is no token.
        """
        addresses = tuple(word.strip().rstrip("/") for word in environment.get(SERVICE, "").split(",") if word.strip())
        if not addresses:
            return None
        for address in addresses:
            check_address(address, environment)
        token = environment.get(TOKEN, "").strip()
        if not token and (path := environment.get(TOKEN_FILE)):
            token = read_token(Path(path))
        if not token.isascii() or not token.isprintable() or " " in token:
            raise BadInput(f"{TOKEN} is no token: it has what cannot be sent")
        if not token:
            raise BadInput(f"{SERVICE} is set, and no token: set {TOKEN_FILE} to the file cluster.token of the service")
        cluster = environment.get(CLUSTER) or own_address.partition("://")[2] or own_address
        return cls(addresses, token, cluster, environment.get(CA))


class Membership:
    """The connection of one cluster.

    Args:
        service: Its address and credentials.
        hear: Takes events for core (`Event::Service`), as JSON; called in the scheduler's thread.
        soon: Schedules a call in the scheduler's thread; may be called in any thread.
    """

    def __init__(self, service: Service, hear: Callable[[str], None], soon: Callable[[Callable[[], Any]], None]):
        self.service, self.hear, self.soon = service, hear, soon
        self.link: Link | None = None
        self.closed = threading.Event()
        threading.Thread(target=self._tick, name="mission-service-tick", daemon=True).start()

    def follow(self) -> dict[str, Any]:
        """Return the event by which core begins to follow the service."""
        return {
            "cluster": self.service.cluster,
            "incarnation": secrets.randbits(53),
            "addresses": list(self.service.addresses),
        }

    def do(self, command: dict[str, Any]) -> None:
        """Carry out a command of core; in the scheduler's thread."""
        match command["command"]:
            case "connect":
                self._drop()
                self.link = Link(self, command["address"])
            case "disconnect":
                self._drop()
            case "send" if self.link is not None:
                self.link.send(command["message"])

    def close(self) -> None:
        """End the connection, and pass no more events."""
        self.closed.set()
        self._drop()

    def heard(self, link: Link, event: str) -> None:
        """Pass on an event of a link, unless another link has replaced it; in any thread."""
        self.soon(lambda: self.hear(event) if link is self.link and not self.closed.is_set() else None)

    def _drop(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def _tick(self) -> None:
        while not self.closed.wait(TICK_S):
            self.soon(lambda: self.hear('{"event":"tick"}') if not self.closed.is_set() else None)


class Link:
    """One connection to one replica."""

    def __init__(self, membership: Membership, address: str):
        self.membership, self.address = membership, address
        self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.stream: socket.socket | None = None
        self.over = False
        threading.Thread(target=self._read, name="mission-service-read", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message to be sent in order."""
        if self.lines.qsize() >= BACKLOG_MAX:
            self.close()
        self.lines.put(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """End the link; may be called in any thread."""
        self.over = True
        self.lines.put(None)
        if (stream := self.stream) is not None:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        why = "the service closed the connection"
        try:
            self.stream = stream = self._connect()
            if self.over:
                raise OSError("given up")
            with stream, stream.makefile("rb") as lines:
                self._begin(stream, lines)
                threading.Thread(target=self._write, args=(stream,), name="mission-service-write", daemon=True).start()
                self.membership.heard(self, '{"event":"connected"}')
                for line in lines:
                    self.membership.heard(self, f'{{"event":"heard","message":{line.decode()}}}')
        except (OSError, UnicodeDecodeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}" if not str(error) else str(error)
        self.close()
        self.membership.heard(self, json.dumps({"event": "disconnected", "why": why}))

    def _connect(self) -> socket.socket:
        parts = urlsplit(self.address)
        assert parts.hostname is not None and parts.port is not None
        plain = socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if parts.scheme == "http":
            return plain
        context = ssl.create_default_context(cafile=self.membership.service.ca)
        try:
            return context.wrap_socket(plain, server_hostname=parts.hostname)
        except BaseException:
            plain.close()
            raise

    def _begin(self, stream: socket.socket, lines: Any) -> None:
        """
        Raises:
            ValueError: The other end is no service, or does not accept the token.
        """
        token, host = self.membership.service.token, urlsplit(self.address).netloc
        stream.sendall(
            f"GET /v1/session HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
            "Connection: Upgrade\r\nUpgrade: mission-control\r\n\r\n".encode()
        )
        status = lines.readline(HEAD_MAX).decode(errors="replace").strip()
        length = 0
        while (line := lines.readline(HEAD_MAX).strip()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        if not status.startswith("HTTP/1.1 101"):
            said = lines.read(min(length, HEAD_MAX)).decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(said)["error"]
            raise ValueError(f"{status.partition(' ')[2]}: {said}")
        # From now on core checks whether the other end is alive.
        stream.settimeout(None)

    def _write(self, stream: socket.socket) -> None:
        with suppress(OSError):
            while (line := self.lines.get()) is not None:
                stream.sendall(line)
        self.close_once()

    def close_once(self) -> None:
        """Shut the socket down, unless it has ended."""
        if not self.over:
            self.close()
