"""`mission bench report`: the numbers are read from what commands print; what is missing is said and loses nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mission_control.bench import report


def ratios(**values: float) -> str:
    return json.dumps({"ratios": values})


def test_one_ratio_is_a_value_and_several_are_a_range():
    read = report.of_ratios(r".*: wall, Dask, on disk / Mission Control")
    one, two = "a: wall, Dask, on disk / Mission Control", "b: wall, Dask, on disk / Mission Control"
    other = "a: wall of the first, Dask, on disk / Mission Control"
    assert read(ratios(**{one: 2.0, other: 9.0})) == (2.0, None, None)
    assert read(ratios(**{one: 2.0, two: 3.5, other: 9.0})) == (None, 2.0, 3.5)
    with pytest.raises(LookupError, match="no ratio is named"):
        read(ratios(**{other: 9.0}))


def test_lost_cpu_time_is_in_per_cent_at_the_worst_number_of_threads():
    def row(threads: int, median: float, measured: str = "worker cpu", mode: str = "Mission Control") -> dict[str, Any]:
        own = {"threads": threads, "program": "tasks", "mode": mode, "measured": measured}
        return own | {"median": median, "low": median - 0.03, "high": median + 0.04}

    rows = [row(1, 1.01), row(4, 1.05), row(8, 1.02), row(4, 1.4, "scheduler cpu"), row(4, 1.3, mode="another")]
    assert report.lost_cpu(json.dumps({"ratios": rows})) == pytest.approx((5, 2, 9))


def test_a_study_gives_an_interval_or_the_range_of_its_points_or_says_that_no_run_counts():
    read = report.of_study("summary", "goodput", "auto")

    def study(*found: tuple[float | None, float | None, float | None]) -> str:
        entries = [dict(zip(("median", "low", "high"), own, strict=True)) for own in found]
        return json.dumps({"summary": [{"measure": "goodput", "variant": "auto", **own} for own in entries]})

    assert read(study((94.0, 93.0, 95.0))) == (94.0, 93.0, 95.0)
    assert read(study((94.0, 94.0, 94.0))) == (94.0, None, None)
    assert read(study((94.0, None, None), (93.0, 93.0, 93.0))) == (None, 93.0, 94.0)
    with pytest.raises(LookupError, match="no run of auto counts"):
        read(study((None, None, None)))
    with pytest.raises(LookupError, match="has no goodput of auto"):
        read(study())


def test_a_sentence_has_median_and_most():
    assert report.sentence("kill_the_leader: 30 rounds, median 3.2 s, most 3.9 s\n") == (3.2, None, 3.9)
    with pytest.raises(LookupError):
        report.sentence("nothing")


def test_a_command_that_fails_or_is_interrupted_keeps_the_other_rows(monkeypatch):
    printed = {row.command: ratios(**{"64.0 MiB objects": 1.9}) for row in report.ROWS if row.name == "messages"}

    def output(command: str) -> str:
        if "dask" in command:
            raise LookupError("it ended with status 3")
        if command not in printed:
            raise KeyboardInterrupt
        return printed[command]

    monkeypatch.setattr(report, "output", output)
    monkeypatch.setattr(report, "NEEDS", {name: (text, lambda: True) for name, (text, _) in report.NEEDS.items()})
    found = report.measure(["merge-text", "messages", "overhead", "idle"])
    assert found["interrupted"]
    assert [row.get("why", row.get("value")) for row in found["rows"]] == ["it ended with status 3", 1.9]
    monkeypatch.setitem(report.NEEDS, "root", ("run it as root", lambda: False))
    (row,) = report.measure(["idle"])["rows"]
    assert row["why"] == "run it as root"
