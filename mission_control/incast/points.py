"""The points of an incast scenario: what is read at a place of its grid, with which timeouts and over which path."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from mission_control.incast import model, quantities
from mission_control.incast.reads import Reads
from mission_control.lab.delay import base_rtt_s
from mission_control.lab.described import delay_of, stack_of

if TYPE_CHECKING:
    from mission_control.scenario import Scenario

BASE_RTT_S = 1e-4
"""Base round trip of two hosts of a lab: some 60 to 150 us (docs/measurements/lab.md)."""
MSS, HEADERS = 1448, 66
"""Payload of a frame with an MTU of 1,500 bytes, and its headers: Ethernet, IP, TCP with timestamps."""
TRANSPORTS = ("auto", "tcp", "dctcp", "ictcp")
"""Transports of synchronized reads; auto is tcp here."""
EVENTS = ("rate", "buffer", "mark")
"""Events that can be undone for the next point."""
LINK_RATE = 100_000_000
"""Rate of link_rate auto: only one link is busy, so it can have the lab's full rate with any number of hosts."""
RTO_MIN_US = 200_000
"""The kernel's default; set on each socket if the minimum RTO is to vary."""


@dataclass(frozen=True)
class Place:
    """A number of senders with a size of fragment."""

    senders: int
    fragment: int
    """Bytes of each sender for a block."""
    asked: int
    """Bytes as the scenario gives them: of each sender, or of all together."""
    blocks: int | None = None
    """Blocks to measure if the scenario does not set the number."""


ONE_FLOW = Place(senders=1, fragment=4 << 20, asked=4 << 20, blocks=6)
"""The reads that measure one long flow: some two seconds at 100 Mbit/s."""


def place_of(scenario: Scenario) -> Place:
    """The place that a scenario describes: its largest number of senders with its first fragment."""
    workload: Any = scenario.workload
    senders = quantities.senders(workload.senders)[-1]
    asked = workload.total or workload.fragment[0]
    return Place(senders, -(-asked // senders) if workload.total else asked, asked)


def link_rate(scenario: Scenario) -> int:
    """The rate of a host's link in bits per second, before dilation."""
    rate = scenario.topology.link_rate
    return LINK_RATE if rate == "auto" else rate


def reads(scenario: Scenario, point: Place) -> Reads:
    """The reads to measure at a point."""
    workload: Any = scenario.workload
    control = scenario.control
    return Reads(
        fragment=point.fragment,
        blocks=point.blocks or workload.blocks,
        warm_up=1 if point.blocks else workload.warm_up,
        concurrent=control.flows_per_host,
        jitter_us=round(workload.jitter * 1000),
        rto_spread=workload.rto_spread,
        seed=workload.seed,
        fresh=workload.connections == "fresh",
        traced=workload.traced,
        deadline_s=workload.deadline / 1e3,
        rto_min_us=rto_min_of_socket(scenario),
        ictcp_link=link_rate(scenario) // scenario.topology.dilation if control.transport == "ictcp" else None,
    )


def rto_min_of_socket(scenario: Scenario) -> int | None:
    """The minimum RTO to set on each socket, in dilated microseconds; ``None``: none is set."""
    asked, slow = scenario.stack.rto_min_socket, scenario.topology.dilation
    if asked is not None:
        return asked * 1000 * slow
    return RTO_MIN_US * slow if getattr(scenario.workload, "rto_spread", 0) else None


def rto_min_asked(scenario: Scenario) -> dict[str, int]:
    """Minimum RTOs by their origin, in microseconds."""
    stack = stack_of(scenario)
    asked = {
        "route": stack.rto_min_ms and stack.rto_min_ms * 1000,
        "socket": rto_min_of_socket(scenario),
        "sysctl": stack.rto_min_sysctl_ms and stack.rto_min_sysctl_ms * 1000,
        "kernel": RTO_MIN_US,
    }
    return {who: value for who, value in asked.items() if value is not None}


def rto_min_us(scenario: Scenario) -> int:
    """The effective minimum RTO: a route's overrides all others (the kernel's `tcp_rto_min`), and a socket cannot set a
    longer one than it was created with (docs/measurements/incast-cure/knobs-ignored-by-kernel.md)."""
    asked = rto_min_asked(scenario)
    made_with = asked.get("sysctl", asked["kernel"])
    return asked.get("route", min(asked.get("socket", made_with), made_with))


def check(scenario: Scenario) -> None:
    """
    Raises:
        ValueError: the scenario describes no incast.
    """
    workload: Any = scenario.workload
    if scenario.topology.kind != "star":
        raise ValueError(f"incast happens before one receiver: use a star, not {scenario.topology.kind}")
    if workload.rto_spread and stack_of(scenario).rto_min_ms:
        raise ValueError(
            "a route's minimum RTO wins against each socket's own: leave stack.rto_min, topology.dilation and profiles "
            "but modern out"
        )
    if other := {event.do for event in scenario.topology.events} - set(EVENTS):
        raise ValueError(f"an incast scenario takes events of {', '.join(EVENTS)}: leave {min(other)} out")
    if scenario.control.transport not in TRANSPORTS:
        raise ValueError(
            f"synchronized reads by {scenario.control.transport} are not built: use {', '.join(TRANSPORTS)}"
        )


def path_of(scenario: Scenario) -> dict[str, Any]:
    """The path to the receiver in the lab that the scenario describes, as the model takes it."""
    topology, stack = scenario.topology, stack_of(scenario)
    mss = MSS + topology.mtu - 1500
    return model.path(
        link=link_rate(scenario) // topology.dilation,
        rtt_s=max(BASE_RTT_S, base_rtt_s(delay_of(topology))),
        rto_s=rto_min_us(scenario) / 1e6,
        buffer=model.PAPER_003 if topology.port.switch == model.PAPER_003 else topology.port.buffer,
        mss=mss,
        initial_window=(stack.initial_window or 10) * mss,
        sack=stack.sack,
        fresh=getattr(scenario.workload, "connections", "persistent") == "fresh",
    )


def ideal_mbit(path: dict[str, Any], senders: int, fragment: int) -> float:
    """Goodput without loss: equation 1 with headers, and slow start if connections are fresh."""
    (row,) = model.predict(path, [senders], [fragment])["rows"]
    return float(row["ideal_mbit"])


def halved(point: Any) -> bool:
    """Whether goodput is at most half of the ideal; few blocks that wait for a timeout are enough for that."""
    return point.goodput_mbit is None or bool(point.goodput_mbit <= point.ideal_mbit / 2)


def collapsed(point: Any) -> bool:
    """Whether the median block takes half an RTO longer than the ideal one; points of the model have their regime."""
    if point.regime:
        return bool(point.regime == "collapsed")
    if not point.blocks:
        return True  # no block ended within the time limit
    ideal_s = point.senders * point.fragment_bytes * 8 / point.ideal_mbit / 1e6
    return bool(median(point.blocks) > ideal_s + point.rto_s / 2)


def alpha(point: Any, goodput_mbit: float) -> float:
    """The fraction of an RTO in which the link is idle in a block, on average (paper 000, equation 4).

    Args:
        goodput_mbit: measured goodput.
    """
    bits = point.senders * point.fragment_bytes * 8
    idle_s: float = (bits / goodput_mbit - bits / point.ideal_mbit) / 1e6
    return idle_s / point.rto_s
