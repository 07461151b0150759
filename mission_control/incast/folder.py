"""Runs the incast scenarios of a folder into one report, some of them side by side: links of one lab idle in timeouts
while those of another are full.

Each scenario runs in a process of its own, so that none waits for another's interpreter, nor for its report.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Lock
from typing import Any

from mission_control import interrupts
from mission_control.incast import report
from mission_control.incast.run import accepted, conduct, worlds_of
from mission_control.scenario import BadInput, Missing, Scenario

LABS = min(2, os.cpu_count() or 1)
"""Side by side unless told otherwise. One at 100 Mbit/s takes half a processor (docs/measurements.md)."""

SPAWN = multiprocessing.get_context("spawn")


def conduct_all(
    scenarios: dict[str, Scenario],
    worlds: Sequence[str] | None,
    *,
    results: Path = Path("results"),
    folder: Path | None = None,
    labs: int = LABS,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Gives the result of each under ``studies``, by name, and what all results have.

    Args:
        worlds: of all of them; ``None``: as each says.
        folder: of a run that is to go on.
        labs: scenarios that run at a time; those that expect something of the goodput run alone.
        say: is told what is done.

    Raises:
        BadInput, Missing: as :func:`mission_control.incast.run.conduct`.
    """
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder} is not there: name the folder of a run to go on with")
    folder = folder or results / f"{time.strftime('%Y%m%d-%H%M%S')}-incast-{secrets.token_hex(2)}"
    # Who expects something of the goodput is measured alone: a lab beside it costs some per cent.
    alone = {name for name, scenario in scenarios.items() if expects(scenario)}
    over = SPAWN.Event()
    progress = Progress(say)
    running: dict[str, Future[dict[str, Any] | None]] = {}
    for count, names in ((labs, scenarios.keys() - alone), (1, alone)):
        with ThreadPoolExecutor(count) as pool:
            for name in sorted(names):
                arguments = (scenarios[name], worlds or worlds_of(scenarios[name]), folder / name, over)
                running[name] = pool.submit(in_process, name, *arguments, partial(progress, name))
            try:
                for done in as_completed([running[name] for name in names]):
                    if done.result():
                        # After each: whatever becomes of the others, these are drawn.
                        report.write_all(folder)
            except KeyboardInterrupt:
                over.set()
            except BaseException:
                over.set()
                raise
    told = {name: own for name in scenarios if (own := running[name].result()) is not None}
    report.write_all(folder)
    every = list(told.values())
    return {
        "studies": told,
        "results": str(folder),
        "interrupted": len(told) < len(scenarios) or any(own["interrupted"] for own in every),
        "ok": all(own["ok"] for own in every),
        "valid": all(own["valid"] for own in every),
    }


def expects(scenario: Scenario) -> bool:
    """
    Raises:
        BadInput: it describes no incast.
    """
    return any(own.expect.goodput_of_one_flow_min for own in accepted(scenario).values())


class Progress:
    """One line of what each scenario does that runs now."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._lines, self._lock = say, dict[str, str](), Lock()

    def __call__(self, name: str, text: str) -> None:
        """``text``: empty once it has ended."""
        with self._lock:
            self._lines[name] = text
            if not text:
                del self._lines[name]
            self._say(" | ".join(f"{name}: {text}" for name, text in self._lines.items()))


def in_process(
    name: str, scenario: Scenario, worlds: Sequence[str], folder: Path, over: Event, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Its result; ``None`` where all was over before it began.

    Raises:
        BadInput, Missing: as ``conduct``; its process has ended without a result.
    """
    if over.is_set():
        return None
    here, there = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=conducted, args=(there, over, scenario, worlds, folder), name=name)
    process.start()
    there.close()
    try:
        while isinstance(told := here.recv(), str):
            say(told)
    except EOFError:
        raise Missing(f"{name}: its process has ended; go on with --resume {folder.parent}") from None
    finally:
        process.join()
        say("")
    if isinstance(told, Exception):
        raise told
    return dict(told)


def conducted(connection: Connection, over: Event, scenario: Scenario, worlds: Sequence[str], folder: Path) -> None:
    """In a process of its own: sends what is done, then the result, or what is wrong. Where nobody listens any more,
    the next word fails, and all that was made is taken down."""
    interrupts.obey(over)
    try:
        connection.send(conduct(scenario, worlds, folder=folder, say=connection.send))
    except (BadInput, Missing) as error:
        connection.send(error)
