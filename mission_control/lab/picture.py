"""Drawings of a lab, in text."""

from __future__ import annotations

from typing import Any

from mission_control import _native
from mission_control.lab.topology import Link, Topology

IN_A_LINE = 8
"""Hosts per line."""


def rate(bits_per_second: int) -> str:
    for unit, size in (("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:g} {unit}"
    return f"{bits_per_second} bit/s"


def draw(topology: Topology) -> str:
    """Draw the switches with their hosts below, and the links between switches."""
    lines = [f"{topology.kind}: {len(topology.hosts)} hosts, MTU {topology.mtu}, {describe(topology)}"]
    for switch in topology.switches:
        links = [link for link in topology.links if switch in (link.a, link.b)]
        hosts = list({link.a: link for link in links if link.a in topology.hosts}.values())
        trunks = [link for link in links if link.a not in topology.hosts]
        beside = "".join(f" ══ {other(link, switch)} ({rate(link.bits_per_second)})" for link in trunks)
        lines += ["", f"  [{switch}]{beside}"]
        for first in range(0, len(hosts), IN_A_LINE):
            some = hosts[first : first + IN_A_LINE]
            last = first + IN_A_LINE >= len(hosts)
            lines.append(f"   {'└' if last else '├'}── " + "  ".join(f"{link.a:<4}" for link in some))
        rates = sorted({link.bits_per_second for link in hosts})
        bonded = "two bonded links, " if topology.bonded else ""
        if hosts:
            lines.append(f"       {bonded}each at {', '.join(map(rate, rates))}")
    return "\n".join(lines)


def describe(topology: Topology) -> str:
    port, size = topology.port, _native.format_bytes
    delay = f", {topology.delay_us} us each way of each host's link" if topology.delay_us else ""
    marks = f", marks above {size(port.ecn_bytes)}" if port.ecn_bytes else ", no marks"
    if port.shared_bytes:
        return f"{size(port.shared_bytes)} shared by 12 ports, at most {size(port.buffer_bytes)} for each{marks}{delay}"
    return f"{size(port.buffer_bytes)} of buffer at each port{marks}{delay}"


def other(link: Link, node: str) -> str:
    return link.b if link.a == node else link.a


def table(ports: list[dict[str, Any]]) -> str:
    """Format the counters of the ports that carried something."""
    head = f"{'switch':<8}{'port':<8}{'rate':>12}{'bytes':>12}{'drops':>8}{'marks':>8}"
    head += "".join(f"{name:>12}" for name in ("queue p50", "p95", "max"))
    size = _native.format_bytes
    lines = [head]
    for port in ports:
        if port["packets"]:
            lines.append(
                f"{port['switch']:<8}{port['port']:<8}{rate(port['settings']['bytes_per_second'] * 8):>12}"
                f"{size(port['bytes']):>12}{port['drops']:>8}{port['marks']:>8}"
                f"{size(port['queue_bytes_p50']):>12}{size(port['queue_bytes_p95']):>12}{size(port['queue_bytes_max']):>12}"
            )
    return "\n".join(lines)
