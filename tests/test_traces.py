"""Traces in SWIM's format: read, described, synthesised, scaled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mission_control.errors import BadInput
from mission_control.traces import scale, swim, synthesise
from mission_control.traces.describe import describe, quantiles
from tests.conftest import mission

FACEBOOK = Path(__file__).parents[2] / "shared/traces/FB-2009_samples_24_times_1hr_0.tsv"
GOOD = "job0\t49\t49\t740773\t2339561\t627471\n"


@pytest.fixture
def facebook() -> list[swim.TraceJob]:
    if not FACEBOOK.exists():
        pytest.skip("../shared/traces is not there: the trace of Facebook is not part of the project")
    return swim.read(FACEBOOK)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.tsv"
    path.write_bytes(text.encode())
    return path


def test_a_line_has_name_times_and_bytes(tmp_path):
    (job,) = swim.read(written(tmp_path, GOOD))
    assert job == swim.TraceJob("job0", 49, 740773, 2339561, 627471)


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("\n", "\r\n"),
        "# a comment\n\n" + GOOD,
        GOOD.rstrip("\n"),
        GOOD.replace("\n", "\tinputs/part-0\n"),
    ],
    ids=["CRLF", "comment and empty line", "no end of line", "seventh field: the input's name"],
)
def test_what_differs_between_systems_is_read_alike(tmp_path, text):
    assert swim.read(written(tmp_path, text)) == [swim.TraceJob("job0", 49, 740773, 2339561, 627471)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("job1 50 1 2 3 4", "1 field separated by tabs; expected 6: name, submit time in s"),
        ("job1\t50\t1\t2\t3", "5 fields separated by tabs; expected 6"),
        ("job1\t50\t1\t2\t3\t4\tin\tout", "8 fields separated by tabs; expected 6"),
        ("\t50\t1\t2\t3\t4", "name ''; expected one that is not empty"),
        ("job1\tsoon\t1\t2\t3\t4", "submit time in s 'soon'; expected a number of seconds"),
        ("job1\tnan\t1\t2\t3\t4", "submit time in s 'nan'; expected a number of seconds"),
        ("job1\t-1\t1\t2\t3\t4", "submit time in s '-1'; expected a number of seconds from 0"),
        ("job1\t48\t0\t2\t3\t4", "submit time 48 s, after 49 s in the line before"),
        ("job1\t50\t\t2\t3\t4", "gap in s ''; expected a number of seconds"),
        ("job1\t50\t1\t2.5\t3\t4", "map input bytes '2.5'; expected a whole number of bytes"),
        ("job1\t50\t1\t2\t-3\t4", "shuffle bytes '-3'; expected a whole number of bytes"),
        ("job1\t50\t1\t2\t3\t" + "9" * 60, "reduce output bytes '9999"),
        ("job1\t50\t1\t2\t3\t²", "reduce output bytes '²'; expected a whole number"),
    ],
)
def test_a_malformed_line_is_named_with_what_was_expected(tmp_path, line, said):
    path = written(tmp_path, GOOD + line + "\n")
    with pytest.raises(BadInput) as raised:
        swim.read(path)
    assert str(raised.value).startswith(f"trace {path}, line 2: ") and said in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_a_file_without_jobs_is_refused(tmp_path, text):
    with pytest.raises(BadInput, match="has no jobs: a line for each is expected"):
        swim.read(written(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "trace.tsv"
    path.write_bytes(b"\xff\xfe\x00job")
    with pytest.raises(BadInput, match="cannot be read"):
        swim.read(path)


def test_what_is_written_is_read_again(tmp_path):
    jobs = synthesise.from_shape(synthesise.load_shape("fb-2009"), 2, 3)
    path = tmp_path / "made.tsv"
    swim.write(path, jobs)
    assert swim.read(path) == jobs
    gaps = [float(line.split("\t")[2]) for line in path.read_text().splitlines()]
    assert sum(gaps) == pytest.approx(jobs[-1].submit_s)


def test_quantiles_are_values_that_occur():
    assert quantiles(range(1, 101)) == {"p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert quantiles([7]) == dict.fromkeys(("p10", "p50", "p90", "p99", "max"), 7)
    assert quantiles([]) == {}


def test_a_description_counts_jobs_hours_and_bytes():
    jobs = [swim.TraceJob(f"job{at}", 100 + 1800 * at, at, 10 * at, 0) for at in range(5)]
    found = describe(jobs)
    assert (found["jobs"], found["hours"], found["jobs_per_hour"], found["map_only"]) == (5, 2.0, [2, 2, 1], 1)
    assert found["shuffle_bytes"]["max"] == 40 and found["shuffle_bytes"]["total"] == 100


def test_facebooks_trace_is_described(facebook):
    found = describe(facebook)
    assert found["jobs"] == 5894 and found["hours"] == pytest.approx(24, abs=0.1)
    # Paper 000: small jobs dominate, and there are a few of terabytes.
    assert found["input_bytes"]["p90"] < 1e9 < 1e12 < found["input_bytes"]["max"]
    assert found["map_only"] / found["jobs"] == pytest.approx(0.75, abs=0.01)


def test_the_same_seed_makes_the_same_trace():
    shape = synthesise.load_shape("fb-2009")
    first = synthesise.from_shape(shape, 2, 7)
    assert first == synthesise.from_shape(shape, 2, 7) != synthesise.from_shape(shape, 2, 8)
    windows = synthesise.from_windows(first, 5, 7)
    assert windows == synthesise.from_windows(first, 5, 7) != synthesise.from_windows(first, 5, 8)
    assert [job.submit_s for job in windows] == sorted(job.submit_s for job in windows)
    assert len({job.name for job in windows}) == len(windows) and windows[-1].submit_s < 5 * 3600


def test_a_trace_of_a_shape_has_its_quantiles():
    shape = synthesise.load_shape("fb-2009")
    jobs = synthesise.from_shape(shape, 48, 1)
    assert 10_000 < len(jobs) * 1.0 < 18_000
    for one in shape["classes"]:
        own = [job for job in jobs if bool(job.shuffle_bytes) == ("shuffle_bytes" in one["quantiles"])]
        assert len(own) / len(jobs) == pytest.approx(one["part"], abs=0.02)
        for name, known in one["quantiles"].items():
            values = [getattr(job, name) for job in own]
            for part in (0.2, 0.5, 0.9, 0.99):
                size = known[shape["at"].index(part)]
                # A size that many jobs have is the quantile of several fractions.
                below, at = (
                    sum(value < edge for value in values) / len(values) for edge in (size * 0.99, size * 1.01 + 1)
                )
                assert below - 0.03 < part < at + 0.03, (name, part)


def test_bytes_of_a_shape_go_together(facebook):
    fitted = synthesise.fit(facebook, 600, "")
    again = synthesise.fit(synthesise.from_shape(fitted, 48, 1), 600, "")
    for one, two in zip(fitted["classes"], again["classes"], strict=True):
        for row, other in zip(one["correlations"], two["correlations"], strict=True):
            assert row == pytest.approx(other, abs=0.1)


def test_windows_keep_the_quantiles_of_their_source(facebook):
    before, after = describe(facebook), describe(synthesise.from_windows(facebook, 96, 1))
    for name in swim.QUANTITIES:
        for at in ("p50", "p90"):
            assert after[name][at] == pytest.approx(before[name][at], rel=0.6), (name, at)
    assert after["jobs"] / 96 == pytest.approx(before["jobs"] / 24, rel=0.3)


def test_the_package_has_no_line_of_facebooks_trace(facebook):
    own = {(job.input_bytes, job.shuffle_bytes, job.output_bytes) for job in facebook if job.shuffle_bytes > 10**6}
    for name in swim.samples():
        jobs = swim.read(swim.find(name))
        assert not own & {(job.input_bytes, job.shuffle_bytes, job.output_bytes) for job in jobs}


def test_the_sample_is_what_the_shape_makes():
    assert swim.read(swim.find("sample")) == synthesise.from_shape(synthesise.load_shape("fb-2009"), 2, 1)


def test_bytes_change_with_the_number_of_hosts():
    (job,) = synthesise.for_hosts([swim.TraceJob("a", 1, 600, 1200, 59)], 10, 600)
    assert (job.input_bytes, job.shuffle_bytes, job.output_bytes, job.submit_s) == (10, 20, 1, 1)


def test_what_scaling_distorts_is_counted():
    sizes = [(10**9, 10**9), (10**6, 10**5), (10**6, 10), (5, 0)]
    jobs = [swim.TraceJob(f"job{at}", 3600 + 60 * at, *own, 0) for at, own in enumerate(sizes)]
    made = scale.scaled(scale.window(jobs, 1, 1), 0.001, 10, 500_000, start_h=1)
    assert [job.submit_s for job in made] == [0, 6, 12, 18]
    found = scale.distortion(made, 0.001, 500_000)
    assert (found["shuffling"], found["shuffle_zero"], found["shuffle_small"]) == (3, 1, 1)
    assert (found["cut"], found["cut_bytes"]) == (1, 1_000_000)
    assert found["after"]["input_bytes"]["max"] == 500_000 < found["before"]["input_bytes"]["max"]


def test_a_window_without_jobs_is_refused():
    with pytest.raises(BadInput, match=r"no jobs in the 1 h from hour 2 on: its last is at 0\.00 h"):
        scale.window([swim.TraceJob("a", 1, 1, 1, 1)], 2, 1)


def test_the_command_synthesises_and_describes(tmp_path):
    made, windows = tmp_path / "made.tsv", tmp_path / "windows.tsv"
    done = mission("trace", "synth", "--shape", "fb-2009", "--hours", "3", "--hosts", "16", "--out", str(made))
    assert done.returncode == 0 and "jobs in" in done.stdout, done.stderr
    given = ["--from", str(made), "--source-hosts", "16", "--hosts", "8", "--hours", "2", "--seed", "5"]
    done = mission("trace", "synth", *given, "--out", str(windows))
    assert done.returncode == 0, done.stderr
    found = json.loads(mission("trace", "info", str(windows), "--json").stdout)
    assert found["jobs"] == sum(found["jobs_per_hour"]) and found["hours"] <= 2
    assert list(found["shuffle_bytes"]) == ["p10", "p50", "p90", "p99", "max", "total"]
    table = mission("trace", "info", str(windows)).stdout.splitlines()
    assert [line.split()[0] for line in table[-3:]] == ["input", "shuffle", "output"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("info absent.tsv", "trace absent.tsv: there is no such file"),
        ("info {bad}", "bad.tsv, line 1: 1 field separated by tabs; expected 6"),
        ("synth --out x.tsv --shape absent", "--shape absent: unknown. Use fb-2009"),
        ("synth --out x.tsv --hours 0", "--hours 0: use a number of hours above 0"),
        ("synth --out x.tsv --hours nan", "--hours nan: use a number of hours above 0"),
        ("synth --out x.tsv --shape fb-2009 --from sample", "--from and --shape exclude each other"),
        ("synth --out x.tsv --source-hosts 3", "--source-hosts is about --from"),
        ("synth --out absent/x.tsv", "--out absent/x.tsv cannot be written"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, words, said):
    (tmp_path / "bad.tsv").write_text("no trace\n")
    done = mission("trace", *words.format(bad=tmp_path / "bad.tsv").split(), cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "x.tsv").exists()
