"""Replays of traces on real clusters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mission_control
from mission_control.experiments.engine import conduct
from mission_control.experiments.points import Conditions
from mission_control.experiments.replay import under_way
from mission_control.experiments.result import load
from mission_control.scenario import validate
from mission_control.traces import scale, swim
from mission_control.workloads import replay
from tests.conftest import mission, status, until

SIZES = [
    *[(3_000_000, 2_000_000, 1_000_000), (100, 41, 37), (5000, 0, 700_000), (0, 0, 0)],
    *[(0, 1_500_000, 0), (0, 0, 300), (200_000, 3_000_000, 10), (50_000, 0, 0), (0, 5, 2_000_000)],
    *[(1_000_000, 1_000_000, 1_000_000), (10, 10, 10), (64_000, 640_000, 64_000)],
]
"""Input, shuffle and output bytes of a dozen jobs; some are 0."""


def trace(folder: Path, jobs: int = len(SIZES), gap: float = 0.5) -> Path:
    path = folder / "dozen.tsv"
    swim.write(path, [swim.TraceJob(f"job{at}", at * gap, *SIZES[at % len(SIZES)]) for at in range(jobs)])
    return path


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A dozen jobs, in a local world, unscaled."""
    folder = tmp_path_factory.mktemp("replay")
    words = (
        f"replay {trace(folder)} --scale 1 --trace-hosts 3 --hosts 3 --speed 1 --block 300kB --job-limit 2500kB --json"
    )
    done = mission(*words.split(), "--results", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_job_of_a_dozen_is_right(replayed):
    assert replayed["ok"] and len(replayed["jobs"]) == len(SIZES)
    assert replayed["checks"] == dict.fromkeys(
        ["every job ended", "input of every job", "shuffle of every job", "output of every job"], True
    )
    for job, sizes in zip(replayed["jobs"], SIZES, strict=True):
        assert tuple(job["trace_bytes"].values()) == sizes
        assert tuple(job["bytes"].values()) == tuple(min(size, 2_500_000) for size in sizes)
    moved = {job["name"]: sum(one["bytes"] for one in job["transfers"]) for job in replayed["jobs"]}
    assert all(moved[job["name"]] >= job["bytes"]["shuffle"] for job in replayed["jobs"])


def test_jobs_start_on_time_and_side_by_side(replayed):
    jobs, (point,) = replayed["jobs"], replayed["points"]
    assert [job["submitted_s"] for job in jobs] == pytest.approx([at * 0.5 for at in range(len(jobs))])
    late = sorted(job["started_s"] - job["submitted_s"] for job in jobs)
    assert late[0] >= 0 and late[len(late) // 2] < 0.25, late
    assert all(job["started_s"] < job["ended_s"] for job in jobs)
    assert replayed["late_s"]["max"] == pytest.approx(late[-1])
    times = sorted(job["ended_s"] - job["submitted_s"] for job in jobs)
    assert replayed["job_time_s"]["max"] == pytest.approx(times[-1])
    assert point["measures"]["job_median"] == {"value": replayed["job_time_s"]["p50"], "unit": "s"}


def test_what_was_distorted_is_in_result_and_report(replayed):
    found = replayed["distortion"]
    assert (found["cut"], found["cut_bytes"]) == (2, 1_000_000) and found["factor"] == 1
    assert (found["shuffle_zero"], found["shuffle_small"], found["shuffling"]) == (0, 3, 8)
    folder = Path(replayed["results"])
    page = (folder / "report.html").read_text()
    for words in ("figure 7", "figure 8", "figure 9", "Jobs under way", "2 jobs had more than 2.4 MiB"):
        assert words in page
    assert page.count("<svg") >= 4 and "0012-job11" in page
    assert load(folder).jobs[3].bytes == {"input": 0, "shuffle": 0, "output": 0}
    assert mission("report", str(folder)).returncode == 0


def test_the_result_is_as_its_schema_says(replayed):
    described = json.loads(mission("schema", "result").stdout)["$defs"]
    assert set(replayed["points"][0]) <= set(described["ReplayPoint"]["properties"])
    assert set(replayed["jobs"][0]) <= set(described["JobResult"]["properties"])


def test_policies_are_compared_and_few_threads_make_jobs_late(tmp_path):
    values = {
        "topology": {"hosts": 2},
        "workload": {"kind": "replay", "trace": str(trace(tmp_path, 16, 0.001)), "trace_hosts": 2, "scale": 0.1},
        "study": {"compare": [{"name": name, "set": {"control.policy": name}} for name in ("fair", "fifo")]},
    }
    values["workload"] |= {"at_once": 1, "block": "100 kB"}
    result = conduct({"replay": validate(values)}, Conditions(), results=tmp_path)
    assert result.ok, result.errors
    assert [(point.variant, point.policy) for point in result.points] == [("fair", "fair"), ("fifo", "fifo")]
    assert all(point.under_way_max == 1 and point.late >= 3 for point in result.points)
    (ratio,) = result.comparisons
    assert ratio.measure == "job_median" and ratio.median is not None
    page = (Path(result.folder) / "report.html").read_text()
    assert "Jobs of fair" in page and "Jobs of fifo" in page


def test_a_running_cluster_replays_and_keeps_nothing(tmp_path, client):
    words = f"replay {trace(tmp_path, 6, 0.1)} --trace-hosts 3 --scale 1 --speed 1 --json --scheduler".split()
    done = mission(*words, client.scheduler.address, "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["world"] == "cluster" and found["distortion"]["factor"] == 1 and len(found["jobs"]) == 6
    assert all(job["admitted"] == job["name"] for job in found["jobs"])
    until(lambda: not status(client)["objects"], "objects are freed")


@pytest.mark.parametrize("when", ["jobs run", "most jobs are not due"])
def test_an_interrupt_ends_a_replay_and_leaves_what_was_done(tmp_path, when):
    gap = 0.2 if when == "jobs run" else 30
    words = [str(trace(tmp_path, 60, gap)), "--scale", "1", "--trace-hosts", "2", "--hosts", "2", "--speed", "1"]
    command = [sys.executable, "-m", "mission_control", "replay", *words, "--results", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        next(line for line in running.stderr if re.match("[1-9][0-9]* of 60 jobs done", line))
        os.kill(running.pid, signal.SIGINT)
        asked = time.monotonic()
        error = running.communicate(timeout=60)[1]
    assert running.returncode == 130 and "go on with --resume" in error, error
    assert time.monotonic() - asked < 40
    (left,) = tmp_path.glob("*/result.json")
    found = json.loads(left.read_text())
    assert found["interrupted"] and not found["ok"] and not found["errors"]
    assert 0 < len([job for job in found["jobs"] if job["ended_s"] is not None]) < 60
    assert found["checks"]["every job ended"] is False
    assert (left.parent / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("absent.tsv", "trace absent.tsv: there is no such file"),
        ("bad.tsv", "bad.tsv, line 2: map input bytes 'much'; expected a whole number of bytes"),
        ("sample --scale much", "--scale: write a number, not 'much'"),
        ("sample --scale 0", "--scale: write more than 0, not 0"),
        ("sample --speed -1", "--speed: write more than 0, not -1"),
        ("sample --speed inf", "--speed: write a finite number, not 'inf'"),
        ("sample --hours 1 --minutes 2", "--hours and --minutes exclude each other"),
        ("sample --minutes 0", "--minutes 0: "),
        ("sample --start 90", "no jobs in the 1 h from hour 90 on"),
        ("sample --at-once 0", "--at-once: write at least 1, not 0"),
        ("sample --job-limit 5", "--job-limit: "),
        ("sample --job-limit 1TiB", "--job-limit: "),
        ("sample --in mars", "--in mars: replay does not run there"),
        ("sample --in cluster", "--in cluster: replay does not run there"),
        ("sample --policy absent", 'there is no policy "absent": use one of'),
        ("sample --compare fair,absent", "--compare absent: neither a policy"),
        ("sample --compare fair,fair", "--compare fair,fair: "),
        ("sample --set control.priorities=[1,2]", "control.priorities: replay does not read it"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, words, said):
    (tmp_path / "bad.tsv").write_text("a\t0\t0\t1\t2\t3\nb\t0\t0\tmuch\t2\t3\n")
    done = mission("replay", *words.split(), cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_run_reads_the_same_settings(tmp_path):
    done = mission("run", "replay", "--trace", "absent.tsv", cwd=tmp_path)
    assert done.returncode == 2 and "trace absent.tsv: there is no such file" in done.stderr
    shown = mission("run", "replay", "--help").stdout
    done = mission("run", "replay", "--data", str(tmp_path))
    assert done.returncode == 2 and "--data: replay does not read it" in done.stderr
    assert "--job-limit" in shown and "--speed" in shown and "--points" not in shown


def job_of(sizes: tuple[int, int, int]) -> scale.ScaledJob:
    return scale.ScaledJob("job", 0.0, *sizes, swim.TraceJob("job", 0, *sizes))


def test_tasks_hold_a_block_and_content_of_another_place_is_noticed():
    made = replay.ReplayedJob(job_of((10_000_001, 1_000_000, 3_000_000)), 0, 1_000_000, 1, ["a"])
    assert (made.maps, made.reduces) == (11, 3)
    only_maps = replay.ReplayedJob(job_of((10, 0, 3_000_000)), 0, 1_000_000, 1, ["a"])
    assert (only_maps.maps, only_maps.reduces) == (3, 0)
    assert replay.tasks(1 << 40, 1) == replay.TASKS_MAX
    assert sum(replay.split(1_000_003, 7)) == 1_000_003 and max(replay.split(10, 3)) == 4
    view = bytearray(200_000)
    replay.fill(view, (1, 2, 3))
    assert replay.is_right(view, (1, 2, 3), 200_000)
    assert not replay.is_right(view, (1, 2, 4), 200_000) and not replay.is_right(view, (1, 2, 3), 199_999)
    for place in (0, 100_000, 199_999):
        view[place] ^= 1
        assert not replay.is_right(view, (1, 2, 3), 200_000)
        view[place] ^= 1
    moved = np.roll(np.frombuffer(bytes(view), np.uint8), 65536)
    assert not replay.is_right(moved, (1, 2, 3), 200_000)


def damaged(done: replay.Done) -> replay.Done:
    """The same with other bytes instead of the expected ones."""
    assert done.shuffle is not None
    return done._replace(shuffle=mission_control.put([bytes(size) for size in done.shuffle.sizes]))


def test_damage_on_the_way_is_counted(client):
    made = client.submit(replay.map_part, (1, 0, 0), 0, [1000, 2000], 0, pure=False)
    good = client.submit(replay.reduce_part, [made], (1, 0), 1, 0, pure=False).result()
    assert (good.arrived, good.wrong) == (2000, 0)
    wrong = client.submit(damaged, made, pure=False)
    bad = client.submit(replay.reduce_part, [wrong], (1, 0), 1, 0, pure=False).result()
    assert (bad.arrived, bad.wrong) == (2000, 1)


def test_jobs_under_way_are_counted_over_time():
    assert under_way({"a": 0.0, "b": 1.0}, {"a": 2.0}) == [(0.0, 1), (1.0, 2), (2.0, 1)]
    # A job that begins when another ends counts after it.
    assert max(count for _, count in under_way({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 2.0})) == 1
