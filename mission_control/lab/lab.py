"""A running lab: made from a topology, found by its name, and removed completely."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mission_control import _native
from mission_control.errors import BadInput, PrerequisiteMissing
from mission_control.lab import congestion, delay, namespaces, ports
from mission_control.lab.host import Host, mac
from mission_control.lab.machine import STATE, allowed, free_name, locked, require, restore_allowed, up, write_sysctls
from mission_control.lab.stack import Stack
from mission_control.lab.topology import Link, Topology

PREFIX = "mc."
"""Prefix of the names of all our namespaces."""
PORTS_PER_BUFFER = 12
"""Ports of a switch that share a buffer, where it is shared (paper 003)."""
ETHERNET_BYTES = 14
BURST_FRAMES = 2
"""Burst of a token bucket in frames: with fewer it cannot keep its rate (FACTS)."""
QUEUE_BYTES = 16 << 20
"""Queue of the token bucket: never full, because the switch port's program drops packets before it."""
SYSCTLS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv4/tcp_no_metrics_save": "1",
}
"""Settings of every namespace. All runs begin alike: the kernel saves no metrics of earlier connections."""
FIREWALL = {"net/bridge/bridge-nf-call-iptables": "1"}
"""Settings of a switch. A packet that passes the bridge's firewall, even without rules, no longer counts as queued in
its sender. Otherwise each host's TCP treats the switch's queue as the host's (TCP small queues): 16 senders lose
nothing, and there is no incast (docs/measurements/lab/frames-past-firewall.md)."""
SUBFLOWS_MAX = 8
"""The kernel's limit."""
LINKS_S = 10
"""Seconds for links to come up."""


class Lab:
    """A data centre of network namespaces; as a context manager it removes itself at the end.

    Args:
        topology: the hosts, switches and links; see :mod:`mission_control.lab.topology`.
        name: by default the kind of topology, and a number where that name is taken.
        stack: TCP settings of the hosts' kernels.

    Raises:
        PrerequisiteMissing: the user is not root, or something that a lab needs is missing.
    """

    def __init__(self, topology: Topology, name: str | None = None, stack: Stack | None = None):
        require()
        self.topology = topology
        self.stack = stack or Stack()
        self._named = name is not None
        self._delays: _native.Delays | None = None
        self.name = name or free_name(topology.kind)
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", self.name):
            raise BadInput(f"{self.name!r} is no name of a lab: use lower-case letters, digits and -")

    @staticmethod
    def open(name: str | None = None) -> Lab:
        """Find a running lab; by default the only one.

        Raises:
            BadInput: there is none of this name, or there are several.
        """
        require()
        known = up()
        if name is None:
            if len(known) != 1:
                raise BadInput(
                    "no lab is up: mission lab up star"
                    if not known
                    else f"which lab? Name one of {', '.join(known)}, as in --name {known[0]}"
                )
            (name,) = known
        if name not in known:
            raise BadInput(f"there is no lab {name!r}: {', '.join(known) or 'none is up'}")
        return Lab(Topology.from_dict(json.loads((STATE / f"{name}.json").read_text())["topology"]), name)

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def host(self, name: str) -> Host:
        """
        Raises:
            BadInput: the lab has no such host.
        """
        if name not in self.topology.hosts:
            raise BadInput(
                f"lab {self.name} has no host {name!r}: {self.topology.hosts[0]} to {self.topology.hosts[-1]}"
            )
        return Host(self, name)

    def namespace(self, node: str) -> str:
        return f"{PREFIX}{self.name}.{node}"

    # --- up and down ------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Make the lab, or leave nothing.

        Raises:
            BadInput: a lab of this name is up.
        """
        self.claim()
        try:
            self.make()
        except BaseException:
            self.down()
            raise

    def claim(self) -> None:
        """Reserve its name before anything is made, so that the remains of a crash can be found.

        Raises:
            BadInput: a lab of this name is up.
        """
        STATE.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                self.state.touch(exist_ok=False)
                break
            except FileExistsError:
                if self._named:
                    hint = f"mission lab down {self.name}, or give another --name"
                    raise BadInput(f"lab {self.name} is up: {hint}") from None
                # Another process has reserved the name since.
                self.name = free_name(self.topology.kind)
        result = {"name": self.name, "topology": self.topology.as_dict(), "pid": os.getpid()}
        try:
            self.state.write_text(json.dumps(result))
        except BaseException:
            self.state.unlink(missing_ok=True)
            raise

    def make(self) -> None:
        """Make its namespaces and links."""
        self.hosts_file.write_text(self.hosts_text())
        with locked():
            congestion.provide()
        delayed = delay.delayed(self.topology)
        nodes = (*self.topology.hosts, *self.topology.switches, *((delay.NODE,) if delayed else ()))
        lines = [f"netns add {self.namespace(node)}" for node in nodes]
        lines += [line for link in self.topology.links for line in self.link_lines(link, link in delayed)]
        namespaces.batch("ip", lines)
        with allowed(self.stack.congestion_control), ThreadPoolExecutor(os.cpu_count()) as pool:
            for done in [pool.submit(self.set_up_host, host) for host in self.topology.hosts]:
                done.result()
            for done in [pool.submit(self.set_up_switch, switch) for switch in self.topology.switches]:
                done.result()
        if delayed:
            self._delays = delay.begin(self)
        self.wait_for_links()

    def down(self) -> None:
        """Remove it completely, whatever its state; kill what runs in it."""
        if self._delays is not None:
            self._delays.close()  # open sockets would keep their namespace
            self._delays = None
        # More than once: a process that was killed while it made the lab may still have been creating a namespace.
        while left := namespaces.names(f"{PREFIX}{self.name}."):
            namespaces.remove(left)
        for path in (self.hosts_file, self.state):
            path.unlink(missing_ok=True)
        with locked():
            restore_allowed()
            if not up():
                congestion.withdraw()

    @property
    def state(self) -> Path:
        return STATE / f"{self.name}.json"

    @property
    def hosts_file(self) -> Path:
        return STATE / f"{self.name}.hosts"

    def hosts_text(self) -> str:
        """Return the content of ``/etc/hosts`` inside the lab."""
        own = [f"{self.topology.address(host)} {host}" for host in self.topology.hosts]
        return "\n".join(["127.0.0.1 localhost", *own]) + "\n"

    def link_lines(self, link: Link, delayed: bool) -> list[str]:
        """Return the commands that make a link: a pair of interfaces, or two pairs with a delay line between them."""
        on_a, on_b = self.ends(link)
        middle = delay.ends(link) if delayed else ()
        names = (on_a, *middle, on_b)
        nodes = (link.a, *(delay.NODE for _ in middle), link.b)
        own = f"mtu {self.topology.mtu} gso_max_segs 1"
        placed = [f"{name} netns {self.namespace(node)} {own}" for name, node in zip(names, nodes, strict=True)]
        return [
            f"link add {one} type veth peer name {other}" for one, other in zip(placed[::2], placed[1::2], strict=True)
        ]

    def ends(self, link: Link) -> tuple[str, str]:
        """Return the names of the interfaces at both ends: at a host by the path, at a switch by the other node."""

        def end(node: str, other: str) -> str:
            if node in self.topology.hosts:
                return self.topology.interface(link.path)
            return f"{other}-{link.path + 1}" if self.topology.bonded and link.path else other

        return end(link.a, link.b), end(link.b, link.a)

    def links_of(self, node: str) -> list[tuple[str, Link]]:
        """Return the links that end at a node, and the names of its interfaces there."""
        own = []
        for link in self.topology.links:
            for end, name in zip((link.a, link.b), self.ends(link), strict=True):
                if end == node:
                    own.append((name, link))
        return own

    def set_up_host(self, host: str) -> None:
        lines = ["link set lo up"]
        for interface, link in self.links_of(host):
            path = 0 if self.topology.bonded else link.path
            address = self.topology.address(host, path)
            lines.append(f"link set {interface} address {mac(address)} up")
            if path != link.path:
                continue  # it has no address of its own
            lines.append(f"addr add {address}/24 dev {interface}")
            if attributes := self.stack.route():
                network = address.rpartition(".")[0] + ".0/24"
                lines.append(
                    f"route change {network} dev {interface} proto kernel scope link src {address} {attributes}"
                )
            # The machine has one neighbour table for all namespaces: permanent entries are never evicted.
            for other in self.topology.hosts:
                if other != host:
                    address = self.topology.address(other, path)
                    lines.append(f"neigh add {address} lladdr {mac(address)} dev {interface} nud permanent")
        if self.topology.paths > 1:
            # Every host announces its further addresses to its peers, and opens a subflow to each announced address.
            lines.append(f"mptcp limits set subflow {SUBFLOWS_MAX} add_addr_accepted {SUBFLOWS_MAX}")
            further = [link.path for _, link in self.links_of(host) if link.path]
            lines += [
                f"mptcp endpoint add {self.topology.address(host, path)} dev eth{path} signal" for path in further
            ]
        namespaces.batch("ip", lines, self.namespace(host))
        namespaces.batch("tc", self.pacing(self.links_of(host)), self.namespace(host))

        def finish() -> None:
            write_sysctls({**SYSCTLS, **self.stack.sysctls()})
            if self.topology.delay_us:
                for interface, _ in self.links_of(host):
                    _native.checksums_off(interface)
            if self.topology.bonded:
                # Frames that arrive at the second link carry the first's hardware address.
                write_sysctls({f"net/ipv4/conf/{name}/rp_filter": "0" for name in ("all", "eth0", "eth1")})
                _native.bond([(socket.if_nametoindex("eth0"), socket.if_nametoindex("eth1"))])

        namespaces.inside(self.namespace(host), finish)

    def set_up_switch(self, switch: str) -> None:
        links = self.links_of(switch)
        lines = ["link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up"]
        lines += [f"link set {interface} master br0 up" for interface, _ in links]
        namespaces.batch("ip", lines, self.namespace(switch))
        namespaces.batch("tc", self.pacing(links), self.namespace(switch))
        if self.topology.bonded:
            namespaces.batch("bridge", self.forwarding(links), self.namespace(switch))

        def build() -> None:
            write_sysctls(SYSCTLS)
            if not Path("/proc/sys/net/bridge").exists():
                raise PrerequisiteMissing("switches need br_netfilter (mission lab check): modprobe br_netfilter")
            write_sysctls(FIREWALL)
            port = self.topology.port
            size = PORTS_PER_BUFFER if port.shared_bytes else 1
            members = [(socket.if_nametoindex(name), self.port_settings(link)) for name, link in links]
            groups = [members[first : first + size] for first in range(0, len(members), size)]
            shared = {"shared_bytes": port.shared_bytes, "alpha": port.alpha}
            _native.Switch.build(json.dumps([{**shared, "ports": group} for group in groups]))
            if self.topology.bonded:
                _native.bond([(socket.if_nametoindex(name), socket.if_nametoindex(f"{name}-2")) for name in first])

        first = [name for name, link in links if link.path == 0]
        namespaces.inside(self.namespace(switch), build)

    def forwarding(self, links: list[tuple[str, Link]]) -> list[str]:
        """Configure the bridge's forwarding for a host with bonded links: to the first link, which distributes packets
        in turn. If the bridge learnt addresses, the entry would change with every packet."""
        lines = [f"link set dev {name} learning off flood off" for name, _ in links]
        for name, link in links:
            if link.path == 0:
                lines.append(f"fdb replace {mac(self.topology.address(link.a))} dev {name} master static")
        return lines

    def wait_for_links(self, only: Collection[tuple[str, str]] | None = None) -> None:
        """Wait until every switch port forwards, and every interface sends: the kernel needs up to a second for that,
        and drops packets before.

        Args:
            only: these interfaces of these nodes.
        """
        deadline = time.monotonic() + LINKS_S
        between = (delay.NODE,) if delay.delayed(self.topology) else ()
        nodes = (
            (*self.topology.switches, *between, *self.topology.hosts) if only is None else [node for node, _ in only]
        )

        def awaited(node: str) -> list[str]:
            down = namespaces.interfaces_down(self.namespace(node))
            return [name for name in down if name != "br0" and (only is None or (node, name) in only)]

        for node in nodes:
            while down := awaited(node):
                if time.monotonic() > deadline:
                    raise namespaces.Failed(f"interfaces {', '.join(down)} of {node} do not come up")
                time.sleep(0.02)

    @property
    def burst_bytes(self) -> int:
        return BURST_FRAMES * (self.topology.mtu + ETHERNET_BYTES)

    def pacing(self, links: list[tuple[str, Link]]) -> list[str]:
        """Put a token bucket on each interface: both directions of a link have its rate."""
        shape = f"burst {self.burst_bytes} limit {QUEUE_BYTES}"
        return [f"qdisc replace dev {name} root tbf rate {link.bits_per_second}bit {shape}" for name, link in links]

    def port_settings(self, link: Link) -> dict[str, int]:
        port = self.topology.port
        return {
            "bytes_per_second": link.bits_per_second // 8,
            "limit_bytes": port.buffer_bytes,
            "ecn_bytes": port.ecn_bytes,
            "mtu_bytes": self.topology.mtu + ETHERNET_BYTES,
            "burst_bytes": self.burst_bytes,
        }

    # --- while it is up ---------------------------------------------------------------------------------------------

    def ports(self) -> list[dict[str, Any]]:
        """Return the counters of every switch port; :func:`mission_control.lab.ports.counted`."""
        return ports.counted(self)

    def trace(self, seconds: float) -> Iterator[tuple[float, str, str, int, int]]:
        """Sample the lengths of queues; :func:`mission_control.lab.ports.trace`."""
        return ports.trace(self, seconds)

    def delays(self) -> dict[str, Any] | None:
        """Return the counters of its delay lines (``mission_kernel::delay::Counted``); ``None`` if it has none, or if
        they belong to another process."""
        return delay.counted(self._delays)

    def link_of(self, host: str, path: int = 0) -> Link:
        """
        Raises:
            BadInput: the host has no link on that path.
        """
        found = [link for _, link in self.links_of(self.host(host).name) if link.path == path]
        if not found:
            raise BadInput(f"{host} has no link on path {path}: it has {self.topology.paths} of them, from 0")
        return found[0]

    def cut(self, host: str, path: int = 0) -> None:
        """Take a host's link down, as if its cable were unplugged."""
        self.require_own_links()
        self.turn(self.link_of(host, path), "down")

    def kill(self, host: str) -> None:
        """Let a host die: cut its links, and kill its programs without notice."""
        own = self.host(host).name
        for _, link in self.links_of(own):
            self.turn(link, "down")
        for pid, node in self.processes().items():
            if node == own:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def restore(self, host: str, path: int = 0) -> None:
        """Bring a link up again that was cut."""
        link = self.link_of(host, path)
        own, port = self.ends(link)
        self.turn(link, "up")
        self.wait_for_links({(link.a, own), (link.b, port)})

    def turn(self, link: Link, state: str) -> None:
        """Turn the switch's end of a host's link ``up`` or ``down``. If the link has a delay line, turn the middle,
        too: there the host detects the state, and frames under way are refused."""
        if self.topology.delay_us:
            middle = [f"link set {name} {state}" for name in delay.ends(link)]
            namespaces.batch("ip", middle, self.namespace(delay.NODE))
        namespaces.batch("ip", [f"link set {self.ends(link)[1]} {state}"], self.namespace(link.b))

    def require_own_links(self) -> None:
        """
        Raises:
            BadInput: links are bonded: the bond would not detect that one is cut, and half of the packets would be
                lost.
        """
        if self.topology.bonded:
            raise BadInput("bonded links cannot be cut: the bond would not switch to the other link; use two-path")

    def slow(self, host: str, bits_per_second: int, path: int = 0) -> None:
        """Change the rate of a host's link, in both directions."""
        link = replace(self.link_of(host, path), bits_per_second=bits_per_second)
        interface, port = self.ends(link)
        namespaces.batch("tc", self.pacing([(interface, link)]), self.namespace(host))
        namespaces.batch("tc", self.pacing([(port, link)]), self.namespace(link.b))
        rate = {"bytes_per_second": link.bits_per_second // 8}
        ports.change(self, link.b, lambda name, settings: {**settings, **rate} if name == port else settings)

    def mark(self, ecn_bytes: int) -> None:
        """Change the ECN threshold of every port of every switch; 0: no marks."""
        for switch in self.topology.switches:
            ports.change(self, switch, lambda _, settings: {**settings, "ecn_bytes": ecn_bytes})

    def resize(self, buffer_bytes: int) -> None:
        """Change the buffer of every port of every switch."""
        for switch in self.topology.switches:
            ports.change(self, switch, lambda _, settings: {**settings, "limit_bytes": buffer_bytes})

    def processes(self) -> dict[int, str]:
        """Return the processes in the lab, and the node of each."""
        prefix = self.namespace("")
        running = namespaces.processes(namespaces.names(prefix))
        return {pid: name.removeprefix(prefix) for pid, name in running.items()}


def down_all() -> list[str]:
    """Remove all labs, and our namespaces that belong to no lab."""
    gone = up()
    for name in gone:
        with suppress(FileNotFoundError):
            Lab.open(name).down()
    namespaces.remove(namespaces.names(PREFIX))
    return gone
