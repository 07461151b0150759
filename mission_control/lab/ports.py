"""Counters and queue lengths of a lab's switch ports, and changes of their settings while they run."""

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
"""Seconds between two reads: the kernel keeps some 30,000 samples of a switch, which 48 busy ports fill in 60 ms."""


def counted(lab: Lab) -> list[dict[str, Any]]:
    """Return the counters of every switch port: ``mission_kernel::switch::PortCounters``, with the names of switch and
    port."""
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
    """Open the ports of a switch, in a thread that is in its namespace."""
    return _native.Switch.open(socket.if_nametoindex(lab.links_of(switch)[0][0]))


def trace(lab: Lab, seconds: float) -> Iterator[tuple[float, str, str, int, int]]:
    """Sample queue lengths as packets arrive at a port, at most once in 100 us: seconds since now, switch, port, bytes
    of the virtual queue, bytes of the real backlog. Run one trace at a time, because two would share the samples."""
    traced = []
    for switch in lab.topology.switches:

        def begin(switch: str = switch) -> tuple[_native.Switch, dict[int, str]]:
            own = opened(lab, switch)
            own.samples()  # discard the samples of an earlier trace
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
    """Change the settings of a switch's ports while it runs; ``changed`` computes them from a port's name and
    settings."""

    def work() -> None:
        own = opened(lab, switch)
        for row in json.loads(own.counters()):
            settings = changed(socket.if_indextoname(row["interface"]), row["settings"])
            own.set(row["interface"], json.dumps(settings))

    namespaces.inside(lab.namespace(switch), work)


def quantiles(port: dict[str, Any]) -> dict[str, int]:
    """Return the median and the 95th percentile of the queue length over the time in which something was queued."""
    # The first bucket includes the idle time, which does not count.
    spent = [max(0, port["nanoseconds"][0] - (sum(port["nanoseconds"]) - port["busy_ns"])), *port["nanoseconds"][1:]]
    step, found = port["settings"]["limit_bytes"] / (len(spent) - 1), {}
    for name, part in (("queue_bytes_p50", 0.5), ("queue_bytes_p95", 0.95)):
        passed = itertools.accumulate(spent)
        bucket = next((n for n, entry in enumerate(passed) if entry >= part * sum(spent)), 0) if sum(spent) else 0
        found[name] = int(bucket * step)
    return found
