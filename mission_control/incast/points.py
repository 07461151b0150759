"""The grid of an incast scenario: numbers of senders and fragments, in each of its worlds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mission_control.incast import quantities
from mission_control.incast.reads import Reads
from mission_control.lab.described import stack_of
from mission_control.scenario import BadInput, Scenario

TRANSPORTS = ("auto", "tcp", "dctcp", "ictcp")
"""Of synchronized reads; auto is tcp here."""
EVENTS = ("rate", "buffer", "mark")
"""That can be undone for the next point."""
LINK_RATE = 100_000_000
"""Only one link is busy, so that it can have the lab's full rate, whatever the number of hosts."""
RTO_MIN_US = 200_000
"""The kernel's own; asked of each socket where it is to be longer by chance."""


@dataclass(frozen=True)
class Point:
    """So many senders with a fragment of so many bytes each."""

    senders: int
    fragment: int
    """Bytes of each sender for a block."""
    asked: int
    """As the scenario has it: of each sender, or of all together."""
    blocks: int | None = None
    """Where the scenario does not say how many."""


ONE_FLOW = Point(senders=1, fragment=4 << 20, asked=4 << 20, blocks=6)
"""What one long flow gets: some two seconds at 100 Mbit/s."""


def points(scenario: Scenario) -> Iterator[Point]:
    """All points, fragment by fragment, from few senders to many."""
    workload = scenario.workload
    for asked in (workload.total,) if workload.total else workload.fragment:
        for senders in quantities.senders(workload.senders):
            fragment = -(-asked // senders) if workload.total else asked
            yield Point(senders, fragment, asked)


def most_senders(scenario: Scenario) -> int:
    return quantities.senders(scenario.workload.senders)[-1]


def link_rate(scenario: Scenario) -> int:
    """Of a host's link, in bits per second, before dilation."""
    rate = scenario.topology.link_rate
    return LINK_RATE if rate == "auto" else rate


def reads(scenario: Scenario, point: Point) -> Reads:
    """What is measured at a point."""
    workload, control = scenario.workload, scenario.control
    return Reads(
        fragment=point.fragment,
        blocks=point.blocks or workload.blocks,
        warm_up=1 if point.blocks else workload.warm_up,
        concurrent=control.flows_per_host,
        jitter_us=round(workload.jitter * 1000),
        rto_spread=workload.rto_spread,
        seed=workload.seed,
        traced=workload.traced,
        deadline_s=workload.deadline / 1e3,
        rto_min_us=rto_min_of_socket(scenario),
        ictcp_link=link_rate(scenario) // scenario.topology.dilation if control.transport == "ictcp" else None,
    )


def rto_min_of_socket(scenario: Scenario) -> int | None:
    """Microseconds that are asked of each socket; ``None``: nothing is."""
    asked = scenario.stack.rto_min_socket
    if asked is not None:
        return asked * 1000
    return RTO_MIN_US if scenario.workload.rto_spread else None


def rto_min_asked(scenario: Scenario) -> dict[str, int]:
    """Minimum RTOs by who gives them, in microseconds."""
    stack = stack_of(scenario)
    asked = {
        "route": stack.rto_min_ms and stack.rto_min_ms * 1000,
        "socket": rto_min_of_socket(scenario),
        "sysctl": stack.rto_min_sysctl_ms and stack.rto_min_sysctl_ms * 1000,
        "kernel": RTO_MIN_US,
    }
    return {who: value for who, value in asked.items() if value is not None}


def rto_min_us(scenario: Scenario) -> int:
    """What is to be expected of them: a route's wins (the kernel's `tcp_rto_min`), and a socket that asks for more than
    it had when it was made keeps that (docs/measurements.md)."""
    asked = rto_min_asked(scenario)
    made_with = asked.get("sysctl", asked["kernel"])
    return asked.get("route", min(asked.get("socket", made_with), made_with))


def check(scenario: Scenario) -> None:
    """
    Raises:
        BadInput: the scenario describes no incast.
    """
    if scenario.topology.kind != "star":
        raise BadInput(f"incast happens before one receiver: use a star, not {scenario.topology.kind}")
    if scenario.workload.rto_spread and stack_of(scenario).rto_min_ms:
        raise BadInput(
            "a route's minimum RTO wins against each socket's own: leave stack.rto_min, topology.dilation and profile "
            "2009 out"
        )
    if other := {event.do for event in scenario.topology.events} - set(EVENTS):
        raise BadInput(f"an incast scenario takes events of {', '.join(EVENTS)}: leave {min(other)} out")
    if scenario.control.transport not in TRANSPORTS:
        raise BadInput(f"synchronized reads by {scenario.control.transport} are not built: use {', '.join(TRANSPORTS)}")
