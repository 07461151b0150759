"""The command line: contracts for scripts, and errors of bad input."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import dask
import pytest

from mission_control.cli.run import with_study
from mission_control.scenario import BadInput, validate
from mission_control.worlds.cluster import connect
from tests.conftest import mission, until

ROOT = Path(__file__).parent.parent


def weights(policy: str, *jobs: str) -> dict[str, int]:
    done = mission("weights", "--policy", policy, *jobs, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert abs(sum(entry["weight"] for entry in result.values()) - 1) < 1e-9
    return {name: entry["flows"] for name, entry in result.items()}


def test_weights_gives_the_papers_table():
    assert weights("fifo", "one", "two") == {"one": 7, "two": 3}
    assert weights("priority", "one:priority=1", "two:priority=2") == {"one": 3, "two": 7}
    assert weights("fair", "one", "two") == {"one": 5, "two": 5}
    assert weights("performance-centric", "one:pattern=shuffle", "two:pattern=broadcast") == {"one": 3, "two": 7}


def test_equations_of_the_paper_count_machines():
    # Equations 4.1 and 4.2: N = 2 against N^2 = 4.
    by_machines = "performance-centric:count=machines"
    assert weights(by_machines, "a:machines=2", "b:machines=2:pattern=broadcast") == {"a": 3, "b": 7}


def test_transfers_of_one_job_are_weighed_one_by_one():
    mix = ("a/model:pattern=broadcast", "a/sort", "b")
    assert weights("performance-centric", *mix) == {"a/model": 5, "a/sort": 3, "b": 2}
    assert weights("fair", *mix) == {"a/model": 3, "a/sort": 2, "b": 5}
    # Priorities belong to jobs: that of one transfer applies to all of its job.
    assert weights("performance-centric", "a/x:priority=2", "a/y", "b") == {"a/x": 4, "a/y": 4, "b": 2}


def test_policies_of_the_literature_order_transfers():
    by_size = ("smallest-bottleneck-first", "large:bytes=1GiB", "small:bytes=1MiB")
    assert weights(*by_size) == {"large": 1, "small": 9}
    assert weights("deadline", "none", "late:deadline=-1", "soon:deadline=5") == {"none": 1, "late": 1, "soon": 8}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("run sort --size -1GiB", "of 0 or more"),
        ("run sort --size 1000", "no unit"),
        ("run sort --policy best", "use one of"),
        ("run sort --priorities 0", "above 0"),
        ("run sort --jobs 2 --priorities 1", "one for each job"),
        ("run sort --workers 0", "--workers: write at least 1, not 0"),
        ("run sort --encrypt --transport shm", "plain memory is not encrypted"),
        ("run sort --transport pigeon", "use auto"),
        ("run kmeans --points 10 --k 11", "use at most as many centres"),
        ("run nothing", "use demo, kmeans, mix, sort"),
        ("run /no/such.toml", "cannot be read"),
        ("run sort --scheduler pigeon://127.0.0.1:1", "no scheduler answers"),
        ("run sort --frob", "--frob"),
        ("weights --policy best a", "use one of"),
        ("weights a:priority=0", "above 0"),
        ("weights a:priority=1e12", "at most 1e9"),
        ("weights a:priority=nan", "above 0"),
        ("weights a:machines=5000000000", "below 2^32"),
        ("weights --flows-per-host -3 a", "greater than or equal to 1"),
        ("weights --policy python:nosuch:f a", "there is no policy"),
        ("weights a\x1b[31m", "can be printed"),
        ("run sort --partitions 0", "partitions"),
        ("run sort --size 1MiB --results /proc/x", "choose another folder"),
        ("run sort --size 1MiB --data /proc/x", "choose another folder"),
        ("weights a:colour=red", "use priority=X"),
        ("weights a a", "named twice"),
        ("weights a/sort a/sort", "named twice"),
        ("weights a/", "has no name"),
        ("weights a/x:priority=1 a/y:priority=2", "two priorities"),
        ("weights a:bytes=many", "bytes of a"),
        ("weights a:deadline=soon", "a number of seconds"),
        ("report /no/such", "results/<id>"),
        ("weights", "see "),
        ("run sort --seed -1", "--seed: write at least 0, not -1"),
        ("run sort --compare pigeon", "--compare pigeon: neither a variant (sort has none) nor a transport (auto, shm"),
        ("run sort --compare tcp,tcp", "each variant once"),
        ("run sort --scheduler nonsense", "--scheduler nonsense: this is no address; write tcp://HOST:PORT"),
        ("replay sample --scale nan", "--scale: write a finite number, not 'nan'"),
        ("run sort --jobs 0", "--jobs: write at least 1, not 0"),
        ("run sort --engine rust", "--engine: write python, java or mapreduce, not 'rust'"),
        ("run sort --partitions many", "--partitions: write a whole number or auto, not 'many'"),
        ("replay sample --minutes inf", "inf is no finite number"),
        ("trace info /tmp", "this is a folder"),
        ("trace synth --out x.tsv --window 2", "--window is about --from"),
        ("trace synth --out /dev/null", "the file exists"),
        ("exec nosuchprogram", "nosuchprogram: there is no such program"),
        ("bench sort --data /proc/x", "--data /proc/x: cannot be written"),
        ("bench dask --case x", "--case x: unknown; use one of shuffle"),
        ("incast predict --fragment 64kB --alpha nan", "nan is no finite number"),
        ("incast predict --fragment 64kB --model x", "--model x: unknown"),
        ("top --every nan --scheduler tcp://127.0.0.1:1", "--every"),
        ("lab down star --all", "not both"),
        ("serve --policy python:x:y", "--policy python:x:y: a policy in Python runs beside"),
        ("serve --policy best", "deadline, sincronia\n"),
    ],
)
def test_bad_input_gets_one_line_that_names_the_fix_and_status_2(words, hint):
    done = mission(*words.split())
    assert done.returncode == 2, done.stderr
    assert hint in done.stderr, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1


def test_an_empty_value_is_no_default():
    for words in (["run", ""], ["doctor", "--scheduler", ""], ["incast", "predict", "--fragment", ""]):
        done = mission(*words)
        assert done.returncode == 2 and "it is empty" in done.stderr, done.stderr


def test_a_run_that_cannot_begin_leaves_no_results(tmp_path):
    done = mission("run", "sort", "--scheduler", "tcp://127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 3 and not list(tmp_path.iterdir())
    (tmp_path / "results").mkdir()
    assert mission("run", "sort", "--scheduler", "nonsense", cwd=tmp_path).returncode == 2
    assert (tmp_path / "results").is_dir()


def test_variants_of_a_scenario_are_chosen_by_name():
    variants = [{"name": "one, all"}, {"name": "two", "ratio_min": 0.5, "set": {"control.transport": "tcp"}}]
    scenario = validate({"study": {"compare": [*variants, {"name": "three"}]}})

    def compared(text: str) -> tuple[list[tuple[str, float | None]], str]:
        chosen, note = with_study("mine", scenario, text, None)
        return [(own.name, own.ratio_min) for own in chosen.study.compare], note

    assert compared("one, all,two") == ([("one, all", None), ("two", 0.5)], "")
    names, note = compared("two,one, all")
    assert names == [("two", None), ("one, all", None)] and "relative to one, all and do not apply" in note
    names, note = compared("tcp, auto")
    assert names == [("tcp", None), ("auto", None)] and "takes the place of the variants of mine" in note
    with pytest.raises(BadInput, match=r"--compare four: .*\(one, all; two; three\) nor a transport \(auto, shm"):
        compared("two,four")
    with pytest.raises(BadInput, match=r"two is a variant of mine .*; name variants alone, or transports alone"):
        compared("tcp,two")


def test_a_policy_in_python_weighs_jobs_and_transfers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def squares(jobs): return {job['job']: job['priority'] ** 2 for job in jobs}\n"
        "def sizes(jobs):\n"
        "    pairs = [(job['job'], one) for job in jobs for one in job['transfers']]\n"
        "    return {(job, one['from'], one['to']): one['asked_bytes'] for job, one in pairs}\n"
        "def half(jobs): return {'a': 1}\n"
    )

    def asked(function: str, *jobs: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mission_control.cli import main; main()"
        words = [sys.executable, "-c", code, "weights", "--json", "--policy", f"python:mine:{function}", *jobs]
        return subprocess.run(words, capture_output=True, text=True)

    flows = {name: own["flows"] for name, own in json.loads(asked("squares", "a:priority=2", "b").stdout).items()}
    assert flows == {"a": 8, "b": 2}
    sizes = json.loads(asked("sizes", "a/x:bytes=3MB", "a/y:bytes=1MB", "b:bytes=4MB").stdout)
    assert {name: own["weight"] for name, own in sizes.items()} == {"a/x": 0.375, "a/y": 0.125, "b": 0.5}
    done = asked("half", "a", "b")
    assert done.returncode == 2 and "it named no count for 'b'" in done.stderr and done.stderr.count("\n") == 1


def test_a_trace_is_not_overwritten_unless_forced(tmp_path):
    words = ["trace", "synth", "--out", str(tmp_path / "new.tsv"), "--hours", "0.01"]
    made = mission(*words, "--json")
    assert json.loads(made.stdout)["file"] == str(tmp_path / "new.tsv"), made.stderr
    before = (tmp_path / "new.tsv").read_text()
    assert mission(*words, "--seed", "2").returncode == 2 and (tmp_path / "new.tsv").read_text() == before
    assert mission(*words, "--seed", "2", "--force").returncode == 0 and (tmp_path / "new.tsv").read_text() != before


def test_errors_of_certificates_and_tokens_name_the_file(tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate\n")
    (tmp_path / "token").write_text("a-token-of-the-service\n")
    state, token = ["--state", str(tmp_path / "state")], ["--token-file", str(tmp_path / "token")]
    done = mission("serve", *state, "--certificate", str(wrong), "--key", str(wrong))
    assert done.returncode == 2 and f"--certificate {wrong}: this is no PEM file" in done.stderr
    wrong.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    done = mission("serve", *state, "--certificate", str(wrong), "--key", str(wrong))
    assert done.returncode == 2 and f"(files: {wrong}, {wrong})" in done.stderr
    asking = ["service", "status", "--service", "https://127.0.0.1:1", *token]
    done = subprocess.run(
        [sys.executable, "-m", "mission_control", *asking],
        env={**os.environ, "MISSION_SERVICE_CA": str(tmp_path / "none.pem")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and f"MISSION_SERVICE_CA={tmp_path / 'none.pem'} cannot be read" in done.stderr
    missing = dask.config.set({"distributed.comm.tls.ca-file": str(tmp_path / "none.pem")})
    with missing, pytest.raises(BadInput, match=r"ca-file = .*none\.pem cannot be read"):
        connect("tls://127.0.0.1:1")


def test_an_unknown_key_of_a_scenario_is_refused_with_its_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('version = 1\n[workload]\nkind = "sort"\ncolour = "red"\n')
    done = mission("run", str(file))
    assert done.returncode == 2 and "line 4" in done.stderr and "no such key" in done.stderr


def test_a_job_that_cannot_have_what_it_demands_is_refused_with_status_4(tmp_path):
    done = mission(
        "run", "sort", "--size", "1MiB", "--workers", "1", "--transport", "dctcp", "--results", str(tmp_path)
    )
    assert done.returncode == 4 and "dctcp" in done.stderr


def test_ictcp_wants_the_rate_of_the_link(tmp_path, monkeypatch):
    words = ["run", "sort", "--size", "4MiB", "--workers", "2", "--transport", "ictcp", "--results", str(tmp_path)]
    monkeypatch.setenv("MISSION_LINK_RATE", "1 Gbit/s")
    done = mission(*words)
    assert done.returncode == 0 and "transport: ictcp (required by the job)" in done.stdout, done.stderr
    monkeypatch.setenv("MISSION_LINK_RATE", "fast")
    done = mission(*words)
    assert done.returncode == 2 and "MISSION_LINK_RATE" in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    "options",
    [[], ["--transport", "tcp"], ["--encrypt"], ["--jobs", "2", "--policy", "priority", "--priorities", "1,2"]],
)
def test_run_sorts_and_says_what_each_transfer_got(tmp_path, options):
    words = [
        "run",
        "sort",
        "--size",
        "32MiB",
        "--workers",
        "2",
        "--partitions",
        "4",
        "--results",
        str(tmp_path),
        "--json",
    ]
    done = mission(*words, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] and len(result["checks"]) == 3 * len(result["jobs"]) and all(result["checks"].values())
    for job in result["jobs"]:
        (transfer,) = job["transfers"]
        assert transfer["pattern"] == "shuffle" and transfer["bytes"] == 335544 * 100
        facts = transfer["transport"]
        chosen = "tls" if "--encrypt" in options else "tcp" if "--transport" in options else "shm"
        assert facts["chosen"] == chosen and facts["reason"]
        assert all(entry["authenticated"] for entry in facts["negotiated"]) == ("--encrypt" in options)
        # Each of four reduce tasks has one fetch, from the other worker; shared memory needs no flow.
        assert facts["observed"]["rates"]["count"] == (0 if chosen == "shm" else 4)
        assert chosen == "shm" or 0 < transfer["flow_fairness"] <= 1
    folder = Path(result["results"])
    left = {path.name for path in folder.iterdir()}
    files = {"scenario.toml", "environment.json", "records.jsonl", "points.jsonl", "result.json", "report.html"}
    assert left == files
    page = (folder / "report.html").read_text()
    assert "<svg" in page and "http://" not in re.sub(r'"http://www\.w3\.org[^"]*"|http://[a-z.]*/[^<]*', "", page)


def test_kmeans_finds_what_scikit_learn_finds_from_the_same_start(tmp_path):
    words = [
        "--points",
        "60000",
        "--k",
        "30",
        "--dimensions",
        "5",
        "--workers",
        "3",
        "--results",
        str(tmp_path),
        "--json",
    ]
    done = mission("run", "kmeans", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["checks"]["centres equal scikit-learn's within 1e-06"] and len(result["checks"]) == 3
    (job,) = result["jobs"]
    patterns = {(transfer["from"], transfer["to"]): transfer["pattern"] for transfer in job["transfers"]}
    assert patterns["kmeans-reduce", "kmeans-map"] == "broadcast"
    assert patterns["kmeans-map", "kmeans-reduce"] == "gather"
    # The points stay where they were made, in every iteration.
    (points,) = [
        transfer
        for transfer in job["transfers"]
        if transfer["from"] == "kmeans-make" and transfer["to"] == "kmeans-map"
    ]
    assert points["local_bytes"] == points["bytes"] >= 3 * 60000 * 5 * 8


def test_an_interrupted_run_ends_what_it_started_and_writes_its_report(tmp_path):
    words = [sys.executable, "-m", "mission_control", "run", "sort", "--size", "2GiB", "--workers", "2"]
    running = subprocess.Popen(
        [*words, "--results", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: list(tmp_path.glob("*/data/*/input-*")), "the run makes its input", seconds=60)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    (folder,) = tmp_path.iterdir()
    assert "interrupted" in (folder / "report.html").read_text()
    assert not (folder / "data").exists() or not list((folder / "data").rglob("input-*"))
    until(lambda: not children_of(running.pid, tmp_path), "its workers are gone")


def children_of(pid: int, folder: Path) -> list[str]:
    """Return processes that work in the run's folder, or are still children of the run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(stat)
    return found


def test_architecture_names_every_top_level_folder():
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    folders = {line.split("/")[0] for line in listed.splitlines() if "/" in line and not line.startswith(".")}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for folder in folders:
        assert f"`{folder}" in text, f"ARCHITECTURE.md does not name {folder}"


def test_more_data_than_memory_is_sorted(tmp_path):
    """Each worker has a quarter of 600 MiB for objects, 150 MiB: most of its half of 512 MiB is spooled."""
    words = ["run", "sort", "--size", "512MiB", "--workers", "2", "--memory-limit", "600MiB", "--partitions", "32"]
    done = mission(*words, "--results", str(tmp_path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]


def test_the_version_is_that_of_the_package():
    done = mission("--version")
    assert done.returncode == 0 and importlib.metadata.version("mission-control") in done.stdout


def test_an_output_that_nobody_reads_is_no_traceback():
    shell = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m mission_control weights --help | true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in shell.stderr, shell.stderr
