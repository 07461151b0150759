"""`mission lab check`: the features of this machine that the lab uses, and the substitutes for missing ones."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mission_control import _native
from mission_control.lab import namespaces

TRIALS = "mc-check-"
TRIAL = f"{TRIALS}{os.getpid()}"
"""Namespace of the trials: one for each process, because two checks may run at the same time."""
LINK = "trial0"


@dataclass(frozen=True)
class Finding:
    what: str
    there: bool
    used: str
    """The feature."""
    needed: bool = False
    """The lab cannot work without it."""
    why: str = ""
    """Its purpose, or how to get it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check() -> list[Finding]:
    """Return all findings; trials run in a temporary namespace."""
    root = os.geteuid() == 0
    found = [Finding("root", root, "namespaces, links and eBPF need it", True, "" if root else "run it with sudo")]
    packages = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
    packages.update({"bridge": "iproute2", "chrt": "util-linux", "setpriv": "util-linux"})
    for program, package in packages.items():
        there = shutil.which(program) is not None
        found.append(Finding(program, there, program, True, "" if there else f"apt install {package}"))
    built = hasattr(_native, "Switch")
    hint = "" if built else "apt install clang libelf-dev zlib1g-dev pkg-config, then make kernel"
    found.append(Finding("built with eBPF", built, "switch ports", True, hint))
    btf = Path("/sys/kernel/btf/vmlinux").exists()
    found.append(
        Finding("BTF", btf, "eBPF programs find the kernel's fields", True, "" if btf else "CONFIG_DEBUG_INFO_BTF")
    )
    filtered = Path("/proc/sys/net/bridge").exists()
    found.append(
        Finding(
            "br_netfilter", filtered, "queues of switches are theirs", True, "" if filtered else "modprobe br_netfilter"
        )
    )
    multipath = "mptcp" in _native.carriers()
    found.append(Finding("Multipath TCP", multipath, "mptcp on two paths" if multipath else "tcp on one path"))
    if all(entry.there for entry in found if entry.needed):
        found += trials()
    return found


def trials() -> list[Finding]:
    with suppress(namespaces.Failed):  # Another process may remove them at the same time.
        namespaces.remove(left_behind())
    try:
        namespaces.batch("ip", [f"netns add {TRIAL}"])
    except namespaces.Failed as error:
        return [Finding("network namespaces", False, "", True, str(error))]
    try:
        found = [Finding("network namespaces", True, "hosts and switches", True)]
        link = tried("ip", f"link add {LINK} type veth peer name other0")
        found.append(Finding("veth", link, "links", True, "" if link else "CONFIG_VETH"))
        bridge = tried("ip", "link add br0 type bridge")
        found.append(Finding("bridge", bridge, "switches", True, "" if bridge else "CONFIG_BRIDGE"))
        tbf = tried("tc", f"qdisc replace dev {LINK} root tbf rate 100mbit burst 3028 limit 100000")
        found.append(Finding("tbf", tbf, "rates of links", True, "" if tbf else "CONFIG_NET_SCH_TBF"))
        port = switch_port() if link else "no link to try it on"
        found.append(Finding("eBPF at a port", not port, "buffers, ECN marks, queue lengths", True, port))
        # Standard qdiscs for which the port's program is the substitute.
        for name, shape, instead in (
            ("red", "limit 100000 avpkt 1000 bandwidth 100mbit ecn", "step marking by the port's own program"),
            ("netem", "delay 1ms", "delay lines of our own"),
            ("fq", "", "TCP's own pacing"),
        ):
            there = tried("tc", f"qdisc replace dev {LINK} root {name} {shape}")
            found.append(Finding(name, there, f"not used: {instead}"))
        return found
    finally:
        namespaces.remove([TRIAL])


def left_behind() -> list[str]:
    """Return the namespaces of processes that ended during their trials."""
    return [name for name in namespaces.names(TRIALS) if not Path("/proc", name.removeprefix(TRIALS)).exists()]


def tried(program: str, line: str) -> bool:
    words = [program, "-n", TRIAL, *line.split()]
    return subprocess.run(words, capture_output=True).returncode == 0


def switch_port() -> str:
    """Return why no program can be attached to a port; empty: one can."""

    def build() -> None:
        settings = {"bytes_per_second": 1, "limit_bytes": 1, "mtu_bytes": 1}
        _native.Switch.build(json.dumps([{"ports": [[socket.if_nametoindex(LINK), settings]]}]))

    return reason(build)


def reason(trial: Callable[[], None]) -> str:
    try:
        namespaces.inside(TRIAL, trial)
    except OSError as error:
        return str(error)
    return ""
