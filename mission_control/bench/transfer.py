"""`mission bench transfer`: how fast one object crosses loopback, by Mission Control and by others, in one run.

Every contender has a sender and a receiver in processes of its own; two of them are workers of a Dask cluster. A round
asks each of them once per kind of object, in turn, so that what disturbs the machine disturbs all. Objects arrive
whole, into memory that is kept or fresh.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mission_control import _native
from mission_control.environment import describe
from mission_control.scenario import PrerequisiteMissing

OBJECTS = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
FLOWS = (1, 4)
TRANSPORTS = ("tcp", "mptcp", "tls", "shm")
ROUNDS = 5
BATCH_BYTES = 1 << 30
"""Small objects are fetched many times in a sample, so that a sample lasts long enough to be timed."""
BATCH_MAX = 1000
TOKEN = b"mission bench transfer"
TOUCHED = "Mission Control, pages read"
"""Shared memory costs nothing until it is read: this contender reads a byte of each page."""
MISSION_WORKERS = "Mission Control workers"
DASK_WORKERS = "Dask workers"
WORKERS_MAX = 1 << 20
WORKERS_BATCH_MAX = 400
"""All objects of a sample between workers are inputs of one task, and lie in its memory at once."""
FLOWS_PER_HOST = _native.FLOWS_PER_HOST


@dataclass
class Contender:
    """What is measured: seconds of a batch of fetches of one size."""

    what: str
    transport: str
    flows: int
    sizes: tuple[int, ...]
    fetch: Callable[[int, int], float]
    """Given bytes and number of fetches: seconds of all."""
    pids: Callable[[], list[int]]
    """Processes whose CPU time counts."""
    batch_max: int = BATCH_MAX
    samples: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self, size: int) -> None:
        count = max(1, min(self.batch_max, BATCH_BYTES // size))
        before = _cpu(self.pids())
        seconds = self.fetch(size, count)
        moved = size * count
        cpu = (_cpu(self.pids()) - before) / (moved / 2**30)
        self.samples.setdefault(size, []).append((moved / 2**20 / seconds, cpu))


@dataclass(frozen=True)
class Setting:
    """What is measured, of all contenders alike."""

    congestion: str
    objects: tuple[int, ...]
    transports: tuple[str, ...]
    say: Callable[[str], None]


def measure(
    rounds: int = ROUNDS,
    objects: tuple[int, ...] = OBJECTS,
    transports: tuple[str, ...] = TRANSPORTS,
    workers: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures all contenders, or those of some transports.

    Args:
        rounds: samples of each.
        objects: sizes in bytes, some of `OBJECTS`.
        transports: some of `TRANSPORTS`.
        workers: also between workers of Dask clusters.
        say: takes a line of progress.

    Returns:
        ``rows``: what, transport, flows, object_bytes, mib_per_s (median), cpu_s_per_gib (median; both ends), spread
        (smallest and largest rate); ``ratios``: by name; ``environment``, ``congestion_control``, ``iperf3``;
        ``interrupted``: somebody stopped it, and this is what was measured until then.

    Raises:
        PrerequisiteMissing: there is no C compiler.
    """
    congestion = "cubic" if "cubic" in _allowed() or os.geteuid() == 0 else "reno"
    setting = Setting(congestion, objects, transports, say)
    contenders: list[Contender] = []
    interrupted = False
    # One group after the other, since idle Dask workers are not quite idle; within a group in turn.
    try:
        for group in (_processes, _clusters) if workers else (_processes,):
            with ExitStack() as stack:
                own_group = list(group(stack, setting))
                contenders += own_group
                for number in range(rounds):
                    say(f"round {number + 1} of {rounds}")
                    for size in objects:
                        for entry in own_group:
                            if size in entry.sizes:
                                entry.sample(size)
    except KeyboardInterrupt:
        interrupted = True
    rows = [_row(contender, size) for contender in contenders for size in contender.samples]
    return {
        "rows": rows,
        "ratios": ratios(rows),
        "congestion_control": congestion,
        "iperf3": _iperf3_version(),
        "rounds": rounds,
        "interrupted": interrupted,
        "environment": describe(),
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The comparisons that matter, each of two medians of this run."""
    rate = {(row["what"], row["transport"], row["flows"], row["object_bytes"]): row["mib_per_s"] for row in rows}
    pairs = {}
    for size in OBJECTS:
        name = _native.format_bytes(size).replace(".0 ", " ")
        for flows in FLOWS:
            ours = ("Mission Control", "tcp", flows, size)
            pairs[f"tcp fetch / C receiver, reused memory, {flows} flows, {name}"] = (
                ours,
                ("C receiver, reused", "tcp", flows, size),
            )
            pairs[f"tcp fetch / C receiver that reads what arrived, {flows} flows, {name}"] = (
                ours,
                ("C receiver, read", "tcp", flows, size),
            )
            ours = ("Mission Control", "tls", flows, size)
            pairs[f"tls fetch / rustls loop, {flows} flows, {name}"] = (ours, ("rustls loop", "tls", flows, size))
        ours, theirs = ("Mission Control", "mptcp", 1, size), ("C receiver, reused", "mptcp", 1, size)
        pairs[f"mptcp fetch / C receiver, reused memory, {name}"] = (ours, theirs)
        tcp = ("Mission Control", "tcp", 1, size)
        pairs[f"shm / tcp, {name}"] = (("Mission Control", "shm", 1, size), tcp)
        pairs[f"shm, pages read / tcp, {name}"] = ((TOUCHED, "shm", 1, size), tcp)
        for transport in ("tcp", "tls"):
            ours = ("Mission Control", transport, 1, size)
            pairs[f"{transport} fetch / Dask's {transport} comm, {name}"] = (ours, ("Dask comm", transport, 1, size))
            pairs[f"{transport}, worker to worker / Dask's, {name}"] = (
                (MISSION_WORKERS, transport, FLOWS_PER_HOST, size),
                (DASK_WORKERS, transport, 1, size),
            )
    return {
        name: rate[ours] / rate[theirs] for name, (ours, theirs) in pairs.items() if ours in rate and theirs in rate
    }


def _processes(stack: ExitStack, setting: Setting) -> Iterator[Contender]:
    """A sender and a receiver each."""
    congestion, objects, transports, say = setting.congestion, setting.objects, setting.transports, setting.say

    def programs(server: int) -> Callable[[], list[int]]:
        return partial(list, [os.getpid(), server])

    def peer(kind: str, what: str, transport: str, flows: int) -> Contender:
        own = stack.enter_context(_started("peer", kind, transport, congestion, str(flows)))
        return Contender(what, transport, flows, objects, own.fetch, own.pids)

    if {"tcp", "mptcp"} & set(transports):
        say("builds the C receiver")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mission-bench-")))
        receiver = _compile(folder)
    if "tcp" in transports:
        port, server = stack.enter_context(_server([receiver, "serve", congestion]))
        for flows in FLOWS:
            for kind in ("reused", "fresh", "read"):
                fetch = _command([receiver, "fetch", port], [flows], [kind, congestion])
                yield Contender(f"C receiver, {kind}", "tcp", flows, objects, fetch, programs(server))
    if "mptcp" in transports and "mptcp" in _native.carriers():
        port, server = stack.enter_context(_server([receiver, "serve", congestion, "mptcp"]))
        fetch = _command([receiver, "fetch", port], [1], ["reused", congestion, "mptcp"])
        yield Contender("C receiver, reused", "mptcp", 1, objects, fetch, programs(server))
        yield peer("mission", "Mission Control", "mptcp", 1)
    if "tls" in transports:
        if loop := _rustls_loop():
            port, server = stack.enter_context(_server([loop, "serve", congestion]))
            for flows in FLOWS:
                fetch = _command([loop, "fetch", port], [flows], [congestion])
                yield Contender("rustls loop", "tls", flows, objects, fetch, programs(server))
        else:
            say("no rustls loop: cargo build --release -p mission-transport --example rustls_loop")
    for transport in ("tcp", "tls"):
        if transport in transports:
            for flows in FLOWS:
                yield peer("mission", "Mission Control", transport, flows)
            yield peer("dask", "Dask comm", transport, 1)
    if "shm" in transports:
        yield peer("mission", "Mission Control", "shm", 1)
        yield peer("touch", TOUCHED, "shm", 1)
    if "tcp" in transports and shutil.which("iperf3"):
        for flows in FLOWS:
            yield stack.enter_context(_iperf3(flows, congestion))


def _clusters(stack: ExitStack, setting: Setting) -> Iterator[Contender]:
    """Two workers of a Dask cluster each."""
    congestion, transports, say = setting.congestion, setting.transports, setting.say
    sizes = tuple(size for size in setting.objects if size <= WORKERS_MAX)
    for transport in ("tcp", "tls"):
        if transport not in transports or not sizes:
            continue
        for kind, what in (("mission", MISSION_WORKERS), ("dask", DASK_WORKERS)):
            say(f"starts two Dask workers ({what}, {transport})")
            workers = stack.enter_context(_started("workers", kind, transport, congestion))
            flows = FLOWS_PER_HOST if kind == "mission" else 1
            yield Contender(what, transport, flows, sizes, workers.fetch, workers.pids)


@contextmanager
def _server(command: list[Any]) -> Iterator[tuple[str, int]]:
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()


def _command(head: list[Any], flows: list[Any], tail: list[Any]) -> Callable[[int, int], float]:
    """A program that prints the seconds of each round."""

    def fetch(size: int, count: int) -> float:
        command = [*head, size, *flows, count, *tail]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True, timeout=300)
        return sum(map(float, done.stdout.split()))

    return fetch


class _Peer:
    """A receiver in a process of its own, with a sender in another: `mission_control.bench.peer`, or `.workers`."""

    def __init__(self, module: str, *words: str):
        command = [sys.executable, "-m", f"mission_control.bench.{module}", *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._pids = json.loads(self.ask())

    def ask(self, *words: Any) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        if words:
            self.process.stdin.write(" ".join(map(str, words)) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a receiver of the benchmark ended with status {self.process.wait()}")
        return line

    def fetch(self, size: int, count: int) -> float:
        return float(self.ask(size, count))

    def pids(self) -> list[int]:
        return self._pids


@contextmanager
def _started(module: str, *words: str) -> Iterator[_Peer]:
    peer = _Peer(module, *words)
    try:
        yield peer
    finally:
        assert peer.process.stdin is not None
        peer.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            peer.process.wait(timeout=10)
        peer.process.kill()
        peer.process.wait()


@contextmanager
def _iperf3(flows: int, congestion: str) -> Iterator[Contender]:
    """iperf3 sends for a second; it has no objects, and keeps no bytes."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(["iperf3", "-s", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.3)

    def fetch(size: int, count: int) -> float:
        command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", "1", "-P", str(flows), "-C", congestion, "-J"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return size * count * 8 / json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]

    try:
        yield Contender("iperf3", "tcp", flows, (256 << 20,), fetch, lambda: [os.getpid(), server.pid])
    finally:
        server.kill()
        server.wait()


def _compile(folder: Path) -> str:
    source, program = Path(__file__).with_name("receiver.c"), folder / "receiver"
    compiler = os.environ.get("CC", "cc")
    try:
        subprocess.run([compiler, "-O3", "-pthread", "-o", str(program), str(source)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PrerequisiteMissing(
            f"the C receiver cannot be built with {compiler}: install gcc, or set CC ({error})"
        ) from None
    return str(program)


def _rustls_loop() -> str | None:
    """Return the program where a checkout has built it; no other target of the Makefile needs it."""
    program = Path(__file__).parent.parent.parent / "target/release/examples/rustls_loop"
    return str(program) if program.exists() else None


def _iperf3_version() -> str | None:
    if not shutil.which("iperf3"):
        return None
    done = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, timeout=10)
    found = re.match(r"iperf (\S+)", done.stdout)
    return found[1] if found else None


def _allowed() -> list[str]:
    return Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


def _cpu(pids: list[int]) -> float:
    """Processor seconds of these processes, and of the children of this one that have ended."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in pids:
        if pid == os.getpid():
            total += sum(os.times()[2:4])
            continue
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(words[11]) + int(words[12])) / ticks
    return total


def _row(own: Contender, size: int) -> dict[str, Any]:
    speeds = [rate for rate, _ in own.samples[size]]
    return {
        "what": own.what,
        "transport": own.transport,
        "flows": own.flows,
        "object_bytes": size,
        "mib_per_s": statistics.median(speeds),
        "cpu_s_per_gib": statistics.median(cpu for _, cpu in own.samples[size]),
        "spread": [min(speeds), max(speeds)],
    }
