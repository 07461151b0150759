"""Runs the incast scenarios of a folder into one report, some of them side by side: links of one lab idle in timeouts
while those of another are full.

Each scenario runs in a process of its own, so that none waits for another's interpreter, nor for its report.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mission_control import interrupts
from mission_control.incast import report
from mission_control.incast.run import RESULT, accepted, conduct, worlds_of
from mission_control.scenario import BadInput, EnvironmentFailed, PrerequisiteMissing, Scenario

LABS = min(2, len(os.sched_getaffinity(0)))
"""Side by side unless told otherwise. One at 100 Mbit/s takes half a processor (docs/measurements.md)."""

LOOK_EVERY_S = 0.2
"""Whether all is over."""
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
        BadInput, PrerequisiteMissing: as :func:`mission_control.incast.run.conduct`, once the others have ended.
    """
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder} is not there: name the folder of a run to go on with")
    folder = folder or results / f"{time.strftime('%Y%m%d-%H%M%S')}-incast-{secrets.token_hex(2)}"
    # Who expects something of the goodput is measured alone: a lab beside it costs some per cent.
    alone = {name for name, scenario in scenarios.items() if expects(scenario)}
    over, progress = threading.Event(), Progress(say)
    running: dict[str, Future[dict[str, Any] | None]] = {}
    for count, names in ((labs, scenarios.keys() - alone), (1, alone)):
        with ThreadPoolExecutor(count) as pool:
            try:
                for name in sorted(names):
                    work = partial(conduct, scenarios[name], worlds or worlds_of(scenarios[name]))
                    work = partial(work, folder=folder / name, labs=min(count, len(names)))
                    running[name] = pool.submit(in_process, work, over, partial(progress, name))
                for done in as_completed([running[name] for name in names]):
                    interrupts.check()
                    if done.exception() is None and done.result():
                        # After each: whatever becomes of the others, these are drawn.
                        report.write_all(folder)
            except KeyboardInterrupt:
                over.set()
    if any(folder.glob(f"*/{RESULT}")):
        report.write_all(folder)
    for name, future in running.items():
        if error := future.exception():
            raise type(error)(f"{name}: {error}; go on with --resume {folder}")
    result = {name: own for name in running if (own := running[name].result()) is not None}
    every = list(result.values())
    return {
        "studies": {name: result[name] for name in scenarios if name in result},
        "results": str(folder),
        "interrupted": len(result) < len(scenarios) or any(entry["interrupted"] for entry in every),
        "ok": all(entry["ok"] for entry in every),
        "valid": all(entry["valid"] for entry in every),
    }


def expects(scenario: Scenario) -> bool:
    """
    Raises:
        BadInput: it describes no incast.
    """
    return any(entry.expect.goodput_of_one_flow_min for entry in accepted(scenario).values())


class Progress:
    """One line of what each scenario does that runs now."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._lines, self._lock = say, dict[str, str](), threading.Lock()

    def __call__(self, name: str, text: str) -> None:
        """``text``: empty once it has ended."""
        with self._lock:
            if text:
                self._lines[name] = text
            else:
                self._lines.pop(name, None)
            self._say(" | ".join(f"{name}: {text}" for name, text in self._lines.items()))


def in_process(
    work: Callable[..., dict[str, Any]], over: threading.Event, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """What it gives, from a process of its own; ``None`` where all was over before it began.

    Raises:
        BadInput, PrerequisiteMissing: as the work; its process has ended without a result.
    """
    if over.is_set():
        return None
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=conducted, args=(there, work))
    signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.FROM_OUTSIDE)  # inherited: until it has learned to obey
    process.start()
    there.close()
    try:
        result, last_word = None, False
        while result is None:
            if over.is_set() and not last_word:
                here.send("over")
                last_word = True
            if here.poll(LOOK_EVERY_S):
                word = here.recv()
                if isinstance(word, str):
                    say(word)
                else:
                    result = word
    except (EOFError, OSError):
        raise EnvironmentFailed("its process has ended") from None
    finally:
        here.close()
        process.join()
        say("")
    if isinstance(result, Exception):
        raise result
    return result


def conducted(there: Connection, work: Callable[..., dict[str, Any]]) -> None:
    """In a process of its own: sends what is done, then the result, or what is wrong. Ends early once something is said
    to it, or nobody is there any more."""
    interrupts.obey(there.poll)
    with suppress(BrokenPipeError):
        try:
            there.send(work(say=there.send))
        except (BadInput, EnvironmentFailed, PrerequisiteMissing) as error:
            there.send(error)
