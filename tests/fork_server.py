"""A fork server: it has imported once what worker processes and commands of the tests need.

Workers of Dask and commands of `mission` are processes of their own here, as they are for users. Users start each of
them with a new interpreter, which imports Dask, pandas and Mission Control for 1 to 3 s of CPU time. That was most of
what the suite took. So the standard library's fork server starts them, with three differences: a process gets the
environment, the output and the folder of the process that asked for it, and its own children come from the same
server. `test_wheel.py`, the lab and every test that starts `sys.executable` have new interpreters, as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, popen_forkserver, process, reduction
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import dask
from distributed.utils import get_mp_context

IMPORTED = [
    "tests.conftest",
    "dask.array",
    "dask.bag",
    "dask.dataframe",
    "pyarrow",
    "distributed",
    "distributed.dashboard.scheduler",
    "distributed.shuffle",
    "mission_control.dask.worker",
    "mission_control.dask.comm",
    "mission_control.dask.p2p",
    "mission_control.cli.run",
    "mission_control.worlds.local",
]
"""Imported by the server. None of them may start a thread of Python: `test_fork_server.py` holds that."""


def use(hash_seed: str) -> None:
    """Let Dask and this module start processes by the fork server.

    Args:
        hash_seed: Of the hashes of texts in all of these processes, which decide the order of sets.
    """
    ForkServerProcess._Popen = staticmethod(_Popen)
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    # It sets the modules that are imported, the first time that it is called.
    get_mp_context().set_forkserver_preload(IMPORTED)
    before = dict(os.environ)
    # As Dask's nannies do for workers. Libraries of linear algebra would start threads otherwise.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    os.environ["PYTHONHASHSEED"] = hash_seed
    # Here and now: it inherits the folder in which `tests` can be imported.
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


def is_used() -> bool:
    return ForkServerProcess._Popen is _Popen


def new_interpreters() -> dask.config.set:
    """Return a context in which Dask starts workers as it does for users.

    For tests of workers with little memory: half of what the server has imported is of no use to such a worker.
    """
    return dask.config.set({"distributed.worker.multiprocessing-method": "spawn"})


def command(
    words: tuple[str, ...], timeout: float, env: dict[str, str], cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `mission` with these words, as ``subprocess.run`` with captured text does; by it where nobody called `use`.

    Raises:
        subprocess.TimeoutExpired: It took longer than ``timeout`` seconds, and was ended.
    """
    if not is_used():
        new = [sys.executable, "-m", "mission_control", *words]
        return subprocess.run(new, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        running = multiprocessing.get_context("forkserver").Process(
            target=_command, args=(words, env, str(cwd or Path.cwd()), _File(output.fileno()), _File(errors.fileno()))
        )
        running.start()
        running.join(timeout)
        if running.exitcode is None:
            running.kill()
            running.join()
            raise subprocess.TimeoutExpired(words, timeout, _content(output), _content(errors))
        return subprocess.CompletedProcess(words, running.exitcode, _content(output), _content(errors))


def _content(file: Any) -> str:
    file.seek(0)
    return file.read()


def _command(words: tuple[str, ...], env: dict[str, str], cwd: str, output: _File, errors: _File) -> None:
    output.replace(1)
    errors.replace(2)
    _be_in(env, cwd)
    sys.argv = ["mission", *words]
    runpy.run_module("mission_control", run_name="__main__", alter_sys=True)


class _Popen(popen_forkserver.Popen):
    """A process of the fork server that has this process's environment, folder, stdout and stderr."""

    def _launch(self, process_obj: BaseProcess) -> None:
        super()._launch(_Request(process_obj))


class _Request:
    """Becomes the process object, once the new process has what a child of this one would have."""

    def __init__(self, process_obj: BaseProcess):
        self._process = process_obj
        self._name = process_obj._name

    def __reduce__(self) -> tuple[Any, ...]:
        # In this order: what the process object needs may depend on the environment.
        surroundings = _Surroundings(dict(os.environ), os.getcwd(), _File(1), _File(2))
        return _second, (surroundings, self._process)


def _second(_: _Surroundings, process_obj: BaseProcess) -> BaseProcess:
    return process_obj


class _Surroundings:
    def __init__(self, env: dict[str, str], cwd: str, output: _File, errors: _File):
        self.given = env, cwd, output, errors

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, self.given


def _inherit(env: dict[str, str], cwd: str, output: _File, errors: _File) -> None:
    _reuse_server()
    output.replace(1)
    errors.replace(2)
    _be_in(env, cwd)


def _be_in(env: dict[str, str], cwd: str) -> None:
    """Take an environment and a folder."""
    settings = {name: value for name, value in env.items() if name.startswith("DASK_")}
    stale = settings != {name: value for name, value in os.environ.items() if name.startswith("DASK_")}
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    process.ORIGINAL_DIR = cwd
    if stale:
        dask.config.refresh()
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})


def _reuse_server() -> None:
    """Let this process ask the server that it came from for its own children."""
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None


class _File:
    """An open file of this process, for a process that is about to start."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _File._received, (reduction.DupFd(self.number),)

    @classmethod
    def _received(cls, sent: Any) -> _File:
        return cls(sent.detach())

    def replace(self, number: int) -> None:
        """Take the place of this process's file ``number``."""
        os.dup2(self.number, number)
        os.close(self.number)
