"""Watches a lab during a run, and decides whether the measurement is valid."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mission_control.lab import delay, namespaces
from mission_control.lab.lab import Lab
from mission_control.lab.ports import quantiles

EVERY_S = 0.125
BUSY = 0.95
"""Busy fraction from which a CPU counts as saturated."""
FULL = 0.8
"""Used fraction of a link's rate, over an eighth of a second, from which the link sets the pace."""
MOVING = 0.05
"""Used fraction of a link's rate from which something moves; less is control traffic."""
STARVED_MAX = 0.2
"""Largest fraction of starved samples, of those in which something moved."""
LOST_MAX = 0.02
"""Largest fraction of a port's rate that the machine may take: well below the differences that runs measure."""
STOLEN_MAX = 0.03
"""Largest fraction of CPU time that may be stolen (steal time) while something moved. It is 0.1 % on a quiet machine;
at 11 to 18 %, a single sender has 65 to 85 % of its goodput."""
STOLEN = "the hypervisor stole"
"""First words of the reason why a run with too much steal time is not valid."""
LITTLE_S = 1.0
"""Seconds in which a port's throughput is not judged: one late timer is some per cent of that."""


@dataclass(frozen=True)
class Sample:
    """The state of the machine and the links during an eighth of a second."""

    seconds: float
    processors: tuple[float, ...]
    """Busy fraction of each CPU."""
    links: tuple[float, ...]
    """Used fraction of each switch port's rate."""
    stolen: float = 0.0
    """Steal time as a fraction of all CPUs' time: the hypervisor ran others while something waited here."""
    queues: tuple[int, ...] = ()
    """Bytes in each switch port's queue at its end."""
    receive: int = 0
    """Bytes that the first host has received and its programs have not read yet."""


class Processors:
    """Measures how the CPUs' time was used."""

    def __init__(self) -> None:
        self.before = psutil.cpu_times(percpu=True)

    def since_last(self) -> tuple[tuple[float, ...], float]:
        """Return, since the last call, the busy fraction of each CPU, and the stolen fraction of all.

        Programs with a positive nice value do not count: they yield to the lab.
        """
        now = psutil.cpu_times(percpu=True)
        deltas = [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(now, self.before, strict=True)]
        self.before, busy, stolen, all_of_it = now, [], 0.0, 0.0
        for delta in deltas:
            own = now[0]._make(delta)
            # The kernel counts the time of guests as that of users, too.
            total = sum(delta) - own.guest - own.guest_nice
            busy.append(max(0.0, 1 - (own.idle + own.iowait + own.nice) / total) if total > 0 else 0.0)
            stolen, all_of_it = stolen + own.steal, all_of_it + total
        return tuple(busy), stolen / all_of_it if all_of_it > 0 else 0.0


class Watch:
    """Samples CPUs and switch ports until it is stopped."""

    def __init__(self, lab: Lab):
        self.lab = lab
        self.samples: list[Sample] = []
        self.first = self.last = lab.ports()
        self._delays = lab.delays()
        self._processors = Processors()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lab-watch", daemon=True)

    def start(self) -> None:
        self.first = self.last = self.lab.ports()
        self._delays = self.lab.delays()
        self._processors = Processors()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.last = self.lab.ports()

    def stop_and_summarize(self) -> dict[str, Any]:
        """Stop, and return the summary for a run's result: ``ports`` (counters since the start), ``valid``,
        ``invalid_because``, ``processor_seconds`` (of the whole machine), ``samples`` (one list for each quantity,
        every 125 ms), and, if links have a delay, ``delay`` (:func:`mission_control.lab.delay.since`)."""
        self.stop()
        ports = [since(new, old) for new, old in zip(self.last, self.first, strict=True)]
        because = invalid_reasons(self.samples, ports)
        lines, result = self.lab.delays(), dict[str, Any]()
        if lines is not None and self._delays is not None:
            result["delay"] = delay.since(lines, self._delays, self.lab.topology.delay_us)
            because += delay.invalid_reasons(result["delay"])
        return {
            **result,
            "ports": ports,
            "valid": not because,
            "invalid_because": because,
            "processor_seconds": sum(
                sum(sample.processors) * (sample.seconds - before)
                for sample, before in zip(
                    self.samples, [0.0, *(sample.seconds for sample in self.samples)], strict=False
                )
            ),
            "samples": {
                "seconds": [sample.seconds for sample in self.samples],
                "processors": [round(sum(sample.processors), 3) for sample in self.samples],
                "links": [[round(part, 3) for part in sample.links] for sample in self.samples],
                "queues": [sample.queues for sample in self.samples],
                "receive": [sample.receive for sample in self.samples],
            },
        }

    def _watch(self) -> None:
        before, began = self.first, time.monotonic()
        last = began
        while not self._over.wait(max(0.0, last + EVERY_S - time.monotonic())):
            try:
                now, at = self.lab.ports(), time.monotonic()
            except FileNotFoundError:
                return  # after an interrupt the lab may be gone
            passed, last = at - last, at
            used = tuple(
                (new["bytes"] - old["bytes"]) / passed / new["settings"]["bytes_per_second"]
                for new, old in zip(now, before, strict=True)
            )
            busy, stolen = self._processors.since_last()
            at_ns = time.monotonic_ns()
            queues = tuple(queued(entry, at_ns) for entry in now)
            receive = namespaces.inside(self.lab.namespace(self.lab.topology.hosts[0]), received)
            self.samples.append(Sample(at - began, busy, used, stolen, queues, receive))
            before = now


def queued(port: dict[str, Any], at_ns: int) -> int:
    """Compute the bytes in a port's queue at a time of the monotonic clock, if nothing arrived since its last
    sample."""
    gone = max(0, at_ns - port["drained_ns"]) * port["settings"]["bytes_per_second"] // 10**9
    return max(0, port["queue_bytes"] - gone)


def received() -> int:
    """Return the bytes in the receive queues of this network namespace's TCP sockets."""
    established = "01"
    rows = [line.split() for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[3] == established)


def since(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Return the differences of a port's counters between two samples."""
    counted = {name: new[name] - old[name] for name in COUNTERS}
    spent = [n - o for n, o in zip(new["nanoseconds"], old["nanoseconds"], strict=True)]
    step = new["settings"]["limit_bytes"] / (len(spent) - 1)
    longest = max((bucket for bucket, passed in enumerate(spent) if passed), default=0)
    # The kernel's maximum is since the port was made.
    most = min(new["queue_bytes_max"], int((longest + 1) * step))
    own = {**new, **counted, "nanoseconds": spent, "queue_bytes_max": most}
    return {**own, **quantiles(own)}


COUNTERS = ("packets", "bytes", "drops", "dropped_bytes", "marks", "oversized", "lost_bytes", "busy_ns")


def invalid_reasons(samples: Sequence[Sample], ports: Sequence[dict[str, Any]]) -> list[str]:
    """Return why a measurement does not represent such a network; empty: it is valid."""
    because = []
    for port in ports:
        name = f"port {port['port']} of {port['switch']}"
        if port["oversized"]:
            because.append(f"{port['oversized']} frames at {name} were longer than the wire's: offloads are on")
        rate = port["settings"]["bytes_per_second"]
        part = port["lost_bytes"] / max(port["bytes"], rate * LITTLE_S)
        if part > LOST_MAX:
            because.append(f"the machine took {part:.1%} of the rate of {name}: use slower links")
    moving = [sample for sample in samples if max(sample.links, default=0) > MOVING]
    starved = [entry for entry in moving if max(entry.processors) >= BUSY and max(entry.links) < FULL]
    if len(starved) > STARVED_MAX * len(moving):
        part = len(starved) / len(moving)
        because.append(f"a CPU was saturated while no link was, for {part:.0%} of the time: use slower links")
    stolen = sum(entry.stolen for entry in moving) / len(moving) if moving else 0.0
    if stolen > STOLEN_MAX:
        because.append(f"{STOLEN} {stolen:.0%} of the CPU time: measure again later")
    return because
