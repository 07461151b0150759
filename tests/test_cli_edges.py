"""The command line at its edges: help, completion, interrupts, a cluster that closes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from distributed import Client, LocalCluster
from typer.core import TyperCommand

import mission_control
from mission_control.cli import examples, lazy
from mission_control.workloads import WORKLOADS
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
        ("--size 1000", "--size: "),
        ("--workers 0", "--workers: "),
        ("--hosts 0", "--hosts: "),
        ("--topology ring", "--topology: "),
        ("--memory-limit much", "--memory-limit"),
        ("--ecn-threshold 7", "--ecn-threshold"),
        ("--flows-per-host 0", "--flows-per-host: "),
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
    assert bench.stderr is not None and "takes about" in bench.stderr.readline()
    assert bench.stderr.readline() == "round 1: 2 s\n"
    bench.send_signal(signal.SIGINT)
    output, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130 and "Traceback" not in errors
    assert json.loads(output) == {"interrupted": True, "rows": [], "progress": ["round 1: 2 s"]}


WITHOUT_JSON = {
    "exec": "stdout belongs to the program; --report FILE writes JSON",
    "lab exec": "stdout belongs to the program",
    "schema": "it always prints JSON",
}


def commands() -> dict[str, Any]:
    """Return every command that does something, by how it is typed after ``mission``."""
    found = {}

    def walk(command: Any, path: str) -> None:
        below = getattr(command, "commands", {})
        if not below or command.invoke_without_command:
            found[path] = command
        for name, own in below.items():
            walk(own, f"{path} {name}")

    for name in lazy.COMMANDS:
        walk(lazy.load(name), name)
    return found


def test_every_command_has_json_or_a_reason_why_not():
    without = {path for path, own in commands().items() if not any("--json" in param.opts for param in own.params)}
    assert without == set(WITHOUT_JSON)


def test_every_option_of_a_command_has_a_help_that_is_a_phrase():
    for path, command in commands().items():
        for param in command.params:
            words = getattr(param, "help", None)
            hidden = getattr(param, "hidden", False) or param.name.startswith("workload_")
            assert hidden or words, (path, param.name)
            plain = words is None or not words[0].islower() or words.split()[0].strip(",:;") in KNOWN_WORDS
            assert plain, f"{path} {param.name}: {words}"


KNOWN_WORDS = {*WORKLOADS, "star", "down", "mptcp", "result"}
"""Values of options, which are written as they are typed."""


@pytest.mark.parametrize("path", examples.EXAMPLES)
def test_examples_are_parsed_and_end_the_help(path):
    command = commands()[path]
    for line in examples.EXAMPLES[path]:
        words = shlex.split(line.partition(" > ")[0])
        given = words[1 + len(path.split()) :]
        assert words[: 1 + len(path.split())] == ["mission", *path.split()]
        command.make_context(path, given).close()
    shown = command.get_help(command.make_context(path, [], resilient_parsing=True))
    assert shown.endswith("Examples:\n" + "\n".join(f"    {line}" for line in examples.EXAMPLES[path]))


def test_every_command_has_examples():
    assert set(examples.EXAMPLES) == set(commands())


def test_no_command_prints_the_help_as_it_is_and_ends_with_2():
    done = mission()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == mission("--help").stdout and done.stderr.count("\n") > len(lazy.COMMANDS)


def test_an_unexpected_exception_is_one_line_that_says_how_to_report_it():
    code = "import sys; from mission_control.bench import decisions; from mission_control.cli import main\n"
    code += "def measure(): raise ZeroDivisionError('no rounds')\n"
    code += "decisions.measure = measure; sys.argv[1:] = ['bench', 'decisions', '--json']; main()"
    plain = {name: value for name, value in os.environ.items() if name != "MISSION_TRACEBACK"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    predicted, error = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (70, "") and "takes about" in predicted
    assert error.startswith("mission: internal error, ZeroDivisionError: no rounds.")
    assert "MISSION_TRACEBACK=1" in done.stderr
    traced = {**plain, "MISSION_TRACEBACK": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=traced, capture_output=True, text=True)
    assert done.returncode == 70 and done.stderr.splitlines()[1] == "Traceback (most recent call last):"


def test_a_pipe_that_nobody_reads_and_a_full_disk_are_no_internal_errors():
    command = f"{sys.executable} -m mission_control"
    words = [
        "bash",
        "-c",
        f"{command} incast predict --fragment 64kB --senders 1-9000 | head -1; echo ${{PIPESTATUS[0]}}",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "141" and done.stderr == ""
    done = subprocess.run(["bash", "-c", f"{command} schema > /dev/full"], capture_output=True, text=True)
    assert done.returncode == 3 and done.stderr.startswith("mission: output: No space left on device"), done.stderr
    done = subprocess.run(["bash", "-c", f"{command} schema >&-"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "internal" not in done.stderr


def on_a_terminal(words: list[str], **environment: str) -> tuple[int, str]:
    """Run a command whose stdout and stderr are a terminal; return its status, and what the terminal got."""
    ours, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    command = subprocess.Popen([*MISSION, *words], stdout=theirs, stderr=theirs, env=plain | environment)
    os.close(theirs)
    got = b""
    # The other end is closed: the terminal reads as an error.
    with suppress(OSError):
        while piece := os.read(ours, 65536):
            got += piece
    os.close(ours)
    return command.wait(timeout=60), got.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]")


def test_colours_are_for_terminals_that_want_them():
    status, shown = on_a_terminal(["doctor"], TERM="xterm-256color")
    assert status == 0 and COLOUR.search(shown), shown
    for environment in ({"TERM": "xterm-256color", "NO_COLOR": "1"}, {"TERM": "dumb"}):
        status, shown = on_a_terminal(["doctor"], **environment)
        assert status == 0 and not COLOUR.search(shown), shown
    assert "\x1b" not in shown and "\x1b" not in mission("doctor").stdout


def test_the_live_table_moves_on_a_terminal_only(tmp_path):
    words = ["run", "sort", "--size", "8MiB", "--workers", "2", "--results", str(tmp_path)]
    status, shown = on_a_terminal(words, TERM="xterm-256color")
    assert status == 0 and "\x1b[?25l" in shown, shown
    status, shown = on_a_terminal(words, TERM="dumb")
    assert status == 0 and "\x1b" not in shown and "order, record count, checksum" in shown, shown
    status, shown = on_a_terminal(words, TERM="xterm-256color", NO_COLOR="1")
    assert status == 0 and not COLOUR.search(shown), shown
    done = subprocess.run([*MISSION, *words], env={**os.environ, "FORCE_COLOR": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_garbage_is_collected_is_not_lost(number):
    program = """
import time
from mission_control import interrupts

class Garbage:
    def __del__(self):
        print("collected", flush=True)
        time.sleep(60)

interrupts.watch()
Garbage()
print("dropped", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "collected\n"
        running.send_signal(number)
        said, _ = running.communicate(timeout=30)
    assert (said, running.returncode) == ("dropped\ninterrupted\n", 0)
