"""The command line at its edges: help, completion, interrupts, a cluster that closes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from distributed import Client, LocalCluster
from typer.core import TyperCommand

import mission_control
from mission_control.cli import lazy
from tests.conftest import mission

MISSION = [sys.executable, "-m", "mission_control"]


def test_help_imports_nothing_heavy_and_names_every_command():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mission_control", "--help"], capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"dask", "distributed", "numpy", "pandas", "pydantic", "matplotlib"}
    assert all(f"\n  {name} " in done.stdout for name in lazy.COMMANDS)


@pytest.mark.parametrize("name", lazy.COMMANDS)
def test_the_help_of_a_command_is_the_same_in_the_list(name):
    listed = TyperCommand(name, help=lazy.COMMANDS[name][1])
    assert lazy.load(name).get_short_help_str(300) == listed.get_short_help_str(300)


def test_an_unknown_command_is_compared_with_the_known_ones():
    done = mission("rum")
    assert done.returncode == 2 and "run" in done.stderr and done.stderr.count("\n") == 1


def test_shells_complete_commands():
    environment = {**os.environ, "_MISSION_COMPLETE": "complete_bash", "COMP_WORDS": "mission ex", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'mission'; from mission_control.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["explain", "exec"], done.stderr
    assert "--install-completion" in mission("--help").stdout


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("--size 1000", "--size 1000: "),
        ("--workers 0", "--workers 0: "),
        ("--hosts 0", "--hosts 0: "),
        ("--topology ring", "--topology ring: "),
        ("--memory-limit much", "--memory-limit"),
        ("--ecn-threshold 7", "--ecn-threshold"),
        ("--flows-per-host 0", "--flows-per-host 0: "),
        ("--set workload.size=7", "workload.size: "),
    ],
)
def test_errors_name_the_option_that_was_typed(words, start):
    done = mission("run", "sort", *words.split())
    assert done.returncode == 2 and done.stderr.startswith(f"mission: {start}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_top_ends_with_one_line_when_the_cluster_closes():
    with LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp") as cluster:
        with Client(cluster, set_as_default=False) as client:
            mission_control.install(client)
        address = cluster.scheduler_address
        words = [*MISSION, "top", "--scheduler", address, "--every", "0.2", "--json"]
        top = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert top.stdout is not None and json.loads(top.stdout.readline())["jobs"] == []
    _, errors = top.communicate(timeout=60)
    assert top.returncode == 3 and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith(f"mission: the scheduler at {address} closed")


def test_an_interrupted_benchmark_prints_json():
    words = [*MISSION, "bench", "sort", "--size", "100MB", "--workers", "1", "--rounds", "50", "--json"]
    code = "import sys, time; from mission_control.bench import sort; from mission_control.cli import main\n"
    code += "def measure(*_, say): say('round 1: 2 s'); time.sleep(60)\n"
    code += f"sort.measure = measure; sys.argv[1:] = {words[3:]!r}; main()"
    bench = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert bench.stderr is not None and bench.stderr.readline() == "round 1: 2 s\n"
    bench.send_signal(signal.SIGINT)
    output, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130 and "Traceback" not in errors
    assert json.loads(output) == {"interrupted": True, "rows": [], "progress": ["round 1: 2 s"]}
