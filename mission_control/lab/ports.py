"""What the switch ports of a lab have counted, how long their queues are, and changes of them while they run."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mission_control import _native
from mission_control.lab import namespaces

if TYPE_CHECKING:
    from mission_control.lab.lab import Lab

TRACE_FETCH_S = 0.02
"""The kernel keeps some 30,000 samples of a switch: with 48 busy ports what comes in 60 ms."""


def counted(lab: Lab) -> list[dict[str, Any]]:
    """What every switch port has counted: ``mission_kernel::switch::PortCounters``, and the names of both."""
    rows: list[dict[str, Any]] = []
    for switch in lab.topology.switches:

        def read(switch: str = switch) -> list[dict[str, Any]]:
            own = opened(lab, switch)
            return [
                {"switch": switch, "port": socket.if_indextoname(row["interface"]), **row, **quantiles(row)}
                for row in json.loads(own.counters())
            ]

        rows += namespaces.inside(lab.namespace(switch), read)
    return rows


def opened(lab: Lab, switch: str) -> _native.Switch:
    """The ports of a switch, for a thread that is in its namespace."""
    return _native.Switch.open(socket.if_nametoindex(lab.links_of(switch)[0][0]))


def trace(lab: Lab, seconds: float) -> Iterator[tuple[float, str, str, int, int]]:
    """How long queues are, sampled as packets come to a port, at most once in 100 us: seconds since now, switch, port,
    bytes of the virtual queue, bytes of the real backlog. One trace at a time: two share the samples."""
    traced = []
    for switch in lab.topology.switches:

        def begin(switch: str = switch) -> tuple[_native.Switch, dict[int, str]]:
            own = opened(lab, switch)
            own.samples()  # what an earlier trace has left
            own.trace(True)
            return own, {socket.if_nametoindex(name): name for name, _ in lab.links_of(switch)}

        traced.append((switch, *namespaces.inside(lab.namespace(switch), begin)))
    began = time.monotonic_ns()
    try:
        over = False
        while not over:
            time.sleep(TRACE_FETCH_S)
            over = time.monotonic_ns() - began > seconds * 1e9
            for switch, entry, names in traced:
                for at, interface, queue, backlog in entry.samples():
                    if began <= at <= began + seconds * 1e9:
                        yield (at - began) / 1e9, switch, names[interface], queue, backlog
    finally:
        for _, entry, _ in traced:
            entry.trace(False)


def change(lab: Lab, switch: str, changed: Callable[[str, dict[str, int]], dict[str, int]]) -> None:
    """Changes the ports of a switch while it runs, each as ``changed`` makes it of its name and settings."""

    def work() -> None:
        own = opened(lab, switch)
        for row in json.loads(own.counters()):
            settings = changed(socket.if_indextoname(row["interface"]), row["settings"])
            own.set(row["interface"], json.dumps(settings))

    namespaces.inside(lab.namespace(switch), work)


def quantiles(port: dict[str, Any]) -> dict[str, int]:
    """Of the time that something was queued: how much it was for half of it at most, and for 95 %."""
    # The first bucket holds the idle time too, of which only what was not idle counts.
    spent = [max(0, port["nanoseconds"][0] - (sum(port["nanoseconds"]) - port["busy_ns"])), *port["nanoseconds"][1:]]
    step, found = port["settings"]["limit_bytes"] / (len(spent) - 1), {}
    for name, part in (("queue_bytes_p50", 0.5), ("queue_bytes_p95", 0.95)):
        passed = itertools.accumulate(spent)
        bucket = next((n for n, entry in enumerate(passed) if entry >= part * sum(spent)), 0) if sum(spent) else 0
        found[name] = int(bucket * step)
    return found
