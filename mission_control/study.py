"""Runs scenarios several times, in variants that take turns, and compares what came out.

A study leaves one folder: ``runs/`` with the folder of every run, ``study.json`` and ``report.html``. A study that was
interrupted is taken up again in its folder: what is there is not run again.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import shutil
import statistics
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mission_control import interrupts, study_report
from mission_control.jobs import JobRejected
from mission_control.runs import Observer, Sites, run
from mission_control.scenario import (
    BadInput,
    EnvironmentFailed,
    PrerequisiteMissing,
    Scenario,
    Variant,
    built_in,
    load,
    plain,
    with_values,
)

INVALID_AGAIN = 2
"""Times that a run is made anew that the machine, and not the network, has set the pace of."""
ONLY = Variant(name="")


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    study: str
    at: tuple[tuple[str, Any], ...]
    """What is varied, and its value here."""
    variant: Variant
    repetition: int
    scenario: Scenario

    @property
    def key(self) -> str:
        """Of its folder."""
        place = "-".join(str(value) for _, value in self.at)
        words = [self.study, place, self.variant.name, str(self.repetition + 1)]
        return "".join(
            letter if letter.isalnum() or letter in "-." else "_" for letter in "-".join(filter(None, words))
        )

    def __str__(self) -> str:
        values = [f"{path.rpartition('.')[2]} {value}" for path, value in self.at]
        return ", ".join(filter(None, [self.study, *values, self.variant.name, f"repetition {self.repetition + 1}"]))


def runs_of(name: str, scenario: Scenario) -> list[Run]:
    """All runs of a scenario's study, in the order in which they are made.

    Raises:
        BadInput: a value or a variant does not fit the scenario.
    """
    study, found = scenario.study, []
    for values in itertools.product(*study.vary.values()):
        at = dict(zip(study.vary, values, strict=True))
        for repetition in range(study.repeat):
            for variant in study.compare or (ONLY,):
                own = with_values(scenario.alone, {**at, **variant.set})
                found.append(Run(name, tuple(at.items()), variant, repetition, own))
    return found


def scenarios_in(name: str) -> dict[str, Scenario]:
    """The scenarios of a folder, or the one that is named, each by its own name.

    Raises:
        BadInput: there is none, or one does not fit the model.
    """
    folder = Path(name)
    if not folder.is_dir() or name in built_in():
        return {folder.stem: load(name)}
    found = {path.stem: load(str(path)) for path in sorted(folder.glob("*.toml"))}
    if not found:
        raise BadInput(f"{name} has no scenarios: put files that end in .toml there")
    return found


def conduct(
    scenarios: dict[str, Scenario],
    *,
    world: str,
    scheduler: str | None = None,
    results: Path = Path("results"),
    resume: Path | None = None,
    observer: Observer | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Makes all runs; gives ``results`` (of each run, with its ``study``, ``at``, ``variant``, ``repetition``),
    ``medians`` and ``ratios`` (docs/results.md).

    Args:
        resume: folder of a study that was interrupted.
        say: is told what is done, a line at a time.

    Raises:
        BadInput: a variant does not fit, or the folder to go on in is not there.
        PrerequisiteMissing: what the world needs is not there.
    """
    planned = [one for name, scenario in scenarios.items() for one in runs_of(name, scenario)]
    twice = [key for key, count in Counter(one.key for one in planned).items() if count > 1]
    if twice:
        raise BadInput(f"two runs would both be called {twice[0]}: give scenarios and variants other names")
    if resume is not None and not (resume / "runs").is_dir():
        raise BadInput(f"{resume} has no study to go on with: name a folder that a study has left")
    folder = resume or results / f"{time.strftime('%Y%m%d-%H%M%S')}-study-{secrets.token_hex(2)}"
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    made: list[dict[str, Any]] = []
    progress = Progress(len(planned), say)
    current: Run | None = None
    try:
        with Sites() as sites:
            for one in planned:
                interrupts.check()
                result = known(folder, one)
                if result is None:
                    current = one
                    progress.begin(one)
                    result = valid_run(one, folder, world, scheduler, observer, sites, progress)
                    if result.get("interrupted"):
                        raise KeyboardInterrupt
                    current = None
                else:
                    progress.skip()
                labels = {"study": one.study, "at": dict(one.at), "variant": one.variant.name}
                made.append({**labels, "repetition": one.repetition, **result})
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
        if current is not None:
            # It is made anew when the study goes on.
            shutil.rmtree(folder / "runs" / current.key, ignore_errors=True)
    summary: dict[str, Any] = {"results": made, **compared(scenarios, made)}
    held = all(ratio["held"] is not False for ratio in summary["ratios"])
    summary["ok"] = held and not interrupted and all(entry["ok"] for entry in made)
    summary.update({"interrupted": interrupted, "folder": str(folder)})
    summary["valid"] = all(entry.get("valid", True) for entry in made)
    summary["studies"] = {name: scenario.study.model_dump() for name, scenario in scenarios.items()}
    (folder / study_report.STUDY).write_text(json.dumps(summary, indent=1))
    study_report.write(folder)
    return summary


class Progress:
    """Says how far a study is."""

    def __init__(self, planned: int, say: Callable[[str], None]):
        self.planned, self.say = planned, say
        self.number = self.timed = 0
        self.started = time.monotonic()

    def begin(self, one: Run) -> None:
        self.number += 1
        left = ""
        if self.timed:
            seconds = (time.monotonic() - self.started) / self.timed * (self.planned - self.number + 1)
            left = f" (some {math.ceil(seconds / 60)} min left)"
        self.timed += 1
        self.say(f"[{self.number}/{self.planned}] {one}{left}")

    def skip(self) -> None:
        self.number += 1


def known(folder: Path, one: Run) -> dict[str, Any] | None:
    """The result of a run that was made before.

    Raises:
        BadInput: it was made from another scenario.
    """
    own = folder / "runs" / one.key
    try:
        result = json.loads((own / "result.json").read_text())
        before = tomllib.loads((own / "scenario.toml").read_text())
    except (OSError, ValueError):
        return None
    if result.get("interrupted"):
        return None
    if before != plain(one.scenario):
        raise BadInput(f"{own} was made from another scenario: go on with the one that began, or begin a new study")
    return result


def valid_run(
    one: Run,
    folder: Path,
    world: str,
    scheduler: str | None,
    observer: Observer | None,
    sites: Sites,
    progress: Progress,
) -> dict[str, Any]:
    """Makes a run; anew where it is not valid."""
    own = folder / "runs" / one.key
    for attempt in range(INVALID_AGAIN + 1):
        # What an earlier attempt was cut off in.
        shutil.rmtree(own, ignore_errors=True)
        try:
            result = run(one.scenario, world=world, scheduler=scheduler, folder=own, observer=observer, sites=sites)
        except Exception as error:
            if (
                attempt == 0
                and isinstance(error, EnvironmentFailed | PrerequisiteMissing | BadInput)
                and progress.timed == 1
            ):
                raise  # the first of all: the others would fail like it
            # One run that fails is told at the end, and made anew when the study goes on; the others go on now.
            progress.say(f"    failed: {error}")
            sites.close()
            shutil.rmtree(own, ignore_errors=True)
            summary = str(error) if isinstance(error, JobRejected) else f"{type(error).__name__}: {error}"
            return {"ok": False, "errors": {"run": summary}, "valid": True, "jobs": [], "seconds": None}
        if result["errors"]:
            sites.close()  # what failed may be broken
        if result.get("valid", True) or result.get("interrupted") or attempt == INVALID_AGAIN:
            return result
        progress.say(f"    not valid, again: {result['invalid_because'][0]}")
        spare = own.with_name(f"{own.name}-invalid-{attempt + 1}")
        shutil.rmtree(spare, ignore_errors=True)
        own.rename(spare)
    raise AssertionError("the last attempt returns")


def measured(result: dict[str, Any], measure: str) -> float | None:
    """What a study compares, of one run; ``None`` where the run does not have it."""
    if measure == "job_seconds":
        return result["seconds"]
    if measure == "mean_job_seconds":
        seconds = [job["seconds"] for job in result["jobs"] if job["seconds"] is not None]
        return statistics.fmean(seconds) if seconds else None
    if measure == "share":
        return result["jobs"][0]["share"] if result["jobs"] else None
    of_jobs = [shuffle_seconds(job) for job in result["jobs"]]
    if measure == "first_shuffle_seconds":
        return of_jobs[0] if of_jobs else None
    shuffles = [transfer for job in result["jobs"] for transfer in job["transfers"] if transfer["pattern"] == "shuffle"]
    if measure == "fairness":
        values = [shuffle["fairness"] for shuffle in shuffles if shuffle["fairness"] is not None]
        return statistics.fmean(values) if values else None
    return max((of_job for of_job in of_jobs if of_job is not None), default=None)


def shuffle_seconds(job: dict[str, Any]) -> float | None:
    """Of its longest shuffle."""
    own = (transfer["seconds"] for transfer in job["transfers"] if transfer["pattern"] == "shuffle")
    return max((seconds for seconds in own if seconds is not None), default=None)


def compared(scenarios: dict[str, Scenario], made: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Medians of each variant, and of its ratios to the first, repetition by repetition; with 95 % intervals."""
    medians, ratios = [], []
    for name, scenario in scenarios.items():
        study = scenario.study
        own = [result for result in made if result["study"] == name]
        places = list({json.dumps(result["at"]): result["at"] for result in own}.values())
        for at, measure in itertools.product(places, study.measure):
            here = [result for result in own if result["at"] == at]
            values = {variant.name: values_of(here, variant.name, measure) for variant in study.compare or (ONLY,)}
            labels = {"study": name, "at": at, "measure": measure}
            for called, found in values.items():
                if found:
                    medians.append({**labels, "variant": called, **interval(list(found.values()))})
            for variant in study.compare[1:]:
                first = study.compare[0].name
                reference, found = values[first], values[variant.name]
                pairs = [found[number] / reference[number] for number in found if reference.get(number)]
                # What is expected is expected of what is measured first.
                judged = variant if measure == study.measure[0] else ONLY
                if pairs or expected(judged):
                    summary = {**labels, "variant": variant.name, "to": first, **interval(pairs)}
                    ratios.append(
                        {**summary, "expected": expected(judged), "held": as_expected(judged, summary["median"])}
                    )
    return {"medians": medians, "ratios": ratios}


def values_of(results: Sequence[dict[str, Any]], variant: str, measure: str) -> dict[int, float]:
    """By repetition; of valid runs that ended well only."""
    found: dict[int, float] = {}
    for result in results:
        if result["variant"] == variant and result["ok"] and result.get("valid", True):
            value = measured(result, measure)
            if value is not None:
                found[result["repetition"]] = value
    return found


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Median and its interval by order statistics, which asks nothing of the distribution (Conover 1999, 3.2): the
    narrowest that covers the true median with at least 95 %; of up to five values their whole range, and
    ``coverage`` says how much that covers."""
    ordered, count = sorted(values), len(values)
    if not ordered:
        return {"median": None, "low": None, "high": None, "coverage": None, "runs": 0}
    low, below, coverage = 0, 0.0, 1 - 2 / 2**count
    for rank in range(count // 2):
        below += math.comb(count, rank) / 2**count
        if 2 * below > 0.05:
            break
        low, coverage = rank, 1 - 2 * below
    result = {"median": statistics.median(ordered), "low": ordered[low], "high": ordered[count - 1 - low]}
    return {**result, "coverage": coverage, "runs": count}


def expected(variant: Variant) -> str:
    """In words; empty where nothing is."""
    words = []
    if variant.ratio_min is not None:
        words.append(f"at least {variant.ratio_min:g}")
    if variant.ratio_max is not None:
        words.append(f"at most {variant.ratio_max:g}")
    return ", ".join(words)


def as_expected(variant: Variant, ratio: float | None) -> bool | None:
    """Whether what was expected came; ``None`` where nothing was. What could not be measured did not come."""
    if variant.ratio_min is None and variant.ratio_max is None:
        return None
    if ratio is None:
        return False
    return (variant.ratio_min or 0) <= ratio <= (variant.ratio_max or math.inf)
