"""Commands for a mitigation, and whether this machine's kernel accepts them."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mission_control.incast import quantities
from mission_control.lab import namespaces

SYSCTLS = Path("/proc/sys")
CONGESTION_CONTROL = "tcp_congestion_control"
NETWORK = (
    "link add eth0 type veth peer name eth1",
    "link set eth1 up",
    "addr add 10.0.0.1/24 dev eth0",
    "link set eth0 up",
)
"""Interfaces and routes that the lines refer to, in a temporary namespace."""


def of(kind: str, value: float) -> list[str]:
    """Return commands for every receiver or sender of the cluster, and lines for files of an engine's settings."""
    if kind == "flows":
        flows = max(1, round(value))
        return [
            "mission_control.install(client, flows_per_host='auto')  # Mission Control finds the number",
            f"spark.reducer.maxReqsInFlight {flows}                        # receivers: Spark, spark-defaults.conf",
            f"mapreduce.reduce.shuffle.parallelcopies={flows}               # receivers: Hadoop, mapred-site.xml",
            f"distributed.worker.connections.outgoing: {flows}             # receivers: Dask alone, its configuration",
        ]
    if kind == "rto-min":
        return [
            # The network and the device are those that `ip route get RECEIVER` shows.
            f"ip route change 10.0.0.0/24 dev eth0 rto_min {value * 1e3:.0f}ms   # senders, the route to the receivers",
            f"sysctl -w net.ipv4.tcp_rto_min_us={value * 1e6:.0f}   # or all of a host (Linux 6.11); restart listeners",
        ]
    if kind == "dctcp":
        return [
            "sysctl -w net.ipv4.tcp_ecn=1                           # both ends",
            "mission exec --transport dctcp -- CMD                  # senders, one program",
            "sysctl -w net.ipv4.tcp_congestion_control=dctcp        # senders, all, where the kernel has it",
            f"# switches: mark (ECN) packets that find {quantities.size(round(value))} in their queue or more",
        ]
    if kind == "window":
        return [
            f"mission exec --window {value:.0f}B -- CMD                   # receivers, one program",
            f"sysctl -w net.ipv4.tcp_rmem='4096 {2 * value:.0f} {2 * value:.0f}'     # receivers, all: half of it",
        ]
    return ["# nothing to type: another switch, or one shared buffer with a larger part for a port"]


def refused(lines: Sequence[str]) -> dict[str, str]:
    """Return the lines that this kernel does not accept, with its reason. With root, each line is executed in a
    temporary namespace; without, settings are only looked up. Lines for switches and engines are skipped."""
    own = {line: words for line in lines if (words := line.partition("#")[0].split())[:2] in KNOWN}
    if not own:
        return {}
    namespace = f"mc.advice-{secrets.token_hex(2)}"
    try:
        namespaces.batch("ip", [f"netns add {namespace}"])
    except (OSError, namespaces.Failed):
        return {line: why for line, words in own.items() if (why := looked_up(words))}
    try:
        namespaces.batch("ip", NETWORK, namespace)
        return {line: why for line, words in own.items() if (why := typed(words, namespace))}
    except namespaces.Failed:
        return {line: why for line, words in own.items() if (why := looked_up(words))}
    finally:
        namespaces.remove([namespace])


KNOWN = (["sysctl", "-w"], ["ip", "route"])


def looked_up(words: Sequence[str]) -> str:
    """Return why a setting is impossible; empty: it is possible, as far as is known."""
    if words[0] != "sysctl" or setting(words)[0].exists():
        return ""
    return "this kernel has no such setting"


def typed(words: Sequence[str], namespace: str) -> str:
    """Execute a line in a namespace; return the system's error, or an empty text."""
    if words[0] == "ip":
        done = subprocess.run(["ip", "-n", namespace, *words[1:]], capture_output=True, text=True)
        return done.stderr.strip()
    path, value = setting(words)
    if path.name == CONGESTION_CONTROL:
        # A namespace only accepts algorithms that everybody may use; the host, for which the line is meant, accepts
        # all.
        known = value in path.with_name("tcp_available_congestion_control").read_text().split()
        return "" if known else "this kernel has no such congestion control"
    try:
        namespaces.inside(namespace, partial(path.write_text, value))
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def setting(words: Sequence[str]) -> tuple[Path, str]:
    """Return the file and the value of ``sysctl -w NAME=VALUE``."""
    name, _, value = " ".join(words[2:]).partition("=")
    return SYSCTLS / name.replace(".", "/"), value.strip("'")
