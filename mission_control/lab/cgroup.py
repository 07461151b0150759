"""Control groups (version 2) for programs, so that their sockets can be distinguished from all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mission_control.errors import PrerequisiteMissing
from mission_control.lab import namespaces

PREFIX = "mission-control."
STALE_S = 60
"""Age from which an empty group of an ended process is stale."""


def root() -> Path:
    """Return the folder of the kernel's groups.

    Raises:
        PrerequisiteMissing: no such file system is mounted.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(folder)
    raise PrerequisiteMissing("no cgroup2 file system is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")


@contextmanager
def group(name: str) -> Iterator[Path]:
    """Make a group; kill what is left in it at the end."""
    folder = root() / f"{PREFIX}{name}"
    folder.mkdir()
    try:
        yield folder
    finally:
        remove(folder)


def remove_stale(kind: str) -> None:
    """Remove empty groups `kind.PID...` of crashed processes; leave those of running processes, and recent ones."""
    for folder in root().glob(f"{PREFIX}{kind}.*"):
        pid = folder.name.removeprefix(f"{PREFIX}{kind}.").partition(".")[0]
        # The kernel refuses to remove a group with programs in it. A new group is empty for a moment, and its process #
        # may have another number here if it runs in a container.
        with suppress(OSError):
            if not Path("/proc", pid).exists() and time.time() - folder.stat().st_mtime > STALE_S:
                folder.rmdir()


def remove(folder: Path) -> None:
    """Kill what runs in a group, and remove it."""
    with suppress(FileNotFoundError):
        (folder / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + namespaces.END_S
        while (folder / "cgroup.procs").read_text():
            if time.monotonic() > deadline:
                raise namespaces.Failed(f"what runs in {folder} does not end")
            time.sleep(0.01)
        os.rmdir(folder)
