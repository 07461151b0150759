"""Worlds: where a scenario runs. A new one is one file here and one line in :data:`WORLDS`."""

from __future__ import annotations

from mission_control.worlds.cluster import cluster
from mission_control.worlds.lab import in_lab
from mission_control.worlds.local import local

WORLDS = {"local": local, "lab": in_lab, "cluster": cluster}
"""By name: context managers that take the scenario and a scheduler's address, and give a :class:`Site`."""
