"""Reports generated from records, without a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mission_control.experiments import report
from mission_control.experiments.engine import summed
from mission_control.experiments.points import planned
from mission_control.experiments.result import JobResult
from mission_control.lab import cgroup
from mission_control.scenario import load


@pytest.mark.parametrize("name", [r"$\nosuch$", "$5 or $6", r"\$", "plain", "$"])
def test_any_name_of_a_job_can_be_drawn(tmp_path, name):
    progress = {"kind": "progress", "worker": "w", "job": name, "from": "$a$", "to": r"$\b$", "cpu": 0.0, "flows": 1}
    records = [{**progress, "time": float(second), "served_bytes": second, "cpu": second / 2} for second in range(3)]
    own = {"job": name, "from": "$a$", "to": r"$\b$", "weight": 1.0, "flows": 1}
    records.append({"kind": "decision", "command": "weights", "time": 1.0, "transfers": [own]})
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    scenario = load("sort")
    (one,) = planned("sort", scenario, ["local"])
    job = JobResult(name=name, weight=None, flows=None, share=None, seconds=1, phases={}, recomputed=0, transfers=[])
    text = report.write(
        tmp_path, summed({"sort": scenario}, [one], [one.point(jobs=[job])], tmp_path, False)
    ).read_text()
    # Matplotlib writes the text of each label beside its outlines.
    assert f"<!-- {name}: bytes -->" in text
    assert f"<!-- {name}: $a$ → " in text or "<!-- $a$ → " in text


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
