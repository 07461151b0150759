"""Make the lab that a scenario describes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mission_control.errors import BadInput
from mission_control.lab import topology
from mission_control.lab.lab import Lab
from mission_control.lab.stack import PROFILES, Stack

if TYPE_CHECKING:
    from mission_control import scenario

ECN_BYTES = 30_000
"""Paper 001, 5.4: 20 packets."""
MEGA = 1_000_000
FORWARDED = 800 * MEGA
"""Bits per second of small packets that one core forwards (FACTS: two forward 1.6 Gbit/s)."""
FORWARDED_BESIDE_WORKERS = 170 * MEGA
"""The same if workers send and sort the bytes: two cores suffice for 16 hosts at 20 Mbit/s, but not always for 8 at 50
(docs/measurements/lab.md)."""
DELAY_MIN_US = 500
"""With shorter delays the round trip is more than a fifth longer than configured: the machine itself adds some 0.2 ms
(docs/measurements/lab/round-trip-as-asked.md)."""
RTO_MIN_MS = 200
"""The kernel's default, needed where it has to be dilated."""


def lab_of(described: scenario.Scenario, *, name: str | None = None, spare: int = 0) -> Lab:
    """
    Args:
        spare: hosts beyond those of the scenario.

    Raises:
        BadInput: links that make no network.
        PrerequisiteMissing: the machine lacks something that a lab needs.
    """
    marks = ECN_BYTES if described.control.transport == "dctcp" else 0
    return Lab(topology_of(described.topology, spare, marks), name, stack_of(described))


def topology_of(described: scenario.Topology, spare: int = 0, marks: int = 0) -> topology.Topology:
    """
    Args:
        marks: default ECN threshold if the scenario sets none.

    Raises:
        BadInput: links that make no network, or are too slow.
    """
    ecn_bytes = marks if described.port.ecn_threshold is None else described.port.ecn_threshold
    port = topology.Port(
        buffer_bytes=described.port.buffer,
        ecn_bytes=ecn_bytes,
        shared_bytes=described.port.shared_buffer or 0,
        alpha=described.port.alpha,
    )
    if described.port.switch == "paper-003":
        port = replace(topology.PAPER_SWITCH, ecn_bytes=ecn_bytes)
    options: dict[str, Any] = {"port": port, "mtu": described.mtu}
    slow = described.dilation
    try:
        if described.kind == "custom":
            links = [topology.Link(link.a, link.b, link.rate // slow, link.path) for link in described.links]
            return checked(topology.custom(links, **options), described)
        if described.kind == "two-rack" and described.trunk_rate is not None:
            options["trunk_rate"] = described.trunk_rate // slow
        hosts = described.hosts + spare
        rate = (
            link_rate(hosts, beside_workers=spare > 0) if described.link_rate == "auto" else described.link_rate // slow
        )
        return checked(topology.KINDS[described.kind](hosts, rate, **options), described)
    except ValueError as error:
        raise BadInput(str(error)) from None


def checked(made: topology.Topology, described: scenario.Topology) -> topology.Topology:
    """Add the delay of its links to a topology.

    Raises:
        ValueError: a link is too slow to be paced, or its delay too short for a delay line.
    """
    if any(link.bits_per_second < MEGA for link in made.links):
        raise ValueError("a link of less than 1 Mbit/s: use faster links, or less dilation")
    delay_us = delay_of(described)
    if 0 < delay_us < DELAY_MIN_US:
        raise ValueError(f"a delay of {delay_us} us is too short to be kept: use {DELAY_MIN_US} us or more dilation")
    return replace(made, delay_us=delay_us)


def delay_of(described: scenario.Topology) -> int:
    """One-way delay of each host's link, in dilated microseconds; 0: only that of the machine itself."""
    return (described.link_delay or 0) * described.dilation


def link_rate(hosts: int, beside_workers: bool) -> int:
    """Choose the rate of each host's link, so that this machine can forward the traffic of all hosts."""
    forwarded = len(os.sched_getaffinity(0)) * (FORWARDED_BESIDE_WORKERS if beside_workers else FORWARDED)
    return max(MEGA, min(topology.RATE, forwarded // hosts // MEGA * MEGA))


def stack_of(described: scenario.Scenario) -> Stack:
    """The settings of the profile, overridden by the scenario's, and dilated."""
    stack, slow = described.stack, described.topology.dilation
    own: dict[str, Any] = {
        "congestion_control": stack.congestion_control,
        "rto_min_ms": stack.rto_min,
        "rto_min_sysctl_ms": stack.rto_min_sysctl,
        "initial_window": stack.initial_window,
        "window": stack.receive_window,
        "sack": stack.sack,
        "tlp": stack.tlp,
        "rack": stack.rack,
        "delayed_ack": stack.delayed_ack,
    }
    made = replace(PROFILES[stack.profile], **{key: value for key, value in own.items() if value is not None})
    if slow > 1:
        # If nothing else sets a minimum RTO, the route gets the kernel's default.
        route = made.rto_min_ms or (None if made.rto_min_sysctl_ms else RTO_MIN_MS)
        by_sysctl = made.rto_min_sysctl_ms
        made = replace(made, rto_min_ms=route and route * slow, rto_min_sysctl_ms=by_sysctl and by_sysctl * slow)
    return made
