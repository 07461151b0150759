"""Topologies as data: hosts, switches, and the links between them.

To add a kind, add a function here and one line in :data:`KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

RATE = 100_000_000
"""Default rate of a link in bits per second: one machine forwards some 1.6 Gbit/s of small packets in all (FACTS)."""
HOSTS_MAX = 250
"""A link's addresses are 10.77.P.N: P is the number of its path, N that of its host."""


@dataclass(frozen=True)
class Port:
    """The behaviour of every switch port.

    Args:
        buffer_bytes: size of a port's queue.
        ecn_bytes: queue length that triggers ECN marks; 0: no marks.
        shared_bytes: one buffer for each 12 ports of a switch, of which a port may use at most ``alpha`` times the free
            part, and never more than ``buffer_bytes``; 0: each port has its own.
        alpha: factor of the dynamic threshold (Choudhury and Hahne 1998).
    """

    buffer_bytes: int = 64 << 10
    ecn_bytes: int = 0
    shared_bytes: int = 0
    alpha: float = 1.0


PAPER_SWITCH = Port(buffer_bytes=786_432 // 6, shared_bytes=786_432, alpha=256.0)
"""The 48-port switch of paper 003: 786,432 bytes shared by each 12 ports, at most a sixth for each."""


@dataclass(frozen=True)
class Link:
    """A link between two nodes; both directions have the rate."""

    a: str
    b: str
    bits_per_second: int
    path: int = 0
    """Number of the path, where there are several; a host has an interface and an address for each."""


@dataclass(frozen=True)
class Topology:
    kind: str
    hosts: tuple[str, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    port: Port = field(default_factory=Port)
    mtu: int = 1500
    bonded: bool = False
    """The links of a host act as one, with one address: packets take them in turn."""
    delay_us: int = 0
    """One-way delay of each host's link, in microseconds; see :mod:`mission_control.lab.delay`."""

    @property
    def paths(self) -> int:
        """Number of paths between two hosts; each has its own addresses."""
        return 1 if self.bonded else max(link.path for link in self.links) + 1

    def address(self, host: str, path: int = 0) -> str:
        """IPv4 address of a host's interface on a path."""
        return f"10.77.{path}.{self.hosts.index(host) + 1}"

    def interface(self, path: int = 0) -> str:
        """Name of a host's interface on a path."""
        return f"eth{path}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Topology:
        links = tuple(Link(**link) for link in values["links"])
        own = {**values, "hosts": tuple(values["hosts"]), "switches": tuple(values["switches"])}
        return Topology(**{**own, "links": links, "port": Port(**values["port"])})


def star(hosts: int = 4, link_rate: int = RATE, port: Port | None = None, mtu: int = 1500) -> Topology:
    """All hosts on one switch: the topology of incast."""
    names = _hosts(hosts)
    links = tuple(Link(name, "s1", link_rate) for name in names)
    return Topology("star", names, ("s1",), links, port or Port(), mtu)


def two_rack(
    hosts: int = 8, link_rate: int = RATE, trunk_rate: int | None = None, port: Port | None = None, mtu: int = 1500
) -> Topology:
    """Half of the hosts on each of two switches, which meet at a third one: paper 001, 5.4 and figure 5.15.

    Args:
        trunk_rate: rate of the links between switches; absent: the hosts'.
    """
    names = _hosts(hosts)
    half = (hosts + 1) // 2
    links = [Link(name, "s1" if number < half else "s2", link_rate) for number, name in enumerate(names)]
    trunks = [Link(rack, "s3", trunk_rate or link_rate) for rack in ("s1", "s2")]
    return Topology("two-rack", names, ("s1", "s2", "s3"), (*links, *trunks), port or Port(), mtu)


def two_path(hosts: int = 4, link_rate: int = RATE, port: Port | None = None, mtu: int = 1500) -> Topology:
    """Every host has two interfaces, on two switches that are not connected: for Multipath TCP."""
    names = _hosts(hosts)
    links = [Link(name, f"s{path + 1}", link_rate, path) for path in (0, 1) for name in names]
    return Topology("two-path", names, ("s1", "s2"), tuple(links), port or Port(), mtu)


def bonded(hosts: int = 4, link_rate: int = RATE, port: Port | None = None, mtu: int = 1500) -> Topology:
    """A star in which every host has two links that act as one: paper 001, 5.3.1 (Linux calls it balance-rr)."""
    names = _hosts(hosts)
    links = tuple(Link(name, "s1", link_rate, path) for name in names for path in (0, 1))
    return Topology("bonded", names, ("s1",), links, port or Port(), mtu, bonded=True)


KINDS: dict[str, Callable[..., Topology]] = {
    "star": star,
    "two-rack": two_rack,
    "two-path": two_path,
    "bonded": bonded,
}


def custom(links: Sequence[Link], port: Port | None = None, mtu: int = 1500) -> Topology:
    """Custom links: nodes named s and a number are switches, all others are hosts.

    Raises:
        ValueError: the links make no network; one line with a fix.
    """
    nodes = list(dict.fromkeys(node for link in links for node in (link.a, link.b)))
    switches = tuple(node for node in nodes if re.fullmatch(r"s\d+", node))
    hosts = tuple(node for node in nodes if node not in switches)
    # The host's end comes first, as everywhere here.
    turned = tuple(replace(link, a=link.b, b=link.a) if link.a in switches else link for link in links)
    for link in turned:
        if link.a in hosts and link.b in hosts:
            raise ValueError(f"{link.a} and {link.b} are hosts: put a switch (s1, s2, ...) between them")
    for name in nodes:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,7}", name) or name in ("lo", "br0"):
            raise ValueError(f"{name!r} names no node: use up to 8 lower-case letters and digits")
    if len({(link.a, link.path) for link in turned if link.a in hosts}) < sum(link.a in hosts for link in turned):
        raise ValueError("a host has two links on one path: number them with path = 0, 1, ...")
    if not 2 <= len(hosts) <= HOSTS_MAX:
        raise ValueError(f"{len(hosts)} hosts: use 2 to {HOSTS_MAX}")
    pairs = [frozenset((link.a, link.b)) for link in turned]
    if len(set(pairs)) < len(pairs):
        raise ValueError("two links between the same two nodes: put another switch between them")
    without = [name for name in hosts if (name, 0) not in {(link.a, link.path) for link in turned}]
    if without:
        raise ValueError(f"{without[0]} has no link on path 0, by which it is known: give it one")
    # A switch is one bridge for all paths.
    trunks = [link for link in turned if link.a in switches]
    _require_no_loop(trunks)
    for path in {link.path for link in turned}:
        _require_whole([link for link in turned if link.path == path or link in trunks], path)
    return Topology("custom", hosts, switches, turned, port or Port(), mtu)


def _require_no_loop(trunks: Sequence[Link]) -> None:
    """Refuse loops: bridges without a spanning tree protocol would send packets around a loop for ever."""
    joined: dict[str, str] = {}
    for link in trunks:
        if _root(joined, link.a) == _root(joined, link.b):
            raise ValueError(f"there is a loop at {link.a} and {link.b}: leave one of its links out")
        joined[_root(joined, link.a)] = _root(joined, link.b)


def _require_whole(links: Sequence[Link], path: int) -> None:
    """Require that every host on a path reaches every other by it."""
    joined: dict[str, str] = {}
    for link in links:
        joined[_root(joined, link.a)] = _root(joined, link.b)
    hosts = {link.a for link in links if link.path == path and not re.fullmatch(r"s\d+", link.a)}
    if len({_root(joined, host) for host in hosts}) > 1:
        raise ValueError(f"path {path} is in pieces: link its switches")


def _root(joined: dict[str, str], node: str) -> str:
    """Find the representative of the connected part of the network that contains a node."""
    while joined.setdefault(node, node) != node:
        node = joined[node]
    return node


def _hosts(count: int) -> tuple[str, ...]:
    if not 2 <= count <= HOSTS_MAX:
        raise ValueError(f"{count} hosts: use 2 to {HOSTS_MAX}")
    return tuple(f"h{number}" for number in range(1, count + 1))
