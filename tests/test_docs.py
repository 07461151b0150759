"""The documentation: its commands run, its programs run, and its links exist.

A block of commands begins with ```` ```console ````. Each of its lines that begins with `$ ` is run, all lines of a
page in one folder. After `console` may follow `lab` (needs root and the lab) and `long` (takes a minute or more).
Commands for hosts that a test does not have stand in indented blocks, and are not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import mission_control
from mission_control import docs
from mission_control.bench import report
from tests.test_cli_edges import commands as commands_of_mission

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LINKED = [*PAGES, *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
COMMAND_S = 900
"""Timeout of a page that is marked `long`; others have pytest's timeout."""


def blocks(page: Path) -> list[tuple[set[str], list[str]]]:
    """Marks and commands of each block."""
    found = re.findall(r"^```console([a-z ]*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(set(marks.split()), re.findall(r"^\$ (.+)$", text, re.MULTILINE)) for marks, text in found]


def cases() -> list[object]:
    made = []
    for page in LINKED:
        by_marks: dict[frozenset[str], list[str]] = {}
        for marks, commands in blocks(page):
            by_marks.setdefault(frozenset(marks), []).extend(commands)
        for marks, commands in by_marks.items():
            name = "-".join([page.stem, *sorted(marks)])
            use = [getattr(pytest.mark, mark) for mark in marks - {"cluster"}]
            if {"lab", "long"} <= marks:
                # `make test-lab` has no time for it; `make long` runs it for root.
                use = [pytest.mark.long, pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root")]
            if "long" in marks:
                use.append(pytest.mark.timeout(2 * COMMAND_S))
            made.append(pytest.param(page, commands, "cluster" in marks, id=name, marks=use))
    return made


def files(page: Path) -> dict[str, str]:
    """Return the programs of a page that have a name."""
    return dict(re.findall(r"^```python (\w+\.py)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def cluster() -> Iterator[str]:
    """Start a cluster with Mission Control, on which the job `report` has shuffled; return its address."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as own, Client(own) as client:
        mission_control.install(client)
        frame = dd.from_pandas(pd.DataFrame({"key": range(1000), "value": 1}), npartitions=4)
        with mission_control.job("report", client=client):
            assert len(frame.shuffle("key", shuffle_method="p2p").compute()) == 1000
        yield own.scheduler_address


@pytest.mark.parametrize(("page", "commands", "on_cluster"), cases())
def test_the_commands_of_a_page_run(page, commands, on_cluster, tmp_path, request):
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    for name, text in files(page).items():
        (tmp_path / name).write_text(text)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if on_cluster:
        environment["DASK_SCHEDULER_ADDRESS"] = request.getfixturevalue("cluster")
    named = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": COMMAND_S}
    try:
        for command in commands:
            done = subprocess.run(command, shell=True, **named)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    finally:
        for lab in re.findall(r"mission lab up .*--name (\w+)", "\n".join(commands)):
            # If a command of the page failed, its lab is still up.
            subprocess.run(f"mission lab down {lab}", shell=True, **named)


def indented(page: Path) -> list[str]:
    """Return the commands of `mission` in the indented blocks of a page, without comments and prompts."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    lines = re.findall(r"^    (?:PYTHONPATH=\. )?(mission .+)$", text, re.MULTILINE)
    # Three dots stand for options that the page has named before.
    return [line for line in lines if ".." not in line and not re.match(r"mission \d", line)]


@pytest.mark.parametrize("page", [page for page in LINKED if indented(page)], ids=lambda page: page.name)
def test_commands_that_are_not_run_are_parsed(page, monkeypatch, tmp_path):
    known = commands_of_mission()
    monkeypatch.chdir(tmp_path)
    for line in indented(page):
        words = shlex.split(line.partition(" | ")[0], comments=True)[1:]
        path = next(path for n in (2, 1) if (path := " ".join(words[:n])) in known)
        known[path].make_context(path, words[len(path.split()) :]).close()


@pytest.mark.parametrize(("page", "says"), (("tutorial/first-program.md", "8000"), ("how-to/policy.md", "6")))
def test_the_program_of_a_page_runs(page, says, tmp_path):
    text = (ROOT / "docs" / page).read_text()
    (tmp_path / "program.py").write_text(re.split(r"```python.*\n", text)[1].split("```")[0])
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, says), done.stderr


def anchors(page: Path) -> set[str]:
    """Return the anchors of its headings, as GitHub and MyST make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: no such heading"


def test_every_page_is_in_the_sites_contents():
    index = ROOT / "docs" / "index.md"
    listed = []
    for page in PAGES:
        for contents in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            names = re.findall(r"^[a-z0-9-]+(?:/[a-z0-9-]+)*$", contents, re.MULTILINE)
            listed += [page.parent / f"{name}.md" for name in names]
    assert sorted(listed) == [page for page in PAGES if page != index]


def test_the_front_page_of_measurements_has_the_numbers_of_the_report():
    page = (ROOT / "docs" / "measurements.md").read_text()
    rows = re.findall(r"^\| \[(.+?\?)\]\(.+?\) \|.*\| `(.+?)` \|", page, re.MULTILINE)
    assert rows == [(row.question, row.command) for row in report.ROWS]


def test_every_public_name_is_on_the_page_of_python():
    listed = [name for names in docs.PYTHON.values() for name in names]
    assert sorted(listed) == sorted(mission_control.__all__)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "measurements").glob("*/*.md")), ids=lambda page: page.stem)
def test_a_measurement_is_a_question_and_begins_with_its_answer(page):
    title, answer, *rest = page.read_text().split("\n\n")
    assert title.startswith("# ") and title.endswith("?")
    assert answer and not answer.startswith(("|", "Setup:", "#", "```"))
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", "".join(rest)), "when?"
