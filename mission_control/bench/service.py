"""`mission bench service`: a control service, and how soon all of its members have an update (paper 001, 5.5)."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from mission_control.environment import describe
from mission_control.service import serving

MEMBERS = (10, 100, 1000)
REST_S = 10.0
"""How long it is watched what is said while nothing changes."""
STARTS_S = 60.0
HERE_S = 1.5
"""A member says so often that it is there, as `HERE_EVERY` of core."""
TRY_S = 0.25
"""A member whose session is over tries the next replica after this time, as `TRY_EVERY` of core."""
REPORTERS = (1, 10, 100, 1000)
TRANSFERS = 1000
CHANGES = 5
"""Leaders that are killed with each number of members."""
MEMORY = Path("/dev/shm")
JOB = {
    "user": None,
    "class": None,
    "priority": 1.0,
    "deadline_secs": None,
    "age_secs": 0.0,
    "arrival": 0,
    "job": "",
}
"""Of a job, as a policy sees it."""
CARRIED = {
    "flows": 8,
    "transport": "tcp",
    "reason": "nothing else was demanded",
    "negotiated": [],
    "fallbacks": [],
}


class Member(asyncio.Protocol):
    """A cluster's session, as small as it can be: counts updates, says that it is there, reports, and comes back."""

    def __init__(self, name: str, token: str, ports: tuple[int, ...], transfers: int = 0):
        self.name, self.token, self.ports = name, token, ports
        self.transfers = transfers
        self.tries = 0
        self.connected: asyncio.Transport | None = None
        self.over = False
        self.welcomed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.updated: asyncio.Future[float] | None = None

    async def connect(self) -> None:
        """Try the replicas in turn until one lets it in."""
        while not self.over:
            port = self.ports[self.tries % len(self.ports)]
            self.tries += 1
            try:
                await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", port)
                return
            except OSError:
                await asyncio.sleep(TRY_S)

    def connection_made(self, transport: Any) -> None:
        self.connected = transport
        self.rest, self.words, self.version = b"", 0, 0
        head = "GET /v1/session HTTP/1.1\r\nUpgrade: mission-control\r\n"
        transport.write(f"{head}Authorization: Bearer {self.token}\r\n\r\n".encode())
        self.began = time.perf_counter()
        # One host for two members, as where clusters share hosts.
        hosts = [f"host-{int(self.name) // 2}"]
        self.say(
            {
                "say": "hello",
                "protocol": 1,
                "cluster": self.name,
                "incarnation": 1,
                "jobs": [{"job": name} for name in sorted({view["transfer"]["job"] for view in self.views(0)})],
                "hosts": hosts,
                "transfers": self.views(0),
                "carried": [[view["transfer"], CARRIED] for view in self.views(0)],
            }
        )

    def views(self, second: int) -> list[dict[str, Any]]:
        """Return its transfers as they are after so many seconds: ten of each job, each faster than the one before."""
        return [
            {
                "transfer": {"job": f"job-{number // 10}", "from": f"read-{number}", "to": f"sum-{number}"},
                "job": JOB | {"job": f"job-{number // 10}", "arrival": number // 10, "age_secs": float(second)},
                "arrival": number,
                "pattern": "shuffle" if number % 3 else "gather",
                "evidence": "each of 12 tasks takes its own part of 12 objects",
                "machines": 4,
                "asked_bytes": 1 << 32,
                "served_bytes": min(1 << 32, second * (1 << 20) * (1 + number % 50)),
                "to_receive": {},
                "to_send": {},
                "bytes_per_sec": float((1 << 20) * (1 + (number + second) % 50)),
                "age_secs": float(second),
            }
            for number in range(self.transfers)
        ]

    def report(self, second: int) -> None:
        """Say that all transfers have moved."""
        self.say({"say": "transfers", "changed": self.views(second), "ended": []})

    def say(self, message: dict[str, Any]) -> None:
        if self.connected is not None:
            self.words += 1
            self.connected.write(json.dumps(message).encode() + b"\n")

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
                if not self.welcomed.done():
                    self.welcomed.set_result(time.perf_counter() - self.began)
            elif said["say"] == "update":
                self.version = said["version"]
                if self.updated is not None and not self.updated.done():
                    self.updated.set_result(time.perf_counter())
            elif said["say"] == "moved":
                assert self.connected is not None
                self.connected.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connected = None
        if self.over:
            return
        loop = asyncio.get_running_loop()
        self.again = loop.call_later(TRY_S, lambda: loop.create_task(self.connect()))

    def close(self) -> None:
        """Leave, for good."""
        self.over = True
        if self.connected is not None:
            self.connected.close()


def measure(
    rounds: int = 20, members: tuple[int, ...] = MEMBERS, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure members of each number, with each store that there is.

    Returns:
        ``rows``: store, members, update_ms (median, until all have it), spread, join_ms (median of members that join
        together), late_ms (of one more, with all others there), rest_bytes_per_second (of a member, both ways, with all
        headers), rest_cpu (of the service, part of a core).
        ``reports``: 1,000 transfers that all move each second, reported by 1 to 1,000 members: bytes_per_second, cpu.
        ``changes``: seconds from kill -9 of the leader until the next one leads, and all members have its welcome.
    """
    rows, reports, changes = [], [], []
    for store, opened in stores().items():
        for count in members:
            say(f"{store}, {count} members")
            with opened() as address, serving_processes(address, 1) as own:
                rows.append({"store": store, **asyncio.run(updates(own, count, rounds))})
        if store.startswith("etcd, three"):
            for count in members:
                say(f"{store}, {count} members, the leader is killed")
                took = []
                for _ in range(CHANGES):
                    with opened() as address, serving_processes(address, 2) as own:
                        took.append(asyncio.run(leader_change(own, count)))
                changes.append({"store": store, "members": count, "seconds": took})
    for count in REPORTERS:
        say(f"{TRANSFERS} active transfers of {count} members")
        with serving_processes(None, 1) as own:
            reports.append(asyncio.run(reporting(own, count, TRANSFERS // count)))
    return {"rows": rows, "reports": reports, "changes": changes, "environment": describe()}


def stores() -> dict[str, Callable[[], Any]]:
    """A way to have each store, by name. What lies in memory is not there any more after the machine stops."""
    found: dict[str, Callable[[], Any]] = {"file": in_file}
    if MEMORY.is_dir():
        found["file in memory"] = lambda: in_file(MEMORY)
    if shutil.which("etcd"):
        found |= {"etcd, one member": lambda: in_etcd(1), "etcd, three members": lambda: in_etcd(3)}
        if MEMORY.is_dir():
            found["etcd, three in memory"] = lambda: in_etcd(3, MEMORY)
    return found


@contextmanager
def in_file(parent: Path | None = None) -> Iterator[str]:
    """A folder, by default on this machine's disk."""
    with tempfile.TemporaryDirectory(prefix="mission-bench-", dir=parent) as folder:
        yield str(Path(folder) / "store")


@contextmanager
def in_etcd(members: int, parent: Path | None = None) -> Iterator[str]:
    """Members of etcd on loopback, by default with their disks on this machine's."""
    ports = free_ports(2 * members)
    clients = [f"127.0.0.1:{port}" for port in ports[:members]]
    peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
    whole = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mission-etcd-", dir=parent)))
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


class Serving:
    """Replicas of one service, each a process."""

    def __init__(self, tokens: dict[str, str], processes: list[subprocess.Popen[str]], ports: tuple[int, ...]):
        self.tokens, self.processes, self.ports = tokens, processes, ports


@contextmanager
def serving_processes(store: str | None, replicas: int) -> Iterator[Serving]:
    """So many replicas; without a store a file that is theirs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mission-bench-")))
        tokens = serving.tokens_in(folder)
        processes = []
        for port in (listens := free_ports(replicas)):
            settings = {
                "name": "bench",
                "listen": f"127.0.0.1:{port}",
                "address": f"http://127.0.0.1:{port}",
                "policy": "fair",
                "tokens": tokens,
                "store": store or str(folder / "store"),
            }
            command = [sys.executable, "-c", SERVE, json.dumps(settings)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline(), "a replica does not start"
            processes.append(process)
        yield Serving(tokens, processes, tuple(listens))


async def join(own: Serving, members: int, transfers: int = 0) -> tuple[list[Member], list[float]]:
    """Have members join; return them, and the seconds from a connection to its welcome."""
    await leader(own.ports)
    joined = [Member(str(number), own.tokens["cluster"], own.ports, transfers) for number in range(members)]
    for member in joined:
        await member.connect()
    return joined, list(await asyncio.wait_for(asyncio.gather(*(member.welcomed for member in joined)), STARTS_S))


async def updates(own: Serving, members: int, rounds: int) -> dict[str, Any]:
    """Time updates that all members have to have, and one more member; then watch what is said at rest."""
    joined, joins = await join(own, members)
    loop = asyncio.get_running_loop()
    took = []
    for number in range(rounds):
        for member in joined:
            member.updated = loop.create_future()
        began = time.perf_counter()
        policy = {"ask": "policy", "policy": "fifo" if number % 2 == 0 else "fair"}
        status, _ = await ask(own.ports[0], own.tokens["operator"], policy)
        assert status == 200, status
        waits = (member.updated for member in joined if member.updated is not None)
        arrived = await asyncio.wait_for(asyncio.gather(*waits), STARTS_S)
        took.append(max(arrived) - began)
    late = Member(str(members), own.tokens["cluster"], own.ports)
    await late.connect()
    late_s = await asyncio.wait_for(late.welcomed, STARTS_S)
    at_rest = await rest(joined, psutil.Process(own.processes[0].pid))
    for member in [*joined, late]:
        member.close()
    return {
        "members": members,
        "update_ms": statistics.median(took) * 1e3,
        "spread": [min(took) * 1e3, max(took) * 1e3],
        "join_ms": statistics.median(joins) * 1e3,
        "late_ms": late_s * 1e3,
        **at_rest,
    }


async def leader_change(own: Serving, members: int) -> list[float]:
    """Kill the leader; return the seconds until another leads, and until all members have its welcome."""
    joined, _ = await join(own, members)
    first = await leader(own.ports)
    for member in joined:
        member.welcomed = asyncio.get_running_loop().create_future()
    began = time.perf_counter()
    own.processes[own.ports.index(first)].kill()
    others = tuple(port for port in own.ports if port != first)
    await leader(others)
    leads = time.perf_counter() - began
    await asyncio.wait_for(asyncio.gather(*(member.welcomed for member in joined)), STARTS_S)
    everybody = time.perf_counter() - began
    for member in joined:
        member.close()
    return [leads, everybody]


async def reporting(own: Serving, members: int, transfers: int) -> dict[str, Any]:
    """All transfers of all members move, and are reported, once a second."""
    joined, _ = await join(own, members, transfers)
    await watched(joined, psutil.Process(own.processes[0].pid), 1.0, lambda member, second: member.report(second), 3.0)
    found = await watched(
        joined, psutil.Process(own.processes[0].pid), 1.0, lambda member, second: member.report(second + 3), REST_S
    )
    for member in joined:
        member.close()
    return {"members": members, "transfers": members * transfers, **found}


async def rest(joined: list[Member], process: psutil.Process) -> dict[str, Any]:
    """What is said while nothing changes: each member says every 1.5 s that it is there, and is answered."""
    found = await watched(joined, process, HERE_S, lambda member, _: member.here(), REST_S)
    return {"rest_bytes_per_second": found["bytes_per_second"] / len(joined), "rest_cpu": found["cpu"]}


async def watched(
    joined: list[Member],
    process: psutil.Process,
    every: float,
    says: Callable[[Member, int], None],
    seconds: float,
) -> dict[str, float]:
    """Have all members say something every so many seconds; return bytes of all per second, and the service's cores."""
    before, cpu = psutil.net_io_counters(pernic=True)["lo"].bytes_sent, sum(process.cpu_times()[:2])
    began = time.perf_counter()
    turn = 0
    while time.perf_counter() < began + seconds:
        turn += 1
        for number, member in enumerate(joined):
            says(member, turn)
            if number % 50 == 49:
                await asyncio.sleep(0)
        await asyncio.sleep(max(0.0, began + turn * every - time.perf_counter()))
    took = time.perf_counter() - began
    # Loopback counts each packet once as sent; both ways, headers included.
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    return {"bytes_per_second": sent / took, "cpu": (sum(process.cpu_times()[:2]) - cpu) / took}


async def leader(ports: tuple[int, ...]) -> int:
    """Return the port of the replica that leads, once one does."""
    end = time.perf_counter() + STARTS_S
    while time.perf_counter() < end:
        for port in ports:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                answer = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
                writer.close()
                if answer == b"leader":
                    return port
            except (OSError, asyncio.IncompleteReadError):
                continue
        await asyncio.sleep(0.02)
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
    """Ports of loopback that nobody has now, below those that the kernel gives to connections meanwhile."""
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(min(10_000, first_of_kernel // 2), first_of_kernel))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    with ExitStack() as stack:
        for port in candidates:
            if len(found) == count:
                break
            own = stack.enter_context(socket.socket())
            with suppress(OSError):
                own.bind(("127.0.0.1", port))
                found.append(port)
    return found


def table(result: dict[str, Any]) -> str:
    """The rows for people."""
    lines = [
        "store                  members  update, ms  (least to most)  join, ms  one more, ms  "
        "bytes/s at rest  core at rest"
    ]
    for row in result["rows"]:
        least, most = row["spread"]
        lines.append(
            f"{row['store']:<22} {row['members']:>7}  {row['update_ms']:>10.1f}  "
            + f"({least:.1f} to {most:.1f})".ljust(17)
            + f"{row['join_ms']:>8.0f}  {row['late_ms']:>12.1f}  {row['rest_bytes_per_second']:>15.0f}  "
            + f"{row['rest_cpu']:>12.3f}"
        )
    for change in result["changes"]:
        leads, everybody = (statistics.median(own) for own in zip(*change["seconds"], strict=True))
        most = max(own[1] for own in change["seconds"])
        lines.append(
            f"leader killed, {change['store']}, {change['members']} members: another leads after {leads:.2f} s, "
            f"all have its welcome after {everybody:.2f} s (at most {most:.2f})"
        )
    for row in result["reports"]:
        lines.append(
            f"{row['transfers']} transfers that move, reported each second by {row['members']} members: "
            f"{row['bytes_per_second'] / 1e3:.0f} kB/s, {row['cpu']:.3f} of a core"
        )
    return "\n".join(lines)
