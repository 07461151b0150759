"""Compare points: medians with intervals, ratios of variants, expectations, and the model against the lab."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mission_control.experiments.points import ONLY, Planned
from mission_control.experiments.result import Comparison, Difference, Point, Summary
from mission_control.scenario import Scenario, Variant

COVERED = 0.95
"""Desired coverage of an interval."""


def compared(
    scenarios: Mapping[str, Scenario], planned: Sequence[Planned], points: Sequence[Point]
) -> tuple[list[Summary], list[Comparison]]:
    """Compute the median of each variant at each place, and its ratios to the first variant, repetition by
    repetition."""
    medians, ratios = [], []
    found: dict[Any, dict[tuple[str, int], Point]] = {}
    for point in points:
        found.setdefault(point.place, {})[point.variant, point.repetition] = point
    variants: dict[Any, dict[str, Variant]] = {}
    for one in planned:
        variants.setdefault(one.bare.place, {})[one.variant.name] = one.variant
    measuring = any(one.world != "model" for one in planned)
    for place in (place for place in variants if place in found):
        here, point = found[place], next(iter(found[place].values()))
        scenario, measures = scenarios[point.study], scenarios[point.study].workload.measures
        first = (scenario.study.compare or (ONLY,))[0].name
        for number, measure in enumerate(scenario.study.measure or list(measures)[:1]):
            labels: dict[str, Any] = {"study": point.study, "world": point.world, "at": point.at, "measure": measure}
            values = {name: values_of(here, name, measure) for name in variants[place]}
            for name, own in values.items():
                single = within(here[name, next(iter(own))], measure) if len(own) == 1 else None
                if own:
                    summary = single or interval(list(own.values()))
                    medians.append(Summary(**labels, variant=name, unit=measures[measure].unit, **summary))
            undone = {name: undilated_of(here, name, values[name], measures[measure].unit) for name in values}
            for name, variant in variants[place].items():
                pairs = [
                    value / undone[first][at] for at, value in undone[name].items() if undone.get(first, {}).get(at)
                ]
                # Expectations concern the first measure, in the measured world if there is one.
                judged = ONLY if number or (point.world == "model" and measuring) else variant
                if name != first and first in values and measures[measure].ratios and (pairs or expected(judged)):
                    summary = interval(pairs)
                    came = {"expected": expected(judged), "held": as_expected(judged, summary["median"])}
                    ratios.append(Comparison(**labels, variant=name, unit="", to=first, **summary, **came))
    return medians, ratios


def values_of(points: Mapping[tuple[str, int], Point], variant: str, measure: str) -> dict[int, float]:
    """Return the values by repetition, of points that count."""
    return {
        point.repetition: point.measures[measure].value
        for (name, _), point in points.items()
        if name == variant and point.counts and measure in point.measures
    }


def undilated_of(
    points: Mapping[tuple[str, int], Any], variant: str, values: Mapping[int, float], unit: str
) -> dict[int, float]:
    """Return values by repetition with the time dilation undone, because variants may differ in it."""
    slow = {at: getattr(points[variant, at], "dilation", 1) for at in values}
    return {at: value * undilated(unit, slow[at]) for at, value in values.items()}


RATES, TIMES = ("bit/s", "Mbit/s"), ("s", "ms")


def undilated(unit: str, dilation: int) -> float:
    """Return the factor that undoes time dilation: rates were divided, times multiplied, counts are the same."""
    return dilation if unit in RATES else 1 / dilation if unit in TIMES else 1


def within(point: Point, measure: str) -> dict[str, Any] | None:
    """Return a single point's interval: it lacks the spread between runs, and is labelled so."""
    ends = point.interval_of(measure)
    if not ends:
        return None
    summary = {"median": point.measures[measure].value, "low": ends[0], "high": ends[1], "coverage": COVERED}
    return {**summary, "runs": 1, "of": "blocks"}


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Compute the median and its interval by order statistics, for any distribution (Conover 1999, 3.2): the narrowest
    that covers the true median with at least 95 %; for up to five values their whole range, with its ``coverage``."""
    ordered, count = sorted(values), len(values)
    if not ordered:
        return {"median": None, "low": None, "high": None, "coverage": None, "runs": 0}
    low, below, coverage = 0, 0.0, 1 - 2 / 2**count
    for rank in range(count // 2):
        below += math.comb(count, rank) / 2**count
        if 2 * below > 1 - COVERED:
            break
        low, coverage = rank, 1 - 2 * below
    result = {"median": statistics.median(ordered), "low": ordered[low], "high": ordered[count - 1 - low]}
    return {**result, "coverage": coverage, "runs": count}


def expected(variant: Variant) -> str:
    """Describe what is expected; empty: nothing."""
    words = []
    if variant.ratio_min is not None:
        words.append(f"at least {variant.ratio_min:g}")
    if variant.ratio_max is not None:
        words.append(f"at most {variant.ratio_max:g}")
    return ", ".join(words)


def as_expected(variant: Variant, ratio: float | None) -> bool | None:
    """Whether an expectation was met; ``None`` if there is none. A ratio that could not be measured did not meet it."""
    if variant.ratio_min is None and variant.ratio_max is None:
        return None
    if ratio is None:
        return False
    return (variant.ratio_min or 0) <= ratio <= (variant.ratio_max or math.inf)


def differences(medians: Sequence[Summary]) -> list[Difference]:
    """Compare the model with the lab, at each place that both have."""
    lab = {(own.study, own.place[2], own.variant, own.measure): own for own in medians if own.world == "lab"}
    found = []
    for own in (own for own in medians if own.world == "model" and own.median is not None):
        there = lab.get((own.study, own.place[2], own.variant, own.measure))
        if there is not None and there.median:
            labels = own.model_dump(include={"study", "at", "variant", "measure"})
            found.append(Difference(**labels, world="lab", part=(own.median or 0.0) / there.median - 1))
    return found


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def spread(own: Summary) -> str:
    """Format an interval, with its coverage if that is less than 95 %."""
    return ", ".join(filter(None, interval_and_note(own)))


def interval_and_note(own: Summary) -> tuple[str, str]:
    """Format an interval, and what restricts its meaning: empty if nothing does."""
    if own.median is None or own.low is None or own.high is None:
        return "", "no run to judge by"
    ends = f"{number(own.low)} to {number(own.high)}"
    if own.of == "blocks":
        return ends, "of one run's blocks: the spread between runs is not known"
    if own.runs == 1:
        return "", "one run: no interval"
    if (own.coverage or 0) < COVERED:
        return ends, f"the range of {own.runs} runs: it has the median with {own.coverage:.0%} only, use 6 or more"
    return ends, ""
