"""Benchmarks say how long they take, have a size that takes minutes, and end in one line when they are interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from mission_control.cli import bench
from mission_control.cli.bounded import QUICK_MAX_S, duration
from tests.test_cli_edges import commands

LINES_MAX = 10
"""Dask's warning of a slow disk has two lines."""
BENCHES = sorted(path for path in commands() if path.startswith("bench "))


@pytest.mark.parametrize("path", BENCHES)
def test_every_benchmark_predicts_at_most_five_minutes_with_quick(path):
    (registered,) = [own for own in bench.app.registered_commands if own.callback.__name__ == path.split()[1]]
    command = commands()[path]
    defaults = {param.name: param.default for param in command.params}
    assert "quick" in defaults
    assert 0 < registered.callback.quick_seconds(defaults) <= QUICK_MAX_S


def test_a_duration_is_said_in_the_unit_that_people_use():
    assert [duration(seconds) for seconds in (0.2, 42, 600, 9000)] == ["1 s", "42 s", "10 min", "2.5 h"]


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "dask --size 64MiB --rounds 20 --case shuffle"),
        (signal.SIGTERM, "streams --size 64MiB --rounds 20"),
    ],
)
def test_a_benchmark_whose_whole_group_is_interrupted_ends_in_one_line(number, line):
    words = ["bench", *line.split()]
    running = subprocess.Popen(
        [sys.executable, "-m", "mission_control", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    # It says how long it takes, and then what it does.
    assert re.fullmatch(r"this takes about [\d.]+ (s|min|h) on two cores\n", running.stderr.readline())
    # Dask may warn before that of a slow disk.
    assert any("warm-up" in running.stderr.readline() for _ in range(LINES_MAX))
    os.killpg(running.pid, number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    # A line of Python's own about what it cleaned up may follow.
    assert "Traceback" not in said and "mission: interrupted" in said.splitlines()[-4:], said


def test_what_is_typed_holds_with_quick(monkeypatch):
    given = {}
    measure = lambda rounds, threads, say: given.update(rounds=rounds, threads=threads)  # noqa: E731
    monkeypatch.setattr("mission_control.bench.overhead.measure", measure)
    command = commands()["bench overhead"]
    for words, rounds in ((["--quick"], 2), (["--quick", "--rounds", "7"], 7), ([], 30)):
        command.main([*words, "--threads", "4", "--json"], standalone_mode=False)
        assert given == {"rounds": rounds, "threads": (4,)}


def test_a_malformed_size_is_named_by_the_benchmark():
    with pytest.raises(Exception, match="--size"):
        commands()["bench streams"].main(["--size", "many"], standalone_mode=False)
