"""`report.html` of a study: what was hoped, what was seen, and why, for each of its scenarios."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mission_control.report import COLOURS, document, figure, label_of, over_time, svg, table

UNITS = {
    "shuffle_seconds": "shuffle, s",
    "job_seconds": "job, s",
    "mean_job_seconds": "mean job, s",
    "fairness": "Jain's index",
    "share": "first job's part of the bytes",
    "first_shuffle_seconds": "first job's shuffle, s",
}


STUDY = "study.json"
"""In a study's folder: all that its report is drawn from."""


def write(folder: Path) -> Path:
    """Draws the report of the study in ``folder``; gives its path.

    Raises:
        FileNotFoundError: there is none.
    """
    result = json.loads((folder / STUDY).read_text())
    parts = [verdict(result), summary(result)]
    for name, study in result["studies"].items():
        parts += section(name, study, result)
    path = folder / "report.html"
    path.write_text(document("Mission Control: study", parts))
    return path


def verdict(result: dict[str, Any]) -> str:
    made, bad = result["results"], [entry for entry in result["results"] if invalid_reasons(entry)]
    words = [f"{len(made)} runs", f"{len(bad)} of them not right or not valid" if bad else "all right and valid"]
    missed = [ratio for ratio in result["ratios"] if ratio["held"] is False]
    words.append(f"{len(missed)} expectations missed" if missed else "every expectation held")
    if result["interrupted"]:
        words.append("interrupted: this is what was done")
    return f'<p><b class="{"good" if result["ok"] else "bad"}">{escape(", ".join(words))}</b></p>'


def summary(result: dict[str, Any]) -> str:
    """Paper and lab side by side."""
    rows = []
    for name, study in result["studies"].items():
        seen = [ratio_in_words(ratio) for ratio in result["ratios"] if ratio["study"] == name]
        if not study["compare"]:
            seen = [median_in_words(median) for median in result["medians"] if median["study"] == name]
        rows.append((study["title"] or name, study["paper"], "; ".join(seen) or "nothing"))
    return table(("what", "the paper", "here"), rows)


def section(name: str, study: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """One scenario."""
    results = [entry for entry in result["results"] if entry["study"] == name]
    medians = [median for median in result["medians"] if median["study"] == name]
    parts = [f"<h2>{escape(study['title'] or name)}</h2>"]
    for word, text in (("The paper", study["paper"]), ("We hope", study["hope"]), ("Because", study["because"])):
        if text:
            parts.append(f"<p><b>{word}:</b> {escape(text)}</p>")
    for measure in study["measure"]:
        parts += comparison(measure, [median for median in medians if median["measure"] == measure], result["ratios"])
    shown = shown_runs(results)
    if shown:
        parts.append("<p>Over time, of one run each:</p>" + over_time(shown))
    for entry in results:
        if why := invalid_reasons(entry):
            label = f"{at_in_words(entry['at'])} {entry['variant']} {entry['repetition'] + 1}"
            parts.append(f'<p class="bad">{escape(label)}: {escape(why)}</p>')
    links = [
        f'<a href="runs/{Path(entry["results"]).name}/report.html">{escape(Path(entry["results"]).name)}</a>'
        for entry in results
        if "results" in entry
    ]
    parts.append(f"<details><summary>{len(links)} runs</summary><p>{', '.join(links)}</p></details>")
    return parts


def comparison(measure: str, medians: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> list[str]:
    """One quantity: its medians, ratios, and a drawing."""
    rows: list[tuple[Any, ...]] = []
    for median in medians:
        rows.append(
            (at_in_words(median["at"]), median["variant"], number(median["median"]), spread(median), median["runs"])
        )
    parts = ["<p><b>We see:</b></p>", table(("at", "variant", UNITS[measure], "interval", "runs"), rows)]
    rows = []
    for ratio in ratios:
        if medians and ratio["study"] == medians[0]["study"] and ratio["measure"] == measure:
            what, came = f"{ratio['variant']} to {ratio['to']}", {True: "yes", False: "NO", None: ""}[ratio["held"]]
            rows.append(
                (at_in_words(ratio["at"]), what, number(ratio["median"]), spread(ratio), ratio["expected"], came)
            )
    if rows:
        parts.append(table(("at", "ratio", "median", "interval", "expected", "held"), rows))
    if medians:
        parts.append(drawing(medians, UNITS[measure]))
    return parts


def drawing(medians: Sequence[dict[str, Any]], unit: str) -> str:
    """Medians and intervals: a group for each place, a point for each variant."""
    drawn, axes = figure()
    places = list(dict.fromkeys(at_in_words(entry["at"]) for entry in medians))
    variants = list(dict.fromkeys(entry["variant"] for entry in medians))
    for index, variant in enumerate(variants):
        own = [median for median in medians if median["variant"] == variant]
        shift = (index - (len(variants) - 1) / 2) * 0.12
        axes.errorbar(
            [places.index(at_in_words(median["at"])) + shift for median in own],
            [median["median"] for median in own],
            [
                [median["median"] - median["low"] for median in own],
                [median["high"] - median["median"] for median in own],
            ],
            fmt="o",
            capsize=3,
            color=COLOURS[index % len(COLOURS)],
            label=label_of(variant) or None,
        )
    axes.set_xticks(range(len(places)), map(label_of, places))
    axes.set_xlabel("")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    if any(variants):
        axes.legend(frameon=False, ncols=min(4, len(variants)), loc="lower center", bbox_to_anchor=(0.5, 1))
    return svg(drawn)


def shown_runs(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each variant one run to look at: the first valid one at the last place."""
    shown: dict[str, dict[str, Any]] = {}
    for result in results:
        if not invalid_reasons(result) and result.get("samples", {}).get("seconds"):
            name = result["variant"] or at_in_words(result["at"])
            if name not in shown or shown[name]["at"] != result["at"]:
                shown[name] = result
    return shown


def invalid_reasons(result: dict[str, Any]) -> str:
    """Why a run counts for nothing; empty where it does."""
    why = [*result.get("errors", {}).values(), *result.get("invalid_because", ())]
    why += [check for check, held in result.get("checks", {}).items() if not held]
    return "; ".join(why) if why or (result["ok"] and result.get("valid", True)) else "not right"


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def spread(own: dict[str, Any]) -> str:
    """An interval and what it covers."""
    if own["median"] is None:
        return "no run to judge by"
    return f"{number(own['low'])} to {number(own['high'])} ({own['coverage']:.0%})"


def at_in_words(at: dict[str, Any]) -> str:
    return ", ".join(f"{path.rpartition('.')[2].replace('_', ' ')} {value}" for path, value in at.items())


def ratio_in_words(ratio: dict[str, Any]) -> str:
    place = at_in_words(ratio["at"])
    what = f"{UNITS[ratio['measure']].partition(',')[0]}, {ratio['variant']} to {ratio['to']}"
    return f"{what}{f' ({place})' if place else ''}: {number(ratio['median'])}"


def median_in_words(median: dict[str, Any]) -> str:
    return f"{UNITS[median['measure']]}, {at_in_words(median['at'])}: {number(median['median'])}"
