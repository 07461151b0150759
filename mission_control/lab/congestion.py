"""DCTCP for all labs of this machine if its kernel has none: registered with the first lab, removed with the last."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mission_control import _native

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
FOLDER = Path("/run/mission-control/bpf")
"""A file system of the kernel that keeps a registered algorithm after its process ends."""
PIN = FOLDER / "dctcp"


def provide() -> None:
    """Register DCTCP unless the kernel has one."""
    if "dctcp" in AVAILABLE.read_text().split():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(FOLDER):
        subprocess.run(["mount", "-t", "bpf", "mission-control", str(FOLDER)], check=True)
    _native.Dctcp().pin(str(PIN))


def withdraw() -> None:
    """Remove our DCTCP; existing connections keep it."""
    if os.path.ismount(FOLDER):
        PIN.unlink(missing_ok=True)
        subprocess.run(["umount", str(FOLDER)], check=True)
        FOLDER.rmdir()
