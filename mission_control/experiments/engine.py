"""Measure the points of scenarios, and write `results/<id>/`: scenario, points, result, report.

Rule of validity: a point is not valid if the machine and not the network set its pace; it is measured again, at most
`points.AGAIN` times. Rule of resuming: points in the journal stay, with the commit and the environment of their
measurement; points that were interrupted, are not valid, or could not be run are measured again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from mission_control import interrupts
from mission_control.environment import describe
from mission_control.errors import BadInput, EnvironmentFailed, PrerequisiteMissing
from mission_control.experiments import compare, overhead, parallel, report
from mission_control.experiments.points import Conditions, Measuring, Planned, planned, until_valid
from mission_control.experiments.result import POINTS, RESULT, Point, Quantity, Result
from mission_control.jobs import JobRejected
from mission_control.scenario import Scenario, plain, validate

SCENARIO, ENVIRONMENT = "scenario.toml", "environment.json"


class Observer:
    """Receives the progress of a run, to show it; the default shows nothing."""

    def show(self, line: str, doing: str, status: Mapping[str, Any]) -> None:
        """Called several times a second.

        Args:
            line: the number of the point, of how many, and the expected time of the others.
            doing: its current activity.
            status: status of its cluster.
        """

    def say(self, line: str) -> None:
        """Called with a line to show."""


def conduct(
    scenarios: Mapping[str, Scenario],
    conditions: Conditions,
    *,
    results: Path = Path("results"),
    resume: Path | None = None,
    observer: Observer | None = None,
) -> Result:
    """Measure all points of these scenarios.

    Args:
        results: folder in which the run's folder is made.
        resume: the folder of a run to resume.

    Raises:
        BadInput: a scenario does not fit, or the folder belongs to another run.
        PrerequisiteMissing, EnvironmentFailed: a world cannot be made.
        JobRejected: the only job's demand cannot be met; no byte has moved.
    """
    observer = observer or Observer()
    work = {name: planned(name, one, worlds_of(one, conditions)) for name, one in scenarios.items()}
    kind = next(iter(scenarios.values())).workload.kind if len(scenarios) == 1 else "study"
    folder = resume or results / f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}-{secrets.token_hex(2)}"
    folders = {name: folder / name if len(scenarios) > 1 else folder for name in scenarios}
    if resume is not None and not any(resume.glob(f"**/{SCENARIO}")):
        raise BadInput(f"--resume {resume}: no run is there; name a folder results/<id> that a run has left")
    for name, own in folders.items():
        refuse_other_conditions(own, conditions)
        known(own, work[name])  # refuses a folder of another scenario, before anything is written
    refuse_not_in_force(scenarios, conditions)
    for name, points in work.items():
        for point in to_measure(folders[name], points):
            point.scenario.workload.check_room(Path(conditions.data or folder).absolute())
    with held(folder):
        for name, own in folders.items():
            begin(own, name, scenarios[name], conditions)
        left = {name: to_measure(folders[name], points) for name, points in work.items()}
        if sum(map(len, work.values())) > 1:
            observer.say(announced(scenarios, left, conditions))
        progress, interrupted = Progress(sum(map(len, work.values())), observer), False
        try:
            if parallel.worth_it(scenarios, conditions):
                interrupted = parallel.conduct(scenarios, conditions, folders, observer)
            else:
                with closing(Sites(dataclasses.replace(conditions, labs=1))) as sites:
                    for name, one in scenarios.items():
                        interrupted = interrupted or conduct_one(name, one, folders[name], sites, progress).interrupted
        except KeyboardInterrupt:
            interrupted = True
        except Exception:
            if resume is None and not any(path.stat().st_size for path in folder.rglob(POINTS)):
                shutil.rmtree(folder, ignore_errors=True)  # nothing was measured
            else:
                leave(folder, scenarios, work, folders, interrupted)
            raise
        return leave(folder, scenarios, work, folders, interrupted)


def announced(scenarios: Mapping[str, Scenario], left: Mapping[str, Sequence[Planned]], conditions: Conditions) -> str:
    """Describe how many points are to be measured, and the expected time, if all scenarios have one.

    Args:
        left: points of each scenario that are to be measured.
    """
    scenarios = {name: one for name, one in scenarios.items() if left[name]}
    counted = f"{sum(map(len, left.values()))} points to measure"
    counted += f", of {len(scenarios)} scenarios" if len(scenarios) > 1 else ""
    counted += " (reduced by --quick)" if conditions.quick else ""
    takes: dict[str, float] = {}
    for name, one in scenarios.items():
        points = sum(point.world != "model" for point in left[name])  # the model takes no time
        if points and (one.study.point_takes is None or conditions.worlds not in ((), (one.world,))):
            return counted
        takes[name] = points * (one.study.point_takes or 0) / 1e3
    seconds = parallel.together_s(scenarios, takes, conditions)
    return f"{counted}: about {duration(seconds)} on two cores" if seconds else counted


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock the folder for this process: two processes that write one journal would lose points.

    Raises:
        BadInput: another process measures there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{folder}: another process measures there; wait for it, or begin a new run") from None
        yield
    finally:
        os.close(descriptor)


def refuse_not_in_force(scenarios: Mapping[str, Scenario], conditions: Conditions) -> None:
    """Refuse to compare settings that a running cluster does not change.

    Raises:
        BadInput: variants differ in a setting of the cluster.
    """
    fixed = ("control.flows_per_host", *(() if conditions.install_policy else ("control.policy",)))
    for one in scenarios.values() if conditions.scheduler else ():
        varied = {*one.study.vary, *(key for variant in one.study.compare for key in variant.set)}
        if found := sorted(varied & set(fixed)):
            how = "give --install-policy, or compare" if found[0] == "control.policy" else "compare"
            raise BadInput(
                f"{found[0]} is the cluster's own, the same for all variants: {how} it in world local or lab"
            )


def worlds_of(scenario: Scenario, conditions: Conditions) -> tuple[str, ...]:
    return conditions.worlds or scenario.workload.worlds_of(scenario)


def conduct_one(name: str, scenario: Scenario, folder: Path, sites: Sites, progress: Progress) -> Result:
    """Measure the points of a scenario that are missing, and write its result and report."""
    work, interrupted = planned(name, scenario, worlds_of(scenario, sites.conditions)), False
    done = kept(folder, work)
    # Write the journal again, because its last line may be incomplete.
    replace(folder / POINTS, "".join(line_of(key, one) for key, one in done.items()))
    progress.known += len(done)
    progress.worked |= {one.world for one in done.values()}
    try:
        for one in (one for one in work if one.key not in done):
            interrupts.check()
            own = folder if len(work) == 1 else folder / "runs" / one.key
            began = time.monotonic()
            progress.begin(one)
            point = until_valid(partial(attempt, one, own, sites, progress, len(work)), progress.say)
            point.took_s = time.monotonic() - began
            environment = {**describe(one.scenario.workload.seed), "labs_at_once": sites.conditions.labs}
            point.commit, point.environment = environment["commit"], environment
            if apart := own != folder and own.exists():
                point.folder = str(own.relative_to(folder))
            with open(folder / POINTS, "a") as file:
                file.write(line_of(one.key, point))
            if apart:
                # The folder of a run of jobs is complete in itself, with its own report.
                begin(own, name, one.scenario, sites.conditions)
                write(own, summed({name: one.scenario}, [one], [point], own, point.interrupted))
            progress.end(one, point)
            if point.interrupted:
                break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        result = leave(folder, {name: scenario}, {name: work}, {name: folder}, interrupted)
    return result


def kept(folder: Path, work: Sequence[Planned]) -> dict[str, Point]:
    """Return the points of a run that it does not measure again, by key."""
    return {key: one for key, one in known(folder, work).items() if not measured_again(one)}


def to_measure(folder: Path, work: Sequence[Planned]) -> list[Planned]:
    done = kept(folder, work)
    return [one for one in work if one.key not in done]


def measured_again(point: Point) -> bool:
    """Whether a resumed run measures this point again."""
    return point.interrupted or not point.valid or "run" in point.errors


def attempt(one: Planned, own: Path, sites: Sites, progress: Progress, planned: int, number: int) -> Point:
    """Measure a point once; if it cannot be run, record why, so that the others are measured."""
    workload = one.scenario.workload
    if number and own.exists():
        # Keep the files of an attempt that was not valid.
        shutil.copytree(own, own.with_name(f"{own.name}-invalid-{number}"), dirs_exist_ok=True)
    if workload.leaves_files:
        own.mkdir(parents=True, exist_ok=True)
    try:
        point: Point = sites.get(one)(one, own, progress.watch)
    except Exception as error:
        foreseen = isinstance(error, EnvironmentFailed | PrerequisiteMissing | BadInput)
        if (foreseen and one.world not in progress.worked) or (planned == 1 and isinstance(error, JobRejected)):
            raise  # no point has worked in this world: the others would fail, too
        progress.say(f"failed: {error}")
        sites.close()
        why = str(error) if foreseen or isinstance(error, JobRejected) else f"{type(error).__name__}: {error}"
        failed: Point = one.point(errors={"run": why})
        return failed
    if point.errors:
        sites.close()  # the world may be broken
    for name, measure in workload.measures.items():
        if (value := measure.of(point)) is not None:
            point.measures[name] = Quantity(value=value, unit=measure.unit)
    held = all(point.checks.values()) and all(point.expectations.values())
    point.ok = held and not point.errors and not point.interrupted
    for note in point.notes:
        progress.note(note)
    return point


class Sites:
    """The open world, kept for the next point if it fits: making a world takes longer than most points."""

    def __init__(self, conditions: Conditions):
        self.conditions = conditions
        self._stack = ExitStack()
        self._open: tuple[Any, Measuring] | None = None

    def get(self, one: Planned) -> Measuring:
        """Return the function that measures points in the world of this one."""
        workload = one.scenario.workload
        made_of = (one.world, workload.kind, workload.site(one.whole))
        if self._open is None or self._open[0] != made_of:
            self.close()
            opened = workload.opened(one.world, one.whole, self.conditions)
            self._open = made_of, self._stack.enter_context(opened)
        return self._open[1]

    def close(self) -> None:
        self._open = None
        self._stack.close()


class Progress:
    """The progress of a run, and its expected time: the rest takes as long as the points of the same world so far."""

    def __init__(self, planned: int, observer: Observer):
        self.planned, self.observer = planned, observer
        self.known = self.ended = 0
        self.worked: set[str] = set()
        """Worlds in which at least one point was measured."""
        self.seconds: list[float] = []
        self.line = ""
        self._noted: set[str] = set()

    def begin(self, one: Planned) -> None:
        left = self.planned - self.known - self.ended
        took = sum(self.seconds) / len(self.seconds) * left if self.seconds else None
        time_left = f", about {duration(took)} left" if took is not None and left > 1 else ""
        if self.planned > 1:
            self.line = f"[{self.known + self.ended + 1}/{self.planned}] {one.bare.label()}{time_left}"
        self.observer.show(self.line, "prepares", {})

    def end(self, one: Planned, point: Point) -> None:
        self.ended += 1
        if "run" not in point.errors:
            self.worked.add(one.world)
        if one.world != "model":  # which takes no time
            self.seconds.append(point.took_s)

    def watch(self, doing: str, status: Mapping[str, Any]) -> None:
        self.observer.show(self.line, doing, status)

    def say(self, text: str) -> None:
        self.observer.say(f"    {text}")

    def note(self, text: str) -> None:
        """Show once that a setting was not in force."""
        if text not in self._noted:
            self._noted.add(text)
            self.observer.say(f"note: {text}")


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def begin(folder: Path, name: str, scenario: Scenario, conditions: Conditions) -> None:
    """Write the files that a run needs to be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / SCENARIO, tomli_w.dumps(plain(scenario)))
    described = {**describe(scenario.workload.seed), "study": name, "conditions": vars(conditions)}
    replace(folder / ENVIRONMENT, json.dumps(described, indent=1))


def resumed(folder: Path) -> tuple[dict[str, Scenario], Conditions]:
    """Read the scenarios of a run to resume, and its conditions.

    Raises:
        BadInput: the folder has no run.
    """
    own = [folder] if (folder / SCENARIO).exists() else sorted(path.parent for path in folder.glob(f"*/{SCENARIO}"))
    if not own:
        raise BadInput(f"--resume {folder}: no run is there; name a folder results/<id> that a run has left")
    try:
        left = [json.loads((one / ENVIRONMENT).read_text()) for one in own]
        scenarios = {
            one["study"]: validate(tomllib.loads((path / SCENARIO).read_text()))
            for one, path in zip(left, own, strict=True)
        }
        return scenarios, Conditions(**{**left[0]["conditions"], "worlds": tuple(left[0]["conditions"]["worlds"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--resume {folder}: its files cannot be read ({error}); begin a new run") from None


def refuse_other_conditions(folder: Path, conditions: Conditions) -> None:
    """Refuse to resume a run on another cluster, or as another kind of run: its medians would mix both.

    The number of parallel labs may differ: each point records its own.

    Raises:
        BadInput: the folder's run had another scheduler, or only one of the two installs its policy, or is quick.
    """
    try:
        before = json.loads((folder / ENVIRONMENT).read_text())["conditions"]
    except (OSError, ValueError, KeyError):
        return
    now = json.loads(json.dumps(vars(conditions)))
    before.setdefault("quick", False)
    for name in ("scheduler", "install_policy", "quick"):
        if (value := before.get(name)) != now[name]:
            flag = f"--{name.replace('_', '-')}" + (f" {value}" if isinstance(value, str) else "")
            how = f"with {flag}" if value else f"without {flag}"
            raise BadInput(f"{folder} began {how}: go on in the same way, or begin a new run")


def line_of(key: str, point: Point) -> str:
    return json.dumps({"key": key, **point.model_dump(by_alias=True, exclude_unset=True, mode="json")}) + "\n"


def known(folder: Path, work: Sequence[Planned]) -> dict[str, Point]:
    """Read the points that were measured before, by key; the last line may be incomplete.

    Raises:
        BadInput: a point belongs to another scenario.
    """
    path, by_key, found = folder / POINTS, {one.key: one for one in work}, {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        one = by_key.get(entry.pop("key", ""))
        if one is None or entry["scenario"] != one.fingerprint:
            raise BadInput(f"{folder} was made from another scenario: go on with that one, or begin a new run")
        found[one.key] = one.scenario.workload.point.model_validate(entry)
    return found


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def leave(
    folder: Path,
    scenarios: Mapping[str, Scenario],
    work: Mapping[str, Sequence[Planned]],
    folders: Mapping[str, Path],
    interrupted: bool,
) -> Result:
    """Write the result and the report of all known points; return the result."""
    found = {name: known(folders[name], own) for name, own in work.items()}
    points = [found[name][one.key] for name, own in work.items() for one in own if one.key in found[name]]
    result = summed(scenarios, [one for own in work.values() for one in own], points, folder, interrupted)
    write(folder, result)
    return result


def write(folder: Path, result: Result) -> None:
    replace(folder / RESULT, json.dumps(result.dumped()))
    report.write(folder, result)


def summed(
    scenarios: Mapping[str, Scenario], work: Sequence[Planned], points: list[Point], folder: Path, interrupted: bool
) -> Result:
    """Summarize the points."""
    single = points[0] if len(work) == 1 and points else None
    medians, comparisons = compare.compared(scenarios, work, points)
    interrupted = interrupted or any(point.interrupted for point in points)
    checks, errors = {"every point was measured": len(points) == len(work) and not interrupted}, {}
    if single is not None:
        checks, errors = {**single.checks, **single.expectations}, dict(single.errors)
    else:
        for point in points:
            own = {**point.checks, **point.expectations}
            checks.update({f"{point.label()}: {check}": value for check, value in own.items()})
            errors.update({f"{point.label()}: {job}": why for job, why in point.errors.items()})
    held = all(one.held is not False for one in comparisons) and all(checks.values())
    why = [f"{point.label()}: {because}" for point in points for because in point.invalid_because]
    last = max(points, key=lambda point: point.environment.get("measured", ""), default=None)
    shown = {} if single is None else {name: getattr(single, name) for name in SHOWN if name in single.model_fields_set}
    return Result(
        ok=held and not interrupted and all(point.ok for point in points) and bool(points),
        valid=all(point.valid for point in points),
        interrupted=interrupted,
        invalid_because=list(single.invalid_because) if single is not None else why,
        world=",".join(dict.fromkeys(one.world for one in work)),
        points=points,
        summary=medians,
        comparisons=comparisons,
        onset=[
            onset
            for name, one in scenarios.items()
            for onset in one.workload.onsets([point for point in points if point.study == name])
        ],
        overheads=overhead.overheads(work, points),
        differences=compare.differences(medians),
        checks=checks,
        errors=errors,
        notes=list(dict.fromkeys(note for point in points for note in point.notes)),
        studies={name: texts(one) for name, one in scenarios.items()},
        environment=last.environment if last is not None else describe(),
        results=str(folder),
        folder=str(folder),
        **{"jobs": [], "seconds": None, **shown},
    )


SHOWN = (
    *("jobs", "seconds", "policy", "ports", "samples", "processor_seconds", "delay"),
    *("job_time_s", "late_s", "distortion"),
)
"""Fields of the only point that the result repeats, for readers of a single run."""


def texts(scenario: Scenario) -> dict[str, Any]:
    study = scenario.study
    shown = {name: getattr(study, name) for name in ("title", "paper", "hope", "because")}
    measures = list(study.measure or list(scenario.workload.measures)[:1])
    return {**shown, "kind": scenario.workload.kind, "measure": measures, "compares": len(study.compare) > 1}
