"""`report.html`: one page that stands alone, of sections, drawn from a run's result and records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mission_control import _native
from mission_control.experiments import charts, report_of_run
from mission_control.experiments.compare import interval_and_note, number
from mission_control.experiments.pieces import Piece, details, drawn, facts, links, table, text
from mission_control.experiments.result import Comparison, Overhead, Point, Result, Summary, at_in_words, load

RECORDS = "records.jsonl"
LOOK = Path(__file__).parents[1] / "look.css"


def write(folder: Path, result: Result | None = None) -> Path:
    """Draw the report of the run in ``folder``; give its path.

    Raises:
        BadInput: there is none.
    """
    result = result or load(folder)
    records = []
    if len(result.points) == 1 and (folder / RECORDS).exists():
        records = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    path = folder / "report.html"
    path.write_text(page(result, records))
    return path


def page(result: Result, records: list[dict[str, Any]]) -> str:
    """Return the page. ``records`` are those of the only point."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    from mission_control.workloads import WORKLOADS

    loader = PackageLoader("mission_control.experiments")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    sections = [{"title": "", "parts": verdict(result)}]
    if result.overheads:
        sections.append({"title": "Incast overhead", "parts": overhead_parts(result.overheads)})
    for name, study in result.studies.items():
        if parts := section(name, study, result):
            title = (study["title"] or name) if len(result.studies) > 1 else "What was measured"
            sections.append({"title": title, "parts": parts})
    if len(result.points) == 1 and result.points[0].jobs:
        (study,), (point,) = result.studies.values(), result.points
        if not WORKLOADS[study["kind"]].many_jobs:
            sections += report_of_run.sections(point, records)
        elif point.ports:
            # A line for each transfer of so many jobs would hide the rest.
            sections.append({"title": "The lab", "parts": report_of_run.lab(point)})
    sections.append({"title": "Environment", "parts": surroundings(result)})
    kind = "run" if len(result.points) == 1 else "study"
    title = next(iter(result.studies.values()))["title"] if len(result.studies) == 1 else ""
    given = {"title": title or name_of(result), "subtitle": f"{kind} {Path(result.folder).name}"}
    return environment.get_template("report.html").render(
        sections=sections, look=Markup(LOOK.read_text().strip()), **given
    )


def name_of(result: Result) -> str:
    """Return a name for a result that has no title."""
    return ", ".join(result.studies).capitalize() if len(result.studies) < 4 else f"{len(result.studies)} studies"


def surroundings(result: Result) -> list[Piece]:
    """Make the table of where it was measured. Points of an earlier session may have another environment."""
    found: dict[str, list[str]] = {}
    for own in [point.environment for point in result.points] or [result.environment]:
        for key, value in own.items():
            found.setdefault(key.replace("_", " "), []).append(plainly(value))
    rows = [(key, "; ".join(dict.fromkeys(values))) for key, values in found.items()]
    first = result.environment
    words = [f"{first['cores']} cores"] if "cores" in first else []
    words += [f"{name} {first[key]}" for name, key in (("Linux", "kernel"), ("Python", "python")) if key in first]
    return [details(", ".join(words) or "Where it was measured", table(("what", "value"), rows))] if rows else []


def plainly(value: Any) -> str:
    """Format a value of the environment."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {own}" for key, own in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def verdict(result: Result) -> list[Piece]:
    """Make what comes first: whether it held, how long it took, what it moved, and what went wrong."""
    bad = [point for point in result.points if not (point.ok and point.valid)]
    missed = [one for one in result.comparisons if one.held is False]
    single = len(result.points) == 1
    if single:
        words = ["Not every check held" if bad else "Every check held"]
    elif bad:
        words = [f"{len(bad)} of {len(result.points)} points are not correct or not valid"]
    else:
        words = [f"All {len(result.points)} points are correct and valid"]
    if any(one.expected for one in result.comparisons):
        count = f"{len(missed)} expectation{'s' if len(missed) != 1 else ''} missed"
        words.append(count if missed else "every expectation held")
    if result.interrupted:
        words.append("interrupted: this is what was done")
    held = result.ok and result.valid
    parts = [text(("✓ " if held else "✗ ") + ", ".join(words), "verdict " + ("good" if held else "bad"))]
    for point in bad:
        label = "" if single else f"{point.label()}: "
        parts += [text(label + why, "bad") for why in point.wrong()]
    parts += [facts(facts_of(result)), *(text(note, head="Note:") for note in result.notes)]
    if single:
        parts += checks(result.points[0])
    if len(result.studies) > 1:
        rows = [(one["title"] or name, one["paper"], seen(name, one, result)) for name, one in result.studies.items()]
        parts.append(table(("what", "the paper", "here"), rows))
    return parts


def facts_of(result: Result) -> list[tuple[str, str]]:
    """Return what a result is, in few words: names and values."""
    points = result.points
    if len(points) != 1:
        variants = list(dict.fromkeys(point.variant for point in points if point.variant))
        repetitions = max((point.repetition for point in points), default=0) + 1
        took = sum(point.took_s for point in points)
        return [
            ("points", str(len(points))),
            ("variants", ", ".join(variants) if len(variants) < 6 else str(len(variants))),
            ("repetitions", str(repetitions) if repetitions > 1 else ""),
            ("world", result.world),
            ("measured in", f"{took:.0f} s" if took >= 1 else ""),
        ]
    transfers = [transfer for job in result.jobs for transfer in job.transfers]
    moved, stayed = (sum(getattr(one, name) for one in transfers) for name in ("bytes", "local_bytes"))
    return [
        ("time", f"{result.seconds:.2f} s" if result.seconds else ""),
        ("jobs", str(len(result.jobs)) if result.jobs else ""),
        ("fetched", _native.format_bytes(moved) if moved else ""),
        ("of it from other workers", _native.format_bytes(moved - stayed) if moved else ""),
        ("policy", (result.policy or "") if len(result.jobs) > 1 else ""),
        ("world", result.world),
    ]


def checks(point: Point) -> list[Piece]:
    every = {**point.checks, **point.expectations}
    rows = [(name, "yes" if held else "NO") for name, held in every.items()]
    held = sum(every.values())
    head = f"{held} of {len(rows)} checks held" if held < len(rows) else f"{held} check{'s' if held != 1 else ''} held"
    return [details(head, table(("check", "held"), rows))] if rows else []


def seen(name: str, study: dict[str, Any], result: Result) -> str:
    """What a study has found, in a line."""
    own: Sequence[Summary] = [one for one in result.comparisons if one.study == name]
    if not own and not study["compares"]:
        own = [one for one in result.summary if one.study == name][:12]
    onsets = [
        f"onset {one.world} {one.variant} {one.of_goodput or 'none'}" for one in result.onset if one.study == name
    ]
    words = onsets or [f"{in_words(one)}: {number(one.median)}" for one in own]
    return "; ".join(words) or "nothing"


def in_words(one: Summary) -> str:
    variants = f"{one.variant} to {one.to}" if isinstance(one, Comparison) else one.variant
    return ", ".join(filter(None, [one.measure.replace("_", " "), at_in_words(one.at), variants]))


def section(name: str, study: dict[str, Any], result: Result) -> list[Piece]:
    """One scenario: what was hoped, what was seen, and why."""
    from mission_control.workloads import WORKLOADS

    workload = WORKLOADS[study["kind"]]
    points = [point for point in result.points if point.study == name]
    parts = [text(study[key], head=head) for key, head in HEADS.items() if study[key]]
    if len(result.points) > 1:
        judged: list[Summary] = []
        for measure in study["measure"]:
            label = workload.measures[measure].label
            found = [one for one in result.summary if (one.study, one.measure) == (name, measure)]
            ratios = [one for one in result.comparisons if (one.study, one.measure) == (name, measure)]
            parts += comparison(label, found, ratios, points, workload.axis)
            judged += [one for one in (*ratios, *found) if one.world != "model"]
        # The same for most rows and measures, so it is said once.
        notes = dict.fromkeys(note for one in judged if (note := interval_and_note(one)[1]))
        parts += [text(f"{note[0].upper()}{note[1:]}.", "soft") for note in notes]
    parts += workload.pieces(points)
    parts += onset_parts([one for one in result.onset if one.study == name])
    off = sorted(abs(one.part) for one in result.differences if one.study == name)
    if off:
        words = f"The model is off by {median(off):.1%} in the median, by {off[-1]:.1%} at most, of {len(off)} points."
        parts.append(text(words))
    if shown := shown_over_time(points) if len(result.points) > 1 else {}:
        parts.append(drawn(charts.over_time(shown), "Over time, of one run each"))
    if len(result.points) > 1:
        parts.append(details(f"All {len(points)} points", all_points(points, workload.measures)))
    below = "" if len(result.studies) == 1 else f"{name}/"
    runs = [
        (Path(one.folder).name, f"{below}{one.folder}/report.html")
        for one in points
        if one.folder and not within(result, one)
    ]
    if runs:
        parts.append(details(f"Reports of the {len(runs)} runs", links(runs)))
    return parts


def within(result: Result, point: Point) -> bool:
    """Return whether the result is that of the point alone, in the point's own folder."""
    return Path(result.folder).parts[-2:] == Path(point.folder or "").parts[-2:]


HEADS = {"paper": "The paper:", "hope": "We hope:", "because": "Because:"}


def comparison(
    label: str, found: Sequence[Summary], ratios: Sequence[Comparison], points: Sequence[Point], axis: str
) -> list[Piece]:
    """Show one quantity: ratios of variants, a plot, and medians."""
    came = {True: "yes", False: "NO", None: ""}
    several = len({one.world for one in found}) > 1
    parts = []
    if ratios:
        rows: list[tuple[Any, ...]] = [
            (
                *(one.world if several else "", at_in_words(one.at), f"{one.variant} to {one.to}"),
                *(number(one.median), came[one.held], one.expected, interval_and_note(one)[0]),
            )
            for one in ratios
        ]
        head = ("world", "at", "ratio", "median", "held", "expected", "95 % interval")
        parts.append(table(head, rows, f"{label}: variants compared, repetition by repetition"))
    rows = [
        (
            *(one.world if several else "", at_in_words(one.at), one.variant),
            *(number(one.median), interval_and_note(one)[0], one.runs),
        )
        for one in found
    ]
    medians = table(("world", "at", "variant", label, "95 % interval", "runs"), rows, f"{label}: medians")
    if found and axis:
        words = "Solid: measured, with intervals."
        if any(one.world == "model" for one in found):
            words = "Dashed: the model. Dotted: the papers' equations." + (f" {words}" if several else "")
        parts += [drawn(charts.curves(found, points, axis, label), f"{label}. {words}"), details("Medians", medians)]
    else:
        parts += [drawn(charts.medians(found, label), f"{label}: medians")] if len(found) > 1 else []
        parts.append(medians)
    return parts


def overhead_parts(found: Sequence[Overhead]) -> list[Piece]:
    """Equation 5, and figure 6 of paper 000: completion times above, overheads below."""
    words = (
        "Completion time with the variant's minimum RTO, less that with 1 ms, as a fraction of the latter (equation 5)."
    )
    rows = [
        (
            *(one.study, at_in_words(one.at), one.variant, number(one.job_seconds), number(one.job_seconds_1ms)),
            *(number(one.median), interval_and_note(one)[0], one.runs),
        )
        for one in found
    ]
    head = ("what", "at", "variant", "job, s", "with 1 ms, s", "overhead", "95 % interval", "runs")
    return [text(words), drawn(charts.overheads(found)), table(head, rows)]


def onset_parts(onsets: Sequence[Any]) -> list[Piece]:
    from mission_control.incast import quantities

    rows = [
        (
            f"{one.variant} {quantities.size(one.asked_bytes)}".strip(),
            one.world,
            str(one.of_goodput or "none of these"),
            str(one.senders or "none of these"),
        )
        for one in onsets
    ]
    return [table(("onset", "world", "senders, by goodput", "by the median block"), rows)] if rows else []


def shown_over_time(points: Sequence[Point]) -> dict[str, Point]:
    """Of each variant one point to look at: the first that counts at the last place."""
    shown: dict[str, Point] = {}
    for point in points:
        name = point.variant or at_in_words(point.at)
        if point.counts and point.samples.get("seconds") and (name not in shown or shown[name].at != point.at):
            shown[name] = point
    return shown


def all_points(points: Sequence[Any], measures: Mapping[str, Any]) -> Piece:
    have = [name for name in measures if any(name in point.measures for point in points)]
    rows = []
    for point in points:
        values = [number(point.measures[name].value) if name in point.measures else "" for name in have]
        place = (point.world, point.variant, at_in_words(point.at), point.repetition + 1)
        rows.append(
            (*place, *values, rto_min_in_words(getattr(point, "rto_min", None)), "yes" if point.counts else "NO")
        )
    head = ("world", "variant", "at", "repetition", *(measures[name].label for name in have), "minimum RTO", "counts")
    return table(head, rows)


def rto_min_in_words(result: dict[str, Any] | None) -> str:
    """Who gave it, and what it came to."""
    if not result or not result["won"]:
        return ""
    return f"{result['won']}: {result['observed_us'] / 1e3:.0f} ms, {result['asked'][result['won']] / 1e3:.0f} asked"
