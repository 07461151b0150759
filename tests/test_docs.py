"""The documentation: its commands run, its programs run, and its links exist.

A block of commands begins with ```` ```console ````. Each of its lines that begins with `$ ` is run, all lines of a
page in one folder. After `console` may follow `lab` (needs root and the lab) and `long` (takes a minute or more).
Commands for hosts that a test does not have stand in indented blocks, and are not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mission_control
from mission_control import docs
from mission_control.bench import report

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
    for page in PAGES:
        by_marks: dict[frozenset[str], list[str]] = {}
        for marks, commands in blocks(page):
            by_marks.setdefault(frozenset(marks), []).extend(commands)
        for marks, commands in by_marks.items():
            name = "-".join([page.stem, *sorted(marks)])
            use = [getattr(pytest.mark, mark) for mark in marks]
            if {"lab", "long"} <= marks:
                # `make test-lab` has no time for it; `make long` runs it for root.
                use = [
                    pytest.mark.long,
                    pytest.mark.timeout(2 * COMMAND_S),
                    pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root"),
                ]
            made.append(pytest.param(commands, id=name, marks=use))
    return made


@pytest.mark.parametrize("commands", cases())
def test_the_commands_of_a_page_run(commands, tmp_path):
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    named = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": COMMAND_S}
    try:
        for command in commands:
            done = subprocess.run(command, shell=True, **named)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    finally:
        for lab in re.findall(r"mission lab up .*--name (\w+)", "\n".join(commands)):
            # If a command of the page failed, its lab is still up.
            subprocess.run(f"mission lab down {lab}", shell=True, **named)


@pytest.mark.parametrize(("page", "says"), (("tutorial/first-program.md", "8000"), ("how-to/policy.md", "6")))
def test_the_program_of_a_page_runs(page, says, tmp_path):
    text = (ROOT / "docs" / page).read_text()
    (tmp_path / "program.py").write_text(text.split("```python\n")[1].split("```")[0])
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
    listed = set(re.findall(r"^([a-z-]+(?:/[a-z0-9-]+)*)$", index.read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(index.parent).with_suffix("")) for page in PAGES if page != index}


def test_the_front_page_of_measurements_has_the_numbers_of_the_report():
    page = (ROOT / "docs" / "measurements.md").read_text()
    rows = re.findall(r"^\| \[(.+?\?)\]\(.+?\) \|.*\| `(.+?)` \|", page, re.MULTILINE)
    assert rows == [(row.question, row.command) for row in report.ROWS]


def test_every_public_name_is_on_the_page_of_python():
    listed = [name for names in docs.PYTHON.values() for name in names]
    assert sorted(listed) == sorted(mission_control.__all__)
