"""Control groups (version 2) in which programs are run, so that their sockets can be told from all others."""

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
"""Age from which an empty group of a process that is gone is stale."""


def root() -> Path:
    """Where the kernel's groups are.

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
    """A group of its own; what is left in it at the end is killed."""
    folder = root() / f"{PREFIX}{name}"
    folder.mkdir()
    try:
        yield folder
    finally:
        remove(folder)


def remove_stale(kind: str) -> None:
    """Remove empty groups `kind.PID...` whose process crashed; leave those of a process that lives, or is of late."""
    for folder in root().glob(f"{PREFIX}{kind}.*"):
        pid = folder.name.removeprefix(f"{PREFIX}{kind}.").partition(".")[0]
        # The kernel refuses to remove a group with programs in it. A new group is empty for a moment, and its process
        # may have another number here, as from a container.
        with suppress(OSError):
            if not Path("/proc", pid).exists() and time.time() - folder.stat().st_mtime > STALE_S:
                folder.rmdir()


def remove(folder: Path) -> None:
    """Ends what runs in a group, and removes it."""
    with suppress(FileNotFoundError):
        (folder / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + namespaces.END_S
        while (folder / "cgroup.procs").read_text():
            if time.monotonic() > deadline:
                raise namespaces.Failed(f"what runs in {folder} does not end")
            time.sleep(0.01)
        os.rmdir(folder)
