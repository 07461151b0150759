"""DCTCP for all labs of this machine, where its kernel has none: registered with the first, gone with the last."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mission_control import _native

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
FOLDER = Path("/run/mission-control/bpf")
"""A file system of the kernel's in which what is registered stays when its process ends."""
PIN = FOLDER / "dctcp"


def provide() -> None:
    """Registers it unless there is one."""
    if "dctcp" in AVAILABLE.read_text().split():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(FOLDER):
        subprocess.run(["mount", "-t", "bpf", "mission-control", str(FOLDER)], check=True)
    _native.Dctcp().pin(str(PIN))


def withdraw() -> None:
    """Takes ours away; connections that use it go on to their ends."""
    if os.path.ismount(FOLDER):
        PIN.unlink(missing_ok=True)
        subprocess.run(["umount", str(FOLDER)], check=True)
        FOLDER.rmdir()
