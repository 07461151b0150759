"""`report.html` of an incast run: goodput over senders, the worlds over each other, their differences as numbers."""

from __future__ import annotations

import itertools
import json
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from mission_control.incast import quantities, synchrony
from mission_control.report import COLOURS, document, figure, label_of, svg, table

DASHES = {"model": "--", "lab": "-"}


def write(folder: Path) -> Path:
    """Draws the report of the run in ``folder``; gives its path.

    Raises:
        FileNotFoundError: there is none.
    """
    result = json.loads((folder / "result.json").read_text())
    path = folder / "report.html"
    path.write_text(document("Mission Control: incast", parts(result)))
    return path


def write_all(folder: Path) -> Path:
    """Draws one report of all runs in a folder; gives its path."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))]
    path, drawn = folder / "report.html", [part for result in results for part in section(result)]
    path.write_text(document("Mission Control: incast", drawn))
    return path


def parts(result: dict[str, Any]) -> list[str]:
    """The page, piece by piece."""
    shown = [(key, json.dumps(value)) for key, value in result["environment"].items()]
    return [*section(result), "<h2>Environment</h2>", table(("what", "value"), shown)]


def section(result: dict[str, Any]) -> list[str]:
    """One scenario: what was hoped, what was seen, and why."""
    good, study = result["ok"] and result["valid"], result["study"]
    words = "interrupted: this is what was measured" if result["interrupted"] else verdict(result)
    summary = [f"<h2>{escape(study['title'])}</h2>"] if study["title"] else []
    summary.append(f'<p><b class="{"good" if good else "bad"}">{escape(words)}</b></p>')
    for word, text in (("The paper", study["paper"]), ("We hope", study["hope"]), ("Because", study["because"])):
        if text:
            summary.append(f"<p><b>{word}:</b> {escape(text)}</p>")
    summary += [f'<p class="bad">{escape(name)}</p>' for name, held in result["checks"].items() if not held]
    summary += [f'<p class="bad">not valid: {escape(why)}</p>' for why in result["invalid_because"]]
    legend = "Solid: measured, with 95 % intervals. Dashed: the model. Dotted: the papers' equations."
    summary += [f"<p>{escape(legend)}</p>", curves(result["points"]), *traces(result["points"])]
    summary.append(table(("onset", "world", "senders"), [onset_row(entry) for entry in result["onset"]]))
    if result["differences"]:
        summary.append(f"<p>{escape(differences_in_words(result))}</p>")
    points = f"<details><summary>All points</summary>{all_points(result['points'])}</details>"
    return [*summary, points]


def verdict(result: dict[str, Any]) -> str:
    measured = len(result["points"])
    return f"{measured} points" + ("" if result["valid"] else ", some of them not valid")


def onset_row(own: dict[str, Any]) -> tuple[str, str, str]:
    return curve_name(own), own["world"], str(own["senders"] or "none of these")


def curve_name(own: dict[str, Any]) -> str:
    return " ".join(filter(None, [own["variant"], quantities.size(own["asked_bytes"])]))


def differences_in_words(result: dict[str, Any]) -> str:
    parts = sorted(abs(difference["part"]) for difference in result["differences"])
    return f"The model is off by {median(parts):.1%} in the median, by {parts[-1]:.1%} at most, of {len(parts)} points."


def curves(points: list[dict[str, Any]]) -> str:
    """Goodput over senders: a colour for each fragment and variant, a dash for each world."""
    drawn, axes = figure(4)
    slow = any(one.get("dilation", 1) > 1 for one in points)
    names = list(dict.fromkeys(curve_name(point) for point in points))
    for number, (name, world) in enumerate(itertools.product(names, DASHES)):
        own = [one for one in points if (curve_name(one), one["world"]) == (name, world) and one["valid"]]
        # A run that went on has the points that it measured again at its end.
        own = sorted((one for one in own if one["goodput_mbit"] is not None), key=lambda one: one["senders"])
        if not own:
            continue
        colour = COLOURS[number // len(DASHES) % len(COLOURS)]
        senders = [one["senders"] for one in own]
        marker = "." if world == "lab" else None
        values = [one["goodput_mbit"] * one.get("dilation", 1) for one in own]
        axes.plot(senders, values, DASHES[world], color=colour, marker=marker, label=label_of(f"{name}, {world}"))
        if world == "model":
            printed = [one["paper_mbit"] * one.get("dilation", 1) for one in own]
            axes.plot(senders, printed, ":", color=colour, label=label_of(f"{name}, as printed"))
        if world == "lab":
            low, high = zip(*([end * one.get("dilation", 1) for end in one["interval95"]] for one in own), strict=True)
            axes.fill_between(senders, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("senders")
    axes.set_ylabel("goodput, Mbit/s" + (", slow motion undone" if slow else ""))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return svg(drawn)


def all_points(points: list[dict[str, Any]]) -> str:
    rows = []
    for point in points:
        flows = point.get("flows", [])
        low, high = point.get("interval95", (0.0, 0.0))
        rows.append(
            (
                point["world"],
                point["variant"],
                quantities.size(point["fragment_bytes"]),
                str(point["senders"]),
                "-" if point["goodput_mbit"] is None else f"{point['goodput_mbit']:.1f}",
                f"{low:.1f} to {high:.1f}" if flows else "",
                str(sum(flow["retransmits"] for flow in flows)) if flows else "",
                str(sum(flow["timeouts"] for flow in flows)) if flows else "",
                str(point.get("drops", "")),
                rto_min_in_words(point.get("rto_min")),
            )
        )
    heads = (
        "world",
        "variant",
        "fragment",
        "senders",
        "Mbit/s",
        "95 %",
        "sent again",
        "timeouts",
        "drops",
        "minimum RTO",
    )
    return table(heads, rows)


def rto_min_in_words(result: dict[str, Any] | None) -> str:
    """Who gave it, and what it came to."""
    if not result or not result["won"]:
        return ""
    return f"{result['won']}: {result['observed_us'] / 1e3:.0f} ms, {result['asked'][result['won']] / 1e3:.0f} asked"


TRACED_S = 3.0
"""Of a trace that are drawn: some stalls, each still to be seen."""


def traces(points: list[dict[str, Any]]) -> list[str]:
    """What arrived when from each traced sender, for the points that have it."""
    result = []
    for point in points:
        if not point.get("trace"):
            continue
        drawn, axes = figure(2.6)
        for sender in sorted({int(row[1]) for row in point["trace"]}):
            rows = [row for row in point["trace"] if row[1] == sender and row[0] <= TRACED_S]
            colour = COLOURS[sender % len(COLOURS)]
            axes.plot(
                [row[0] for row in rows],
                [row[2] / 1e6 for row in rows],
                ".-",
                color=colour,
                label=f"sender {sender + 1}",
            )
        axes.set_xlabel("seconds")
        axes.set_ylabel("MB from it")
        axes.legend(fontsize=8)
        seen = synchrony.synchrony(point["trace"], point["fragment_bytes"], point["rto_s"])
        words = f"{curve_name(point)}, {point['senders']} senders: the first two stood still {seen['stalls']} times, "
        words += f"{seen['together']} of these together, and went on at once in {seen['at_once']} of them."
        result += [f"<p>{escape(words)}</p>", svg(drawn)]
    return result
