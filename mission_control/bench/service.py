"""`mission bench service`: a control service, and how soon all of its members have an update (paper 001, 5.5)."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mission_control.environment import describe
from mission_control.service import serving

MEMBERS = (10, 100, 1000)
REST_S = 10.0
"""How long it is watched what is said while nothing changes."""
STARTS_S = 30.0
HERE_S = 1.5
"""A member says so often that it is there, as `HERE_EVERY` of core."""


class Member(asyncio.Protocol):
    """A cluster's session, as small as it can be: counts updates, and says that it is there."""

    def __init__(self, name: str, token: str):
        self.name, self.token = name, token
        self.rest = b""
        self.words = 0
        self.version = 0
        self.welcomed = asyncio.get_running_loop().create_future()
        self.updated: asyncio.Future[float] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        head = "GET /v1/session HTTP/1.1\r\nUpgrade: mission-control\r\n"
        transport.write(f"{head}Authorization: Bearer {self.token}\r\n\r\n".encode())
        self.began = time.perf_counter()
        # One host for two members, as where clusters share hosts.
        hosts = [f"host-{int(self.name) // 2}"]
        hello = {"protocol": 1, "cluster": self.name, "incarnation": 1, "jobs": [], "hosts": hosts, "transfers": []}
        self.say({"say": "hello", **hello})

    def say(self, message: dict[str, Any]) -> None:
        self.words += 1
        self.transport.write(json.dumps(message).encode() + b"\n")

    def here(self) -> None:
        self.say({"say": "here", "version": self.version, "words": self.words + 1})

    def data_received(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"{"):
                continue
            said = json.loads(line)
            if said["say"] == "welcome":
                self.version = said["version"]
                self.welcomed.set_result(time.perf_counter() - self.began)
            elif said["say"] == "update":
                self.version = said["version"]
                if self.updated is not None and not self.updated.done():
                    self.updated.set_result(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        for waiting in (self.welcomed, self.updated):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ConnectionError(f"member {self.name} lost its session"))


def measure(rounds: int = 20, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure members of each number, with each store that there is.

    Returns:
        ``rows``: store, members, update_ms (median, until all have it), spread, join_ms (median of a member's),
        rest_bytes_per_second (of a member, both ways, with all headers), rest_cpu (of the service, part of a core).
    """
    rows = []
    for store, opened in stores().items():
        for members in MEMBERS:
            say(f"{store}, {members} members")
            with opened() as address, tempfile.TemporaryDirectory(prefix="mission-bench-") as folder:
                rows.append({"store": store, **asyncio.run(one(address, members, rounds, Path(folder)))})
    return {"rows": rows, "environment": describe()}


def stores() -> dict[str, Callable[[], Any]]:
    """A way to have each store, by name."""
    found: dict[str, Callable[[], Any]] = {"file": in_file}
    if shutil.which("etcd"):
        found |= {"etcd, one member": lambda: in_etcd(1), "etcd, three members": lambda: in_etcd(3)}
    return found


@contextmanager
def in_file() -> Iterator[str | None]:
    yield None


@contextmanager
def in_etcd(members: int) -> Iterator[str]:
    """Members of etcd on loopback, with their disks on this machine's."""
    ports = free_ports(2 * members)
    clients = [f"127.0.0.1:{port}" for port in ports[:members]]
    peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
    whole = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mission-etcd-")))
        for number, (client, peer) in enumerate(zip(clients, peers, strict=True)):
            command = [
                "etcd",
                "--name",
                f"m{number}",
                "--data-dir",
                str(folder / f"m{number}"),
                "--initial-cluster",
                whole,
            ]
            command += ["--listen-client-urls", f"http://{client}", "--advertise-client-urls", f"http://{client}"]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--logger", "zap"]
            process = subprocess.Popen(
                [*command, "--log-level", "error"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield f"etcd://{','.join(clients)}"


SERVE = """
import signal, sys
from mission_control import _native
service = _native.Service(sys.argv[1])
print(service.port, flush=True)
signal.pause()
"""


async def one(store: str | None, members: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Members of one service."""
    tokens = serving.tokens_in(folder)
    settings: dict[str, Any] = {
        "name": "bench",
        "listen": "127.0.0.1:0",
        "address": "http://127.0.0.1:1",
        "policy": "fair",
    }
    settings |= {"tokens": tokens, "store": store or str(folder / "store")}
    serve = subprocess.Popen([sys.executable, "-c", SERVE, json.dumps(settings)], stdout=subprocess.PIPE, text=True)
    try:
        assert serve.stdout is not None
        port = int(serve.stdout.readline())
        await leads(port)
        loop = asyncio.get_running_loop()
        joined: list[Member] = []
        for number in range(members):
            made = partial(Member, str(number), tokens["cluster"])
            _, member = await loop.create_connection(made, "127.0.0.1", port)
            joined.append(member)
        joins = await asyncio.wait_for(asyncio.gather(*(member.welcomed for member in joined)), STARTS_S)
        took = []
        for number in range(rounds):
            for member in joined:
                member.updated = loop.create_future()
            began = time.perf_counter()
            policy = {"ask": "policy", "policy": "fifo" if number % 2 == 0 else "fair"}
            status, _ = await ask(port, tokens["operator"], policy)
            assert status == 200, status
            arrived = await asyncio.wait_for(
                asyncio.gather(*(member.updated for member in joined if member.updated is not None)), STARTS_S
            )
            took.append(max(arrived) - began)
        at_rest = await rest(joined, psutil.Process(serve.pid))
        for member in joined:
            member.transport.close()
        return {
            "members": members,
            "update_ms": statistics.median(took) * 1e3,
            "spread": [min(took) * 1e3, max(took) * 1e3],
            "join_ms": statistics.median(joins) * 1e3,
            **at_rest,
        }
    finally:
        serve.kill()
        serve.wait()


async def rest(joined: list[Member], process: psutil.Process) -> dict[str, Any]:
    """What is said while nothing changes: each member says every 1.5 s that it is there, and is answered."""
    before, cpu = psutil.net_io_counters(pernic=True)["lo"].bytes_sent, sum(process.cpu_times()[:2])
    end = time.perf_counter() + REST_S
    while time.perf_counter() < end:
        began = time.perf_counter()
        for number, member in enumerate(joined):
            member.here()
            if number % 50 == 49:
                await asyncio.sleep(0)
        await asyncio.sleep(max(0.0, HERE_S - (time.perf_counter() - began)))
    # Loopback counts each packet once as sent; both ways, headers included.
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    return {
        "rest_bytes_per_second": sent / REST_S / len(joined),
        "rest_cpu": (sum(process.cpu_times()[:2]) - cpu) / REST_S,
    }


async def leads(port: int) -> None:
    end = time.perf_counter() + STARTS_S
    while time.perf_counter() < end:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            answer = await reader.readuntil(b"\r\n\r\n") + await reader.read(8)
            writer.close()
            if answer.endswith(b"leader"):
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise TimeoutError(f"nobody leads after {STARTS_S} s")


async def ask(port: int, token: str, asked: dict[str, Any]) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(asked)
    head = f"POST /v1/ask HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(f"{head}{body}".encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return int(answer.split()[1]), answer


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for own in sockets:
            own.bind(("127.0.0.1", 0))
        return [own.getsockname()[1] for own in sockets]


def table(result: dict[str, Any]) -> str:
    """The rows for people."""
    lines = ["store                members  update, ms  (least to most)    join, ms  bytes/s at rest  core at rest"]
    for row in result["rows"]:
        least, most = row["spread"]
        lines.append(
            f"{row['store']:<20} {row['members']:>7}  {row['update_ms']:>10.1f}  ({least:.1f} to {most:.1f})".ljust(60)
            + f"{row['join_ms']:>8.0f}  {row['rest_bytes_per_second']:>15.0f}  {row['rest_cpu']:>12.3f}"
        )
    return "\n".join(lines)
