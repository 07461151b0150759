"""Studies: variants that take turns, repetitions, what is varied; going on after an interrupt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from mission_control import study
from mission_control.runs import fairness, parts_of_bytes
from mission_control.scenario import BadInput, Variant, load, with_settings
from tests.conftest import mission, until

WORDS = ["--size", "1MiB", "--partitions", "2", "--workers", "2"]


def test_the_interval_of_a_median_is_that_of_order_statistics():
    """Conover 1999, table A3: with 6 values the smallest and the largest, with 9 the second of each end."""

    def result(values: Sequence[float]) -> tuple[float, ...]:
        own = study.interval(values)
        return own["median"], own["low"], own["high"], round(own["coverage"], 3)

    assert result([3.0]) == (3, 3, 3, 0)
    assert result([5, 1, 3, 2, 4]) == (3, 1, 5, 0.938)
    assert result(range(1, 7)) == (3.5, 1, 6, 0.969)
    assert result(range(1, 10)) == (5, 2, 8, 0.961)
    assert result(range(1, 21)) == (10.5, 6, 15, 0.959)
    assert study.interval([])["median"] is None


def test_jains_index_is_one_where_all_are_served_alike():
    def progress(worker: str, served: int, own: int, started: float, ended: float) -> dict:
        labels = {"kind": "progress", "job": "j", "from": "a", "to": "b"}
        moved = {"served_bytes": served, "local_bytes": own, "started": started, "ended": ended}
        return {**labels, "worker": worker, **moved}

    alike = [progress(worker, 10 * time, 0, 0, time) for worker in "xyz" for time in (1, 2)]
    assert fairness(alike) == {("j", "a", "b"): pytest.approx(1)}
    # Rates of 10, 10 and 40, what never left its worker not counted: 60 squared by 3 times 1,800.
    unlike = [*alike[:4], progress("z", 100, 20, 1, 3)]
    assert fairness(unlike)[("j", "a", "b")] == pytest.approx(3600 / 5400)


def test_a_share_is_that_of_the_time_in_which_all_jobs_move_something():
    def progress(job: str, time: float, served: int) -> dict:
        labels = {"kind": "progress", "worker": "w", "from": "a", "to": "b", "local_bytes": 0}
        return {**labels, "job": job, "time": time, "served_bytes": served}

    records = [progress("a", time, 30 * time) for time in (1, 2, 3)]
    records += [progress("b", time, 10 * time) for time in (1, 2, 3, 4, 5)]
    assert parts_of_bytes(records, [("a",), ("b",)]) == {("a",): 0.75, ("b",): 0.25}
    assert parts_of_bytes(records, [("a",), ("b",), ("c",)]) == {}
    apart = [progress("a", 1, 10), progress("a", 2, 20), progress("b", 3, 10), progress("b", 4, 20)]
    assert parts_of_bytes(apart, [("a",), ("b",)]) == {}


def test_variants_take_turns_and_every_value_is_run():
    scenario = with_settings(load("sort"), ["study.repeat=2", 'study.vary={"workload.size"=["1 MiB", "2 MiB"]}'])
    two = [Variant(name="tcp", set={"control.transport": "tcp"}), Variant(name="tls", set={"control.transport": "tls"})]
    scenario = scenario.model_copy(update={"study": scenario.study.model_copy(update={"compare": tuple(two)})})
    runs = study.runs_of("s", scenario)
    assert [(dict(run.at)["workload.size"], run.variant.name, run.repetition) for run in runs[:5]] == [
        ("1 MiB", "tcp", 0),
        ("1 MiB", "tls", 0),
        ("1 MiB", "tcp", 1),
        ("1 MiB", "tls", 1),
        ("2 MiB", "tcp", 0),
    ]
    assert len({run.key for run in runs}) == len(runs) == 8
    assert runs[1].scenario.control.transport == "tls" and runs[4].scenario.workload.size == 2 << 20
    with pytest.raises(BadInput, match="transport"):
        wrong = scenario.study.model_copy(update={"compare": (Variant(name="x", set={"control.transport": "pigeon"}),)})
        study.runs_of("s", scenario.model_copy(update={"study": wrong}))


def test_the_command_compares_and_tells_medians_and_ratios(tmp_path):
    done = mission("run", "sort", *WORDS, "--compare", "tcp,tls", "--repeat", "2", "--results", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(entry["variant"], entry["repetition"]) for entry in result["results"]] == [
        ("tcp", 0),
        ("tls", 0),
        ("tcp", 1),
        ("tls", 1),
    ]
    assert all(entry["ok"] and entry["world"] == "local" for entry in result["results"])
    (ratio,) = result["ratios"]
    assert (ratio["variant"], ratio["to"], ratio["runs"]) == ("tls", "tcp", 2)
    assert ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["held"] is None
    pairs = [study.measured(entry, "shuffle_seconds") for entry in result["results"]]
    assert ratio["low"] == pytest.approx(min(pairs[1] / pairs[0], pairs[3] / pairs[2]))
    folder = tmp_path / result["folder"].rpartition("/")[2]
    page = (folder / "report.html").read_text()
    assert "tls to tcp" in page and page.count("<svg") >= 1
    assert len(list((folder / "runs").iterdir())) == 4
    # Drawn again from what is there.
    (folder / "report.html").unlink()
    assert mission("report", str(folder)).returncode == 0
    assert "tls to tcp" in (folder / "report.html").read_text()


def test_a_single_variant_is_what_runs(tmp_path):
    done = mission("run", "sort", *WORDS, "--compare", "tls", "--results", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["variant"] == "tls" and result["ok"]
    (transfer,) = result["jobs"][0]["transfers"]
    assert transfer["transport"]["chosen"] == "tls", transfer["transport"]


def test_a_folder_is_one_study_and_an_expectation_that_is_missed_fails_it(tmp_path):
    head = 'version = 1\n[topology]\nhosts = 2\n[workload]\nsize = "1 MiB"\npartitions = 2\n'
    (tmp_path / "a.toml").write_text(head + '[study]\ntitle = "First"\nmeasure = ["job_seconds"]\n')
    compare = '[{ name = "one" }, { name = "other", ratio_max = 0.000001 }]'
    (tmp_path / "b.toml").write_text(head + f'[study]\ntitle = "Second"\nbecause = "so"\ncompare = {compare}\n')
    done = mission("run", str(tmp_path), "--results", str(tmp_path / "results"), "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["ratios"][0]["held"] is False
    assert {entry["study"] for entry in result["results"]} == {"a", "b"}
    page = (tmp_path / "results" / result["folder"].rpartition("/")[2] / "report.html").read_text()
    assert "First" in page and "Second" in page and "1 expectations missed" in page
    empty = tmp_path / "empty"
    empty.mkdir()
    assert mission("run", str(empty)).returncode == 2


def test_an_interrupted_study_goes_on_where_it_was(tmp_path):
    words = [sys.executable, "-m", "mission_control", "run", "sort", *WORDS, "--repeat", "3", "--json"]
    running = subprocess.Popen([*words, "--results", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    until(lambda: list(tmp_path.glob("*/runs/*-2")), "the second run has begun", seconds=60)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
    result = json.loads(out)
    assert running.returncode == 130 and result["interrupted"] and not result["ok"]
    (folder,) = tmp_path.iterdir()
    first = next(iter(folder.glob("runs/*-1/result.json"))).read_text()
    done = subprocess.run([*words, "--resume", str(folder)], capture_output=True, text=True, timeout=120)
    result = json.loads(done.stdout)
    assert done.returncode == 0 and len(result["results"]) == 3 and result["medians"][0]["runs"] == 3
    assert next(iter(folder.glob("runs/*-1/result.json"))).read_text() == first, "it was not made again"
    assert mission("run", "sort", "--resume", str(tmp_path / "nothing")).returncode == 2
    other = mission("run", "sort", *WORDS, "--repeat", "3", "--seed", "2", "--resume", str(folder))
    assert other.returncode == 2 and "was made from another scenario" in other.stderr
