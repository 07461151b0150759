"""Reports generated from records, without a run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mission_control.experiments import charts, report
from mission_control.experiments.engine import summed
from mission_control.experiments.points import planned
from mission_control.experiments.result import JobResult, Transfer
from mission_control.lab import cgroup
from mission_control.scenario import load


def job_result(name: str, transfers: list[Transfer], weight: float | None = None) -> JobResult:
    rest = {"weight": weight, "flows": None, "share": None, "seconds": 1, "phases": {}, "recomputed": 0}
    return JobResult(name=name, transfers=transfers, **rest)


def transfer(**given: object) -> Transfer:
    rest = {"pattern": "shuffle", "evidence": "", "bytes": 100, "local_bytes": 0, "peer_bytes": 0, "seconds": 1}
    rest |= {"started": 0, "flows_peak": 1, "refetches": 0, "resumed": 0, "transport": None}
    return Transfer.model_validate({"from": "a", "to": "b", **rest, **given})


def drawn(folder: Path, records: list[dict[str, object]], jobs: list[JobResult]) -> str:
    """Return the report of a run with these jobs and records."""
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    scenario = load("sort")
    (one,) = planned("sort", scenario, ["local"])
    return report.write(folder, summed({"sort": scenario}, [one], [one.point(jobs=jobs)], folder, False)).read_text()


def progress(job: str, at: float, served: int) -> dict[str, object]:
    same = {"kind": "progress", "worker": "w", "from": "$a$", "to": r"$\b$", "flows": 1, "local_bytes": 0}
    return {**same, "job": job, "time": at, "served_bytes": served, "cpu": at / 2}


def weights(at: float, *jobs: str) -> dict[str, object]:
    own = [{"job": job, "from": "$a$", "to": r"$\b$", "weight": 1 / len(jobs), "flows": 1} for job in jobs]
    return {"kind": "decision", "command": "weights", "time": at, "transfers": own}


def plan(at: float, job: str) -> dict[str, object]:
    legs = [{"transport": "tcp", "reason": "reaches all", "except": None}]
    made = {"legs": legs, "refused": [["tls", "costs more"], ["shm", "not one host"], ["mptcp", "costs more"]]}
    return {"kind": "decision", "command": "plan", "time": at, "job": job, "plan": made}


@pytest.mark.parametrize("name", [r"$\nosuch$", "$5 or $6", r"\$", "plain", "$", "a < b & c"])
def test_any_name_of_a_job_can_be_drawn(tmp_path, name):
    records = [progress(job, float(second), second) for second in range(3) for job in (name, "other")]
    jobs = [job_result(job, [transfer(share=0.5)]) for job in (name, "other")]
    text = drawn(tmp_path, [*records, weights(1.0, name, "other")], jobs)
    plots = [ElementTree.fromstring(plot) for plot in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    labels = {one.text for plot in plots for one in plot.iter() if one.tag.endswith("text")}
    assert {name, f"{name}: $a$ → $\\b$"} <= labels


def test_shares_are_drawn_where_several_transfers_had_weights_at_once(tmp_path):
    records = [progress(job, float(second), second) for second in range(3) for job in ("one", "other")]
    jobs = [job_result(job, [transfer(share=0.5)]) for job in ("one", "other")]
    assert "Shares of the bytes over time" in drawn(tmp_path, [*records, weights(1.0, "one", "other")], jobs)
    apart = [weights(0.0, "one"), weights(1.0, "other")]
    assert "Shares of the bytes over time" not in drawn(tmp_path, [*records, *apart], jobs)


def test_plots_without_data_are_left_out(tmp_path):
    local = [progress("one", float(second), 9) | {"local_bytes": 9, "cpu": 1.0} for second in range(3)]
    assert "<svg" not in drawn(tmp_path, local, [job_result("one", [])])
    assert drawn(tmp_path, [progress("one", float(second), second) for second in range(3)], []).count("<svg") == 0


def test_long_names_do_not_leave_a_plot_without_room(tmp_path, recwarn):
    names = [f"a-rather-long-name-of-a-job-{number}" for number in range(9)]
    records = [progress(job, float(second), second) for second in range(3) for job in names]
    text = drawn(tmp_path, records, [job_result(name, []) for name in names])
    # Matplotlib warns of axes that a legend has squeezed to nothing.
    assert "<svg" in text and not [str(one.message) for one in recwarn if "layout" in str(one.message)]


def test_a_decision_that_is_repeated_is_one_row(tmp_path):
    records = [plan(1.0, "one"), plan(1.5, "two"), plan(2.0, "one"), weights(2.0, "one"), weights(3.0, "one")]
    text = drawn(tmp_path, records, [job_result("one", [])])
    assert "5 decisions, 2 of them different" in text and text.count("reaches all") == 1
    rows = re.findall(r'<tr><th scope="row">(plan|weights)</th>(.*?)</tr>', text)
    assert [re.findall(r'<td class="n">(\d+)</td>', cells)[0] for _, cells in rows] == ["3", "2"]
    assert "one, two" in rows[0][1] and "tls, mptcp: costs more; shm: not one host" in rows[0][1]


def test_transfers_with_the_same_transport_and_reason_are_one_row(tmp_path):
    facts = {"chosen": "tcp", "reason": "required by the job", "negotiated": [], "fallbacks": []}
    own = [transfer(to=to, transport=facts) for to in ("b", "c")] + [transfer(transport=facts | {"reason": "shorter"})]
    text = drawn(tmp_path, [], [job_result("one", own)])
    assert text.count("required by the job") == 1 and "a → b; a → c" in text and "shorter" in text


def test_weights_and_shares_stand_in_the_table_only_if_transfers_shared(tmp_path):
    alone = drawn(tmp_path, [], [job_result("one", [transfer(weight=1.0, share=1.0)])])
    assert '<th scope="col" class="n">weight' not in alone and 'class="share"' not in alone
    both = [job_result(name, [transfer(weight=part, share=part)], part) for name, part in (("one", 0.3), ("two", 0.7))]
    text = drawn(tmp_path, [], both)
    assert re.findall(r'<tr><th scope="row">(\w+)</th><td class="n">(\d+)%', text) == [("two", "70"), ("one", "30")]


def test_a_report_can_be_read_by_keyboard_in_the_dark_and_on_a_phone(tmp_path):
    records = [progress(job, float(second), second) for second in range(3) for job in ("one", "other")]
    text = drawn(tmp_path, records, [job_result("one", [transfer()]), job_result("other", [transfer()])])
    assert '<a class="skip" href="#main">' in text and '<main id="main">' in text and 'name="viewport"' in text
    assert len(re.findall(r'<th(?! scope="(?:col|row)")[ >]', text)) == 0
    # Each table and each plot is in a box that scrolls, and plots have the colours of the page.
    assert text.count('<div class="scroll"') == text.count("<table>") + text.count("<svg") > 3
    assert "currentColor" in text and "#000000" not in text and "#ffffff" not in text


def test_reports_and_the_console_have_the_same_colours():
    def variables(css: str) -> dict[str, str]:
        return dict(re.findall(r"(--\w+): (.+);", css))

    root = Path(__file__).parent.parent
    console = root / "crates/service/console"
    ours = variables(report.LOOK.read_text())
    assert variables((console / "console.css").read_text()).items() <= ours.items()
    listed = re.search(r"COLOURS = \[(.*?)\]", (console / "common.js").read_text())
    assert listed and tuple(re.findall(r"#\w{6}", listed[1])) == charts.COLOURS
    page = re.search(r"colours = \[(.*?)\]", (root / "mission_control/page.html").read_text())
    assert page and tuple(re.findall(r"#\w{6}", page[1])) == charts.COLOURS


def test_groups_of_crashed_programs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "root", lambda: tmp_path)
    gone, old = "4194305", 1_000_000_000  # above every process id
    names = [
        f"exec.{gone}",
        f"exec.{gone}.ab12",
        f"exec.{os.getpid()}.ab12",
        f"exec.{gone}.full",
        "lab.h1",
        "exec.x.new",
    ]
    for name in names:
        (tmp_path / f"{cgroup.PREFIX}{name}").mkdir()
    (tmp_path / f"{cgroup.PREFIX}exec.{gone}.full" / "program").touch()
    (tmp_path / "others.exec.1").mkdir()
    for folder in tmp_path.iterdir():
        if not folder.name.endswith("new"):
            os.utime(folder, (old, old))
    cgroup.remove_stale("exec")
    left = {path.name.removeprefix(cgroup.PREFIX) for path in Path(tmp_path).iterdir()}
    assert left == {f"exec.{os.getpid()}.ab12", f"exec.{gone}.full", "lab.h1", "exec.x.new", "others.exec.1"}
