"""What an incast scenario means: what is read at a place of its grid, which timeouts and which path that has."""

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
"""Of two hosts of a lab without queues: some 60 to 150 us (docs/measurements.md)."""
MSS, HEADERS = 1448, 66
"""Of a frame with an MTU of 1,500 bytes: payload, and Ethernet, IP, TCP with timestamps."""
TRANSPORTS = ("auto", "tcp", "dctcp", "ictcp")
"""Of synchronized reads; auto is tcp here."""
EVENTS = ("rate", "buffer", "mark")
"""That can be undone for the next point."""
LINK_RATE = 100_000_000
"""Only one link is busy, so that it can have the lab's full rate, whatever the number of hosts."""
RTO_MIN_US = 200_000
"""The kernel's own; asked of each socket where it is to be longer by chance."""


@dataclass(frozen=True)
class Place:
    """So many senders with a fragment of so many bytes each."""

    senders: int
    fragment: int
    """Bytes of each sender for a block."""
    asked: int
    """As the scenario has it: of each sender, or of all together."""
    blocks: int | None = None
    """Where the scenario does not say how many."""


ONE_FLOW = Place(senders=1, fragment=4 << 20, asked=4 << 20, blocks=6)
"""What one long flow gets: some two seconds at 100 Mbit/s."""


def place_of(scenario: Scenario) -> Place:
    """The place that a scenario describes: its largest number of senders, with its first fragment."""
    workload: Any = scenario.workload
    senders = quantities.senders(workload.senders)[-1]
    asked = workload.total or workload.fragment[0]
    return Place(senders, -(-asked // senders) if workload.total else asked, asked)


def link_rate(scenario: Scenario) -> int:
    """Of a host's link, in bits per second, before dilation."""
    rate = scenario.topology.link_rate
    return LINK_RATE if rate == "auto" else rate


def reads(scenario: Scenario, point: Place) -> Reads:
    """What is measured at a point."""
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
    """Microseconds that are asked of each socket, in the lab's slow motion; ``None``: nothing is."""
    asked, slow = scenario.stack.rto_min_socket, scenario.topology.dilation
    if asked is not None:
        return asked * 1000 * slow
    return RTO_MIN_US * slow if getattr(scenario.workload, "rto_spread", 0) else None


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
    """Goodput where nothing is lost: equation 1 with headers, and slow start where connections are fresh."""
    (row,) = model.predict(path, [senders], [fragment])["rows"]
    return float(row["ideal_mbit"])


def halved(point: Any) -> bool:
    """Whether goodput is at most half of the ideal one: one block in many that waits for a timeout is enough."""
    return point.goodput_mbit is None or bool(point.goodput_mbit <= point.ideal_mbit / 2)


def collapsed(point: Any) -> bool:
    """Whether the median block takes longer than the ideal one by half an RTO; the model says so itself."""
    if point.regime:
        return bool(point.regime == "collapsed")
    if not point.blocks:
        return True  # not one block ended within the time
    ideal_s = point.senders * point.fragment_bytes * 8 / point.ideal_mbit / 1e6
    return bool(median(point.blocks) > ideal_s + point.rto_s / 2)


def alpha(point: Any, goodput_mbit: float) -> float:
    """The part of an RTO in which the link is idle in a block, on average (paper 000, equation 4).

    Args:
        goodput_mbit: at which blocks are read.
    """
    bits = point.senders * point.fragment_bytes * 8
    idle_s: float = (bits / goodput_mbit - bits / point.ideal_mbit) / 1e6
    return idle_s / point.rto_s
