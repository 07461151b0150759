"""Network namespaces: create, enter and remove them, and find the processes in them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

Result = TypeVar("Result")

FOLDER = Path("/run/netns")
CLONE_NEWNET = 0x40000000
END_S = 5
"""Seconds for killed processes to end."""


class Failed(RuntimeError):
    """A command of the system failed; the text has the command and its error."""


def batch(program: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run commands of ``ip`` or ``tc`` in one process, which ends with this one: otherwise, after this process is
    killed, the commands would continue while another process removes the lab."""
    text = "\n".join(lines) + "\n"
    inside = ["-n", namespace] if namespace else []
    command = ["setpriv", "--pdeathsig", "KILL", program, *inside, "-batch", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        where = f" in {namespace}" if namespace else ""
        raise Failed(f"{program} -batch{where}: {done.stderr.strip() or 'failed'}")


def inside(namespace: str, work: Callable[[], Result]) -> Result:
    """Call ``work`` in a thread that is in the namespace."""
    result: list[Result] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            enter(namespace)
            result.append(work())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run, name=f"in {namespace}")
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return result[0]


def enter(namespace: str) -> None:
    """Move the calling thread into the namespace; threads that it starts are there, too."""
    with open(FOLDER / namespace) as own:
        enter_file(own)


def enter_file(namespace: IO[str]) -> None:
    """As :func:`enter`, for an open file of a namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"namespace {namespace.name}: {os.strerror(number)}")


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Run the block in the namespace: the calling thread, and the threads that it starts."""
    with open("/proc/thread-self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            enter_file(before)


def interfaces_down(namespace: str) -> list[str]:
    """Return interfaces that do not carry traffic yet, except loopback."""
    result = subprocess.run(
        ["ip", "-n", namespace, "-j", "-d", "link", "show"], capture_output=True, text=True, check=True
    )
    down = []
    for link in json.loads(result.stdout):
        port = link.get("linkinfo", {}).get("info_slave_data", {}).get("state", "forwarding")
        if link["ifname"] != "lo" and (link["operstate"] != "UP" or port != "forwarding"):
            down.append(link["ifname"])
    return down


def names(prefix: str) -> list[str]:
    return sorted(path.name for path in FOLDER.glob(f"{prefix}*")) if FOLDER.exists() else []


def processes(namespaces: Iterable[str]) -> dict[int, str]:
    """Return the processes in these namespaces, with their namespace."""
    inodes = inodes_of(namespaces)
    return {pid: inodes[inode] for pid, inode in within(inodes).items()}


def inodes_of(namespaces: Iterable[str]) -> dict[int, str]:
    """Return the kernel's identifiers of namespaces, with their names."""
    found = {}
    for name in namespaces:
        with suppress(OSError):
            found[(FOLDER / name).stat().st_ino] = name
    return found


def within(inodes: Container[int]) -> dict[int, int]:
    """Return the processes in these network namespaces, including namespaces that have lost their name."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                inode = (folder / "ns/net").stat().st_ino
                if inode in inodes:
                    found[int(folder.name)] = inode
    return found


def remove(namespaces: list[str]) -> None:
    """Kill what runs in these namespaces, and remove them with all their interfaces."""
    inodes = inodes_of(namespaces)
    end(inodes)
    if namespaces:
        batch("ip", (f"netns del {name}" for name in namespaces))
        # A process may have entered just before; no other can any more.
        end(inodes)


def end(inodes: Container[int]) -> None:
    """Kill what runs in these network namespaces until nothing does."""
    deadline = time.monotonic() + END_S
    while running := within(inodes):
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise Failed(f"processes {sorted(running)} do not end")
        time.sleep(0.01)
