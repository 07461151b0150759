"""Worlds: where jobs run. To add one, add a file here and one line in :data:`WORLDS` and in :data:`READS`."""

from __future__ import annotations

from typing import Any

from mission_control.worlds.cluster import cluster
from mission_control.worlds.lab import in_lab
from mission_control.worlds.local import local

WORLDS: dict[str, Any] = {"local": local, "lab": in_lab, "cluster": cluster}
"""Context managers by the name of their world. Each takes the scenario, a scheduler's address, and whether a policy may
be installed, and gives a :class:`Site`."""

READS: dict[str, tuple[str, ...]] = {
    "local": (
        "topology.hosts",
        "topology.threads",
        "topology.memory_limit",
        "topology.link_rate",
        "workload.",
        "control.",
    ),
    "lab": ("",),
    # Policy and flows are compared with the cluster's.
    "cluster": ("workload.", "control."),
}
"""Keys, or prefixes of keys, that each world reads."""
