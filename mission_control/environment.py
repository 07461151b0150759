"""The environment of a measurement: what a reader needs to judge it, and nothing that identifies the machine's
owner."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any


def describe(seed: int | None = None) -> dict[str, Any]:
    """Return kernel, congestion control, cores, memory, versions, commit and seed."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "congestion_controls_allowed": _read("/proc/sys/net/ipv4/tcp_allowed_congestion_control").split(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mission-control", "dask", "distributed", "numpy")},
        "commit": _commit(),
        "seed": seed,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    """The commit of the checkout that this package runs from; `None` for an installed one. It is read once, because the
    code of a running study is not affected by later commits."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
