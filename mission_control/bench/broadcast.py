"""`mission bench broadcast`: one object to many receivers, with every sender held to one rate, as a link would hold it.

Each receiver is a process with a data plane of its own; so is the owner. Three contenders, in turn in each round: one
receiver alone, which gives the time of one copy; all receivers from the owner, as any engine without broadcasts does;
and all receivers as Mission Control has them, who serve one another.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from mission_control import _native
from mission_control.bench.transfer import _allowed, _cpu
from mission_control.environment import describe

ONE = "one receiver"
OWNER = "every receiver from the owner"
SWARM = "receivers serve one another"
MEMORY_BYTES = 1 << 30


def measure(
    receivers: int = 32,
    size: int = 32 << 20,
    rate: int = 256_000_000,
    rounds: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures the three.

    Args:
        receivers: how many.
        size: of the object, in bytes.
        rate: of each sender, in bits per second.

    Returns:
        ``rows``: what, receivers, seconds (median, until the last receiver has all), spread, cpu_s_per_gib (of what all
        received), owner_copies (copies that left the owner); ``ratios``: of medians, to the time of one copy.
    """
    congestion = "cubic" if "cubic" in _allowed() or os.geteuid() == 0 else "reno"
    token = secrets.token_bytes(16)
    samples: dict[str, list[tuple[float, float, float]]] = {ONE: [], OWNER: [], SWARM: []}
    with ExitStack() as stack:
        say(f"starts {receivers + 1} processes")
        owner, *peers = (stack.enter_context(_Peer(token, rate // 8, receivers)) for _ in range(receivers + 1))
        peers_pids = [peer.pid for peer in peers]
        pool = stack.enter_context(ThreadPoolExecutor(receivers))
        for number in range(rounds):
            for what in samples:
                say(f"round {number + 1} of {rounds}: {what}")
                own = peers[:1] if what == ONE else peers
                address, name, sent = owner.ask("put", size)
                job = f"{what} {number}"
                for peer in own:
                    peer.ask("plan", job, congestion, what == SWARM)
                cpu = _cpu([owner.pid, *peers_pids])
                asked = [pool.submit(peer.ask, "fetch", job, name, size, address) for peer in own]
                spans = [fetched.result() for fetched in asked]
                cpu = _cpu([owner.pid, *peers_pids]) - cpu
                seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
                left = (owner.ask("free", name) - sent) / size
                samples[what].append((seconds, cpu / (size * len(own) / 2**30), left))
                for peer in own:
                    peer.ask("forget", job)
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "receivers": 1 if what == ONE else receivers,
            "seconds": statistics.median(entry[0] for entry in taken),
            "spread": [min(entry[0] for entry in taken), max(entry[0] for entry in taken)],
            "cpu_s_per_gib": statistics.median(entry[1] for entry in taken),
            "owner_copies": statistics.median(entry[2] for entry in taken),
        }
        for what, taken in samples.items()
    ]
    one = rows[0]["seconds"]
    return {
        "rows": rows,
        "ratios": {f"{row['what']} / {ONE}": row["seconds"] / one for row in rows[1:]},
        "object_bytes": size,
        "bits_per_second": rate,
        "congestion_control": congestion,
        "rounds": rounds,
        "environment": describe(),
    }


class _Peer:
    """A process with a data plane; does what it is asked."""

    def __init__(self, token: bytes, bytes_per_second: int, receivers: int):
        self._connection, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(other, token, bytes_per_second, receivers), daemon=True
        )

    def __enter__(self) -> _Peer:
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def ask(self, *words: Any) -> Any:
        self._connection.send(words)
        return self._connection.recv()


def _serve(connection: Connection, token: bytes, bytes_per_second: int, receivers: int) -> None:
    endpoint = _native.Endpoint(
        "127.0.0.1",
        token,
        memory_limit=MEMORY_BYTES,
        spool_folder="/tmp",
        # All receivers share one network namespace, and would share the slots of one host.
        flows_per_host=receivers * _native.FLOWS_PER_HOST,
        send_limit=bytes_per_second,
    )
    calls: dict[str, Callable[..., Any]] = {
        "put": lambda size: (endpoint.address, _put(endpoint, size), _sent(endpoint)),
        "plan": lambda *given: _plan(endpoint, *given),
        "fetch": lambda *given: _fetch(endpoint, *given),
        "free": lambda name: (endpoint.free(name), _sent(endpoint))[1],
        "forget": endpoint.forget_job,
    }
    while True:
        what, *given = connection.recv()
        connection.send(calls[what](*given))


def _put(endpoint: _native.Endpoint, size: int) -> str:
    name, _ = endpoint.put([os.urandom(1 << 20) * (size >> 20)], "bench", json.dumps({"transport": "tcp"}))
    return name


def _sent(endpoint: _native.Endpoint) -> int:
    return int(json.loads(endpoint.resources())["sent_bytes"])


def _plan(endpoint: _native.Endpoint, job: str, congestion: str, broadcast: bool) -> None:
    """What the Mission Controller would say."""
    leg: dict[str, Any] = {"transport": "tcp", "reach": "anywhere", "encryption": "none", "reason": "benchmark"}
    leg |= {"congestion_control": congestion, "rto_min_us": 5000}
    plan = {"legs": [leg], "chunk_bytes": 4 << 20, "refused": []}
    endpoint.command(json.dumps({"command": "plan", "job": job, "plan": plan}))
    if broadcast:
        transfer = {"job": job, "from": "owner", "to": "receivers"}
        endpoint.command(json.dumps({"command": "broadcast", "transfer": transfer}))


def _fetch(endpoint: _native.Endpoint, job: str, name: str, size: int, address: str) -> tuple[float, float]:
    began = time.monotonic()
    (part,), _, _ = endpoint.fetch(job, "owner", "receivers", "{}", [(name, 0, size, [address])], False, True)
    assert len(part) == size
    return began, time.monotonic()
