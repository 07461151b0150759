"""`mission bench report`: the numbers of the front page of docs/measurements.md, measured again on this machine.

Each number has a command, which anybody can type. The report runs them one after the other and reads their JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mission_control.environment import describe

ENDS_WITHIN_S = 60.0
"""An interrupted command has this time to take down its lab, which takes some seconds for 48 hosts."""
Found = tuple[float | None, float | None, float | None]
"""Value, lowest, highest; each may be absent."""


@dataclass(frozen=True)
class Row:
    """One number of the front page."""

    name: str
    """For ``--only``."""
    question: str
    unit: str
    command: str
    """As it is typed."""
    read: Callable[[str], Found]
    """Takes what the command prints on stdout."""
    takes: str
    """How long it takes on two cores (2026-11-28)."""
    needs: tuple[str, ...] = ()
    """Of :data:`NEEDS`."""


NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "root": ("run it as root", lambda: os.geteuid() == 0),
    "frames": ("pip install 'mission-control[bench]'", lambda: all(map(find_spec, ("pandas", "pyarrow")))),
    "cc": ("install a C compiler", lambda: shutil.which("cc") is not None),
    "etcd": ("install etcd", lambda: shutil.which("etcd") is not None),
    "checkout": ("run it in a checkout", lambda: Path("scenarios/gather.toml").exists()),
}
"""By name: what to do where it is missing, and whether it is there."""


def of_ratios(pattern: str) -> Callable[[str], Found]:
    """Read the ratios whose names match: one is the value; of several the lowest and the highest."""

    def read(text: str) -> Found:
        ratios = json.loads(text)["ratios"]
        found = [ratio for name, ratio in ratios.items() if re.fullmatch(pattern, name)]
        if not found:
            raise LookupError(f"no ratio is named {pattern!r}; there are {', '.join(ratios)}")
        return (found[0], None, None) if len(found) == 1 else (None, min(found), max(found))

    return read


def lost_cpu(text: str) -> Found:
    """Read the CPU time of workers with trivial tasks relative to Dask alone, in per cent more: the worst number of
    threads."""
    rows = json.loads(text)["ratios"]
    own = [row for row in rows if row["program"] == "tasks" and row["mode"] == "Mission Control"]
    worst = max((row for row in own if row["measured"] == "worker cpu"), key=lambda row: row["median"])
    return tuple(100 * (worst[name] - 1) for name in ("median", "low", "high"))


def of_study(kind: str, measure: str, variant: str) -> Callable[[str], Found]:
    """Read one measure of one variant of a study: `summary` (medians), or `comparisons` (ratios)."""

    def read(text: str) -> Found:
        entries = json.loads(text)[kind]
        found = [one for one in entries if (one["measure"], one["variant"]) == (measure, variant)]
        if not found:
            raise LookupError(f"the study has no {measure} of {variant}")
        if any(one["median"] is None for one in found):
            raise LookupError(f"no run of {variant} counts")
        if len(found) == 1:
            low, high = found[0]["low"], found[0]["high"]
            return found[0]["median"], *((None, None) if None in (low, high) or low == high else (low, high))
        medians = [one["median"] for one in found]
        return None, min(medians), max(medians)

    return read


def sentence(text: str) -> Found:
    """Read "median 3.2 s, most 3.9 s"."""
    matched = re.search(r"median ([\d.]+) s, most ([\d.]+) s", text)
    if matched is None:
        raise LookupError("the command printed no median")
    return float(matched[1]), None, float(matched[2])


ROWS = (
    Row(
        "shuffles",
        "How much faster is a shuffle of an unchanged program than Dask's on disk?",
        "times",
        "mission bench dask --size 1GiB --rounds 5 --case shuffle --case merge --case groupby --case sort "
        "--case rechunk",
        of_ratios(r".*: wall, Dask, on disk / Mission Control"),
        "25 min",
        ("frames",),
    ),
    Row(
        "merge-text",
        "How much faster is a merge on text columns?",
        "times",
        "mission bench dask --size 1GiB --rounds 5 --case merge-text",
        of_ratios(r".*: wall, Dask, on disk / Mission Control"),
        "8 min",
        ("frames",),
    ),
    Row(
        "messages",
        "How much faster are messages of 64 MiB than over `tcp://`?",
        "times",
        "mission bench messages --rounds 3",
        of_ratios(r"64(\.0)? MiB objects"),
        "2 min",
    ),
    Row(
        "messages-tls",
        "How much faster are messages of 64 MiB, encrypted, than over `tls://`?",
        "times",
        "mission bench messages --rounds 3",
        of_ratios(r"64(\.0)? MiB objects, encrypted"),
        "2 min",
    ),
    Row(
        "overhead",
        "How much CPU time of workers do trivial tasks lose, at the worst number of threads?",
        "%",
        "mission bench overhead --rounds 10",
        lost_cpu,
        "25 min",
    ),
    Row(
        "fetch",
        "How fast is a fetch over TCP, relative to a receiver in C?",
        "ratio",
        "mission bench transfer --rounds 5 --transport tcp --size 256MiB --no-workers",
        of_ratios(r"tcp fetch / C receiver, reused memory, 1 flows, 256 MiB"),
        "2 min",
        ("cc",),
    ),
    Row(
        "share",
        "Which fraction of the bytes has a job with priority 7 of 10?",
        "fraction",
        "mission run scenarios/weights/7-3.toml --quick",
        of_study("summary", "share", "7 to 3"),
        "1 min",
        ("checkout", "root"),
    ),
    Row(
        "gather",
        "How long does a gather of 47 senders take under `auto`, relative to all at once?",
        "ratio",
        "mission run scenarios/gather.toml --quick",
        of_study("comparisons", "gather_seconds", "auto"),
        "25 min",
        ("checkout", "root"),
    ),
    Row(
        "reads",
        "What goodput have synchronized reads under `auto`, of 100 Mbit/s, at every fan-in?",
        "Mbit/s",
        "mission run scenarios/incast-cure --quick",
        of_study("summary", "goodput", "auto"),
        "5 min",
        ("checkout", "root"),
    ),
    Row(
        "leader",
        "How soon do weights change after the service's leader was killed?",
        "s",
        "python -m tests.chaos_of_service --rounds 30 --only kill_the_leader",
        sentence,
        "5 min",
        ("checkout", "root", "etcd"),
    ),
    Row(
        "idle",
        "How much does a host send while nothing changes?",
        "bytes a second",
        "mission bench idle --rounds 2",
        lambda text: (json.loads(text)["more"], None, None),
        "3 min",
        ("root",),
    ),
)
"""In the order of the front page; a test holds the page to it."""


def measure(names: Sequence[str], say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run the commands of these rows, and read their numbers.

    Args:
        names: Of :data:`ROWS`; one command that two rows share is run once.
        say: Receives progress, a line each.

    Returns:
        ``rows``: name, question, unit, command, and value, lowest, highest (each may be ``None``), or ``why`` there are
        none; ``environment``; ``interrupted``: somebody stopped it, and this is what was measured until then.
    """
    interrupted = False
    printed: dict[str, str | None] = {}
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        if row.name not in names:
            continue
        entry = {"name": row.name, "question": row.question, "unit": row.unit, "command": row.command}
        missing = [NEEDS[need][0] for need in row.needs if not NEEDS[need][1]()]
        if missing:
            rows.append({**entry, "why": "; ".join(missing)})
            continue
        try:
            if row.command not in printed:
                say(f"{row.command} (about {row.takes})")
                printed[row.command] = output(row.command)
            value, lowest, highest = row.read(printed[row.command] or "")
            rows.append({**entry, "value": value, "lowest": lowest, "highest": highest})
        except (LookupError, ValueError, StopIteration) as error:
            rows.append({**entry, "why": str(error) or type(error).__name__})
        except KeyboardInterrupt:
            interrupted = True
            break
    return {"rows": rows, "environment": describe(), "interrupted": interrupted}


def output(command: str) -> str:
    """Run a command; return what it prints on stdout. Its progress goes to our stderr.

    Raises:
        LookupError: It failed.
    """
    words = command.split()
    if words[0] == "mission":
        words = [sys.executable, "-m", "mission_control", *words[1:], "--json"]
    else:
        words = [sys.executable, *words[1:]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        try:
            printed, _ = running.communicate()
        except KeyboardInterrupt:
            # It takes down its labs and clusters; a terminal has interrupted it, too.
            running.send_signal(signal.SIGINT)
            try:
                running.communicate(timeout=ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                running.kill()
            raise
    if running.returncode == 130:
        raise KeyboardInterrupt
    # Status 1 is of an expectation that did not hold: the number is there, and counts.
    if running.returncode not in (0, 1) or not printed.strip():
        raise LookupError(f"it ended with status {running.returncode}")
    return printed
