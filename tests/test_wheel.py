"""The wheel, as people get it who have no checkout, no cargo and no clang: `make test-wheel`.

Each environment is new, has only what the wheel asks for, and sees the machine's commands without those that build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks

pytestmark = pytest.mark.wheel

WHEELS = ROOT / "target" / "wheels"
BUILDS = re.compile(
    r"(cargo|rustc|rustup|rustdoc|clang|llvm|ld\.lld|cc|gcc|c\+\+|g\+\+|c[89]9|cpp|mvn|javac|make)([-.\d].*)?"
)
"""Names of commands that build."""
COMMAND_S = 280


@pytest.fixture(scope="session")
def wheel() -> Path:
    (found,) = WHEELS.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def commands(tmp_path_factory) -> Path:
    """Return a folder with the machine's commands, without those that build."""
    folder = tmp_path_factory.mktemp("commands")
    for source in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for command in Path(source).iterdir():
            link = folder / command.name
            if not BUILDS.fullmatch(command.name) and not link.is_symlink():
                link.symlink_to(command)
    return folder


class Installed:
    """A new environment with the wheel in it."""

    def __init__(self, folder: Path, python: str, wheel: str, commands: Path):
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        uv = shutil.which("uv")
        subprocess.run([uv, "venv", "--quiet", "--python", python, str(folder / "venv")], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(folder / "venv" / "bin" / "python"), wheel]
        subprocess.run(install, check=True)
        self.environment = {
            "HOME": str(self.home),
            "PATH": f"{folder / 'venv' / 'bin'}:{commands}",
            "LANG": "C.UTF-8",
        }

    def run(self, command: str) -> str:
        """Run a command of the shell in the home folder; return what it prints."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory, wheel, commands) -> Installed:
    """Return an environment of this Python's version, with what data frames need."""
    return Installed(tmp_path_factory.mktemp("installed"), sys.executable, f"{wheel}[bench]", commands)


def test_a_wheel_has_all_its_parts(wheel):
    assert re.fullmatch(r"mission_control-[\d.]+-cp311-abi3-manylinux_\d+_\d+_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        licences = packed.read("mission_control/LICENCES.txt").decode()
    assert "mission_control/_native.abi3.so" in names
    assert "mission_control/jvm/mission-control.jar" in names
    # Each library that auditwheel has copied needs an entry in tools/licences.py.
    copied = [name for name in names if name.startswith("mission_control.libs/") and ".so" in name]
    assert [re.match(r"mission_control\.libs/(libelf)", name) is not None for name in copied] == [True]
    assert not [name for name in names if name.startswith(("tests/", "tools/", "docs/", "crates/"))]
    for dependency in ("rustls 0.", "libbpf-sys 1.", "libelf: LGPL", "gson: Apache-2.0"):
        assert dependency in licences


def test_an_sdist_has_the_sources():
    (sdist,) = WHEELS.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    for needed in ("Cargo.lock", "pyproject.toml", "README.md", "LICENSE", "crates/kernel/bpf/port.bpf.c"):
        assert needed in names
    assert "mission_control/scenarios/demo.toml" in names
    assert not [name for name in names if name.startswith(("target/", ".venv/", "results/"))]


def test_nothing_here_builds(installed, wheel):
    for command in ("cargo", "clang", "gcc", "cc"):
        assert shutil.which(command, path=installed.environment["PATH"]) is None
    assert installed.run("mission --version").strip() == f"mission {wheel.name.split('-')[1]}"
    installed.run("mission doctor")


def test_the_demo_runs(installed):
    found = json.loads(installed.run("mission demo --json"))
    assert found["program"]["items"] == found["program"]["bytes"] // 32
    assert found["program"]["carrier"] == "mission"
    assert found["jobs"]["ok"] and found["jobs"]["valid"]
    agreed = [
        one for job in found["jobs"]["jobs"] for own in job["transfers"] for one in own["transport"]["negotiated"]
    ]
    assert {(one["transport"], one["authenticated"]) for one in agreed} == {("tls", True)}


PROGRAM = """
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

if __name__ == "__main__":
    with Client("tcp://127.0.0.1:{port}") as client:
        client.wait_for_workers(2)
        frame = dd.from_map(lambda seed: pd.DataFrame({{"key": np.arange(1000) % 7 + seed, "value": 1}}), range(8))
        print(client.id, int(frame.shuffle("key", shuffle_method="p2p")["value"].sum().compute()))
"""


@pytest.fixture
def cluster(installed, unused_port) -> Iterator[int]:
    """Start a scheduler and two workers with Dask's own commands; return the scheduler's port."""
    preload = "--preload mission_control.dask --no-dashboard"
    address = f"tcp://127.0.0.1:{unused_port}"
    lines = [f"dask scheduler --host 127.0.0.1 --port {unused_port} {preload}"]
    lines += [f"dask worker {address} --nthreads 1 {preload}"] * 2
    started = [
        subprocess.Popen(
            line.split(),
            cwd=installed.home,
            env=installed.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for line in lines
    ]
    yield unused_port
    for process in reversed(started):
        process.terminate()
    for process in started:
        process.wait(30)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_unchanged_program_is_carried(installed, cluster):
    (installed.home / "program.py").write_text(PROGRAM.format(port=cluster))
    job, total = installed.run("python program.py").split()
    assert total == "8000"
    found = json.loads(installed.run(f"mission explain {job} --json --scheduler tcp://127.0.0.1:{cluster}"))
    (shuffle,) = found["shuffles"]
    assert (shuffle["engine"], shuffle["rows_in"], shuffle["rows_out"]) == ("mission", 8000, 8000)


def of_page(page: str, *marks: str) -> list[str]:
    """Return the commands of a page that have these marks."""
    return [line for marked, lines in blocks(ROOT / "docs" / page) if marked == set(marks) for line in lines]


def test_the_first_tutorial_runs(installed):
    text = (ROOT / "docs" / "tutorial" / "first-program.md").read_text()
    (installed.home / "first.py").write_text(text.split("```python\n")[1].split("```")[0])
    assert installed.run("python first.py").strip() == "8000"
    lines = of_page("tutorial/first-program.md")
    assert lines
    for line in lines:
        installed.run(line)


@pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root")
def test_the_first_lab_runs(installed):
    lines = of_page("tutorial/first-lab.md", "lab")
    assert any(line.startswith("mission lab up") for line in lines)
    try:
        for line in lines:
            installed.run(line)
    finally:
        subprocess.run("mission lab down first", shell=True, env=installed.environment, capture_output=True)


def interpreter(python: str) -> str | None:
    """Return a Python of this version: one that uv finds, or one of pyenv."""
    find = ["uv", "python", "find", "--no-python-downloads", python]
    found = subprocess.run(find, capture_output=True, text=True)
    if found.returncode == 0:
        return found.stdout.strip()
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next(map(str, versions.glob(f"{python}.*/bin/python")), None)


@pytest.mark.parametrize("python", ("3.12", "3.13"))
def test_other_versions_of_python(python, tmp_path, wheel, commands):
    found = interpreter(python)
    if found is None:
        pytest.skip(f"there is no Python {python} here")
    other = Installed(tmp_path, found, str(wheel), commands)
    shutil.copy(ROOT / "examples" / "first.py", other.home)
    assert other.run("python first.py").strip() == "8000"
