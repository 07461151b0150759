"""A scenario's points: every world, variant, place of the grid and repetition, in the order of measurement."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from mission_control.errors import BadInput
from mission_control.experiments.result import Point, at_in_words
from mission_control.scenario import Scenario, ScenarioError, Variant, plain, with_values

ONLY = Variant(name="")
AGAIN = 2
"""Most repetitions of a point that is not valid, because the machine and not the network set its pace."""
Found = TypeVar("Found", bound=Point)


@dataclass(frozen=True)
class Conditions:
    """How to measure the points of a run, in addition to the scenario."""

    worlds: tuple[str, ...] = ()
    """Worlds to measure in; empty: those of each scenario."""
    scheduler: str | None = None
    install_policy: bool = False
    """Whether the policy of a running cluster may be replaced."""
    data: str | None = None
    """Folder for input and output files, shared by all workers; by default in the point's folder."""
    keep_data: bool = False
    quick: bool = False
    """Whether to measure the fewer points of ``--quick``."""
    labs: int = 1
    """Scenarios that are measured at the same time, where their workload allows it."""


@dataclass(frozen=True)
class Planned:
    """A planned point."""

    study: str
    world: str
    at: Mapping[str, Any]
    variant: Variant
    repetition: int
    scenario: Scenario
    whole: Scenario
    """The variant's scenario with the whole grid of the workload."""

    @cached_property
    def key(self) -> str:
        """Name of its folder, and of its line in the journal."""
        words = [self.world, *map(str, self.at.values()), self.variant.name, str(self.repetition + 1)]
        return re.sub(r"[^\w.-]", "_", "-".join(filter(None, words)))

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint: equal for equal scenarios in equal worlds."""
        made_for = self.whole.workload.made_for(self.whole)
        return hashlib.sha256(f"{tomli_w.dumps(plain(self.scenario))}{made_for}".encode()).hexdigest()[:16]

    @property
    def bare(self) -> Point:
        """The point without measurements."""
        labels: dict[str, Any] = {"study": self.study, "world": self.world, "at": dict(self.at)}
        return Point(**labels, variant=self.variant.name, repetition=self.repetition, scenario=self.fingerprint)

    def point(self, **found: Any) -> Any:
        """The point with its measurements."""
        # Set defaults explicitly: JSON only leaves out fields that a world does not have.
        given: dict[str, Any] = {"valid": True, "invalid_because": [], "ok": False, "checks": {}, "expectations": {}}
        given |= {"errors": {}, "notes": [], "interrupted": False, "seconds": None, "measures": {}, "jobs": []}
        return self.scenario.workload.point(**self.bare.model_dump(exclude_unset=True), **{**given, **found})


Watch = Callable[[str, Mapping[str, Any]], None]
"""Receives the activity of each job in words, and the cluster's status; called several times a second."""
Measuring = Callable[[Planned, Path, Watch], Any]
"""Measures a point, and may write files to its folder. Raises KeyboardInterrupt, or returns an interrupted point."""


def variants_of(scenario: Scenario, at: Mapping[str, Any] | None = None) -> dict[str, Scenario]:
    """Return the variants by name; the scenario itself if nothing is compared.

    Args:
        at: values of the varied keys.

    Raises:
        BadInput: a variant or a value does not fit; the text names it.
    """
    made = {}
    for variant in scenario.study.compare or (ONLY,):
        try:
            made[variant.name] = with_values(scenario.alone, {**(at or {}), **variant.set})
        except ScenarioError as error:
            places = [f"study.vary ({at_in_words(dict(at))})" if at else "", f"study.compare {variant.name!r}"]
            where = " with ".join(filter(None, places if variant.name else places[:1])) or "the scenario"
            raise BadInput(f"{where}: {error}") from None
    return made


def planned(name: str, scenario: Scenario, worlds: Sequence[str]) -> list[Planned]:
    """Return all points, in order: runs alternate between variants at each place, so that disturbances affect all
    alike.

    Raises:
        BadInput: a value or a variant does not fit the scenario, or the workload does not run in a world.
    """
    workload, study = scenario.workload, scenario.study
    if unknown := [world for world in worlds if world not in workload.worlds]:
        raise BadInput(f"{workload.kind} in {unknown[0]}: use {' or '.join(workload.worlds)}, as in --in lab")
    names = {variant.name: variant for variant in study.compare or (ONLY,)}
    if empty := [key for key, values in study.vary.items() if not values]:
        raise BadInput(f"study.vary: {empty[0]} has no values")
    found = []
    for world, values in itertools.product(worlds, itertools.product(*study.vary.values())):
        at = dict(zip(study.vary, values, strict=True))
        variants = variants_of(scenario, at)
        places = {
            variant: [(at | place, with_values(whole, place)) for place in whole.workload.grid()]
            for variant, whole in variants.items()
        }
        times = 1 if world == "model" else study.repeat  # equations give the same result each time
        for repetition, (variant, whole) in itertools.product(range(times), variants.items()):
            for place, one in places[variant]:
                found.append(Planned(name, world, place, names[variant], repetition, one, whole))
    if twice := [key for key, count in Counter(one.key for one in found).items() if count > 1]:
        raise BadInput(f"two points would both be called {twice[0]}: give variants other names")
    return found


def until_valid(measure: Callable[[int], Found], say: Callable[[str], None]) -> Found:
    """Measure until a point is valid; return that point, or the last attempt.

    Args:
        measure: measures the point; called with the number of the attempt, from 0.
        say: called with the reason for another attempt.
    """
    for attempt in range(AGAIN + 1):
        point = measure(attempt)
        if point.valid or point.interrupted or attempt == AGAIN:
            break
        say(f"not valid, measured again: {'; '.join(point.invalid_because)}")
    return point
