"""Scenarios in parallel: the links of one lab are idle in timeouts while those of another are full.

Each scenario runs in a separate process, so that none waits for another's interpreter or report.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mission_control import interrupts
from mission_control.errors import BadInput, EnvironmentFailed, PrerequisiteMissing

if TYPE_CHECKING:
    from mission_control.experiments.engine import Observer
    from mission_control.experiments.points import Conditions
    from mission_control.scenario import Scenario

LABS = min(2, len(os.sched_getaffinity(0)))
"""Default number of parallel labs. One at 100 Mbit/s takes half a CPU (docs/measurements/lab/parallel-labs.md)."""
LOOK_EVERY_S = 0.2
"""Seconds between two checks whether all is over."""
SPAWN = multiprocessing.get_context("spawn")


def worth_it(scenarios: Mapping[str, Scenario], conditions: Conditions) -> bool:
    """Whether any of these scenarios may be measured in parallel."""
    together = [one for one in scenarios.values() if not one.workload.alone(one)]
    allowed = all(one.workload.side_by_side for one in scenarios.values())
    return conditions.labs > 1 and len(together) > 1 and allowed


def together_s(scenarios: Mapping[str, Scenario], takes: Mapping[str, float], conditions: Conditions) -> float:
    """Predict the seconds that all scenarios take, in parallel as in :func:`conduct` if that is possible, otherwise in
    sequence.

    Args:
        takes: seconds of each scenario alone.
    """
    alone = [takes[name] for name, one in scenarios.items() if one.workload.alone(one)]
    others = [takes[name] for name, one in scenarios.items() if not one.workload.alone(one)]
    if not worth_it(scenarios, conditions):
        return sum(alone + others)
    return sum(alone) + max(*others, sum(others) / min(conditions.labs, len(others)))


def conduct(
    scenarios: Mapping[str, Scenario], conditions: Conditions, folders: Mapping[str, Path], observer: Observer
) -> bool:
    """Measure scenarios in parallel; those that expect a goodput run alone, because another lab takes some per cent of
    it.

    Returns:
        Whether the run was interrupted.

    Raises:
        BadInput, EnvironmentFailed, PrerequisiteMissing: one of them failed; raised once the others have ended.
    """
    alone = {name for name, one in scenarios.items() if one.workload.alone(one)}
    over, interrupted, lines = threading.Event(), False, Lines(observer)
    running: dict[str, Future[None]] = {}
    for labs, names in ((conditions.labs, scenarios.keys() - alone), (1, alone)):
        own = replace(conditions, labs=min(labs, len(names)))
        with ThreadPoolExecutor(labs) as pool:
            try:
                for name in sorted(names):
                    work = (name, scenarios[name], folders[name], own)
                    running[name] = pool.submit(in_process, work, over, lines)
                for _ in as_completed([running[name] for name in names]):
                    interrupts.check()
            except KeyboardInterrupt:
                interrupted = True
                over.set()
        if interrupted:
            break
    for name, future in running.items():
        if error := future.exception():
            raise type(error)(f"{name}: {error}; go on with --resume {folders[name].parent}")
    return interrupted


class Lines:
    """Show one line with the progress of each running scenario."""

    def __init__(self, observer: Observer):
        self._observer, self._lines, self._lock = observer, dict[str, str](), threading.Lock()

    def __call__(self, name: str, shown: str = "", said: str = "") -> None:
        """Show a line, or the progress; with neither the scenario has ended."""
        with self._lock:
            if said:
                self._observer.say(f"{name}: {said}")
                return
            self._lines[name] = shown
            self._observer.show(" | ".join(filter(None, self._lines.values())), "", {})


def in_process(work: tuple[Any, ...], over: threading.Event, lines: Lines) -> None:
    """Measure a scenario in a separate process.

    Raises:
        BadInput, EnvironmentFailed, PrerequisiteMissing: the measurement raised it, or its process ended too early.
    """
    if over.is_set():
        return
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=conducted, args=(there, *work))
    # The child inherits the mask, and unblocks signals once it can handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.FROM_OUTSIDE)
    process.start()
    there.close()
    result, last_word = None, False
    try:
        while result is None:
            if over.is_set() and not last_word:
                here.send("over")
                last_word = True
            if here.poll(LOOK_EVERY_S):
                word = here.recv()
                if isinstance(word, dict):
                    lines(work[0], **word)
                else:
                    result = word
    except (EOFError, OSError):
        raise EnvironmentFailed("its process has ended") from None
    finally:
        here.close()
        process.join()
        lines(work[0])
    if isinstance(result, Exception):
        raise result


def conducted(there: Connection, name: str, scenario: Scenario, folder: Path, conditions: Conditions) -> None:
    """Run in the child: send progress, then whether all points were measured, or the error. End early if the parent
    requests it, or has ended."""
    from mission_control.experiments.engine import Observer, Progress, Sites, conduct_one, planned, worlds_of

    class Sender(Observer):
        def show(self, line: str, doing: str, status: Mapping[str, Any]) -> None:
            there.send({"shown": f"{line}: {doing}"})

        def say(self, line: str) -> None:
            there.send({"said": line})

    interrupts.obey(there.poll)
    with suppress(BrokenPipeError):
        try:
            progress = Progress(len(planned(name, scenario, worlds_of(scenario, conditions))), Sender())
            with closing(Sites(conditions)) as sites:
                conduct_one(name, scenario, folder, sites, progress)
            there.send(True)
        except KeyboardInterrupt:
            there.send(False)
        except (BadInput, EnvironmentFailed, PrerequisiteMissing) as error:
            there.send(error)
