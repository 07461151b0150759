"""Resources that all labs of a machine share: names, the congestion control that everybody may use, settings of
namespaces."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mission_control import _native
from mission_control.errors import BadInput, PrerequisiteMissing
from mission_control.lab import congestion

STATE = Path("/run/mission-control/labs")
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
ALLOWED_BEFORE = STATE / "allowed"
"""The value before a lab changed it for a moment."""


def up() -> list[str]:
    """Return the names of the labs that are up, or that a crash left."""
    known = {path.stem for path in STATE.glob("*.json")}
    return sorted(known)


def free_name(kind: str) -> str:
    taken = up()
    names = (kind if number == 1 else f"{kind}-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def require() -> None:
    """
    Raises:
        PrerequisiteMissing: something that a lab and `mission exec` need is missing; the text says how to get it.
    """
    if os.geteuid() != 0:
        raise PrerequisiteMissing("this needs root: run it with sudo")
    if not hasattr(_native, "Switch"):
        raise PrerequisiteMissing(
            "built without eBPF: apt install clang libelf-dev zlib1g-dev pkg-config, then make kernel"
        )


@contextmanager
def locked() -> Iterator[None]:
    """Lock the machine-wide resources: one process at a time changes them."""
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def allowed(congestion_control: str) -> Iterator[None]:
    """Let namespaces choose this default meanwhile: the machine has to allow it to everybody."""
    if congestion_control not in congestion.AVAILABLE.read_text().split():
        raise BadInput(f"this kernel has no congestion control {congestion_control!r}: mission lab check")
    with locked():
        restore_allowed()
        before = ALLOWED.read_text().strip()
        if congestion_control not in before.split():
            # Save the old value first: after a crash the next process restores it.
            ALLOWED_BEFORE.write_text(before)
            write(ALLOWED, f"{before} {congestion_control}")
        try:
            yield
        finally:
            restore_allowed()


def restore_allowed() -> None:
    """Restore what the machine allowed before a lab changed it; the caller holds the lock."""
    with suppress(FileNotFoundError):
        there = congestion.AVAILABLE.read_text().split()
        write(ALLOWED, " ".join(name for name in ALLOWED_BEFORE.read_text().split() if name in there))
        ALLOWED_BEFORE.unlink()


def write_sysctls(values: dict[str, str]) -> None:
    """In the namespace of the calling thread.

    Raises:
        PrerequisiteMissing: this kernel does not accept a setting.
    """
    for name, value in values.items():
        try:
            write(Path("/proc/sys") / name, value)
        except OSError as error:
            setting = name.replace("/", ".")
            raise PrerequisiteMissing(f"this kernel does not take {setting} = {value}: {error.strerror}") from None


def write(path: Path, value: str) -> None:
    """Write without a buffer, so that the kernel's refusal raises an error."""
    with open(path, "wb", buffering=0) as file:
        file.write(value.encode())
