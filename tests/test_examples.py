"""The programs that people copy from run, and the README shows the first of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8000"


def test_the_readme_program_runs(tmp_path):
    text = (ROOT / "README.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8000"


@pytest.mark.parametrize(("number", "says"), ((1, "('the', 3)"), (2, "{'word': 'the', 'count': 3}")))
def test_the_programs_of_mapreduce_run(tmp_path, number, says):
    text = (ROOT / "docs" / "how-to" / "mapreduce.md").read_text()
    (tmp_path / "program.py").write_text(text.split("```python\n")[number].split("```")[0])
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == says
