from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import mission_control
from mission_control import _native
from tests import fork_server

pytest_plugins = ["tests.repeats"]
# Processes with the same token share the slots of their host, so each worker of pytest-xdist has another token.
TOKEN = b"a token for tests" + os.environ.get("PYTEST_XDIST_WORKER", "").encode()
SEED = "MISSION_TEST_SEED"
"""Variable of the environment: the seed of a run, which `make test` prints."""
# Before Python 3.11.9 a thread that reads the frames of all others, as Dask's profiler does a hundred times a second,
# and one that starts a thread can deadlock (python/cpython issue 106883). The proxies of some tests start hundreds.
dask.config.set({"distributed.worker.profile.enabled": False})


@pytest.fixture(autouse=True)
def random_numbers(request: pytest.FixtureRequest) -> None:
    """What a test draws without a seed of its own follows from its name and the seed of the run."""
    random.seed(f"{os.environ[SEED]} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """Clusters of a process share its settings: a test must restore what it changes."""
    before = deepcopy(dask.config.get("mission-control", None))
    yield
    assert dask.config.get("mission-control", None) == before, "the test left settings of Mission Control changed"


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED, str(random.randrange(1 << 32)))
    # The process that distributes tests to others runs none. In a lab, and with a wheel, all is as users have it.
    runs_some = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if runs_some and config.option.markexpr not in ("lab", "wheel"):
        fork_server.use(hash_seed=os.environ[SEED])


def pytest_report_header() -> str:
    return f"seed of hashes and of random numbers: {SEED}={os.environ[SEED]} repeats them"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--must-run", action="store_true", help="fail where every selected test was skipped")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which all tests were skipped has tested nothing."""
    if exitstatus == 0 and session.config.getoption("--must-run"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and not reporter.stats.get("passed"):
            reporter.write_line("every test was skipped: --must-run wants some to run")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def name() -> str:
    """Return a name for a lab that no other process uses."""
    return f"t{os.getpid()}"


@pytest.fixture
def endpoint(tmp_path) -> Iterator[Callable[..., _native.Endpoint]]:
    """Make data planes without Dask, and close them."""
    made: list[_native.Endpoint] = []

    def make(token: bytes = TOKEN, memory_limit: int = 1 << 30, flows_per_host: int = 10) -> _native.Endpoint:
        spool = str(tmp_path / "spool")
        own = _native.Endpoint(
            "127.0.0.1", token, memory_limit=memory_limit, spool_folder=spool, flows_per_host=flows_per_host
        )
        made.append(own)
        return own

    yield make
    for entry in made:
        entry.close()


@contextmanager
def installed(**options: Any) -> Iterator[LocalCluster]:
    """Make a cluster with Mission Control; `options` are those of Dask's."""
    given = {"n_workers": 3, "threads_per_worker": 2, "memory_limit": "2GiB", **options}
    with LocalCluster(dashboard_address=":0", **given) as cluster:
        with Client(cluster, set_as_default=False) as client:
            mission_control.install(client)
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with installed() as cluster:
        yield cluster


@pytest.fixture
def client(cluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


def status(client: Client) -> dict[str, Any]:
    return client.sync(client.scheduler.mission_control_status)


def resources(client: Client) -> dict[str, dict[str, Any]]:
    """Return the resources that the data plane of each worker holds."""
    return client.run(lambda dask_worker: dask_worker.plugins["mission-control"].resources())


def held_by_scheduler(client: Client) -> dict[str, int]:
    """Return the number of entries in the scheduler plug-in's tables; all are 0 once nothing runs."""

    def count(dask_scheduler: Any) -> dict[str, int]:
        own = dask_scheduler.plugins["mission-control"]
        translated = {"numbers": own.numbers, "keys": own.keys, "submitted by": own.submitted_by}
        return {**own.controller.held(), **{name: len(value) for name, value in translated.items()}}

    return client.run_on_scheduler(count)


def what_is_left(client: Client, *names: str) -> dict[str, dict[str, Any]]:
    """Return which of these resources each worker still holds, and the entries of the scheduler plug-in."""
    found = {worker: {name: own[name] for name in names if own[name]} for worker, own in resources(client).items()}
    found["scheduler"] = {name: count for name, count in held_by_scheduler(client).items() if count}
    return {place: left for place, left in found.items() if left}


def until(
    true: Callable[[], Any], what: str, seconds: float = 60, instead: Callable[[], Any] = lambda: "it is not"
) -> Any:
    """Wait until something is true; ``instead`` says what is there when the time is over."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}; {instead()}"
        time.sleep(0.05)
    return value


@contextmanager
def two_named_jobs(client: Client) -> Iterator[None]:
    """Have two named jobs that do nothing, so that jobs share threads, queue and messages by weight; tasks that are
    submitted meanwhile belong to neither."""
    with Client(client.scheduler.address, set_as_default=False, security=client.security) as other:
        for name in ("idle", "idle too"):
            spec = mission_control.jobs.specification(name)
            other.sync(other.scheduler.mission_control_admit, spec=spec, client=other.id)
        until(lambda: all(client.run(_is_contended).values()), "jobs share by weight")
        yield


def _is_contended(dask_worker: Any) -> bool:
    return dask_worker.plugins["mission-control"].contended


def mission(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command `mission` as a user would, in a process of its own."""
    return fork_server.command(words, timeout=240, env={**os.environ, "COLUMNS": "200"}, cwd=cwd)


def data(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def put(owner: _native.Endpoint, content: Any, encrypt: str = "none", **demands: Any) -> tuple[str, list[int]]:
    """Put an object of one part; return its name and the sizes of its parts."""
    return owner.put([content], "job", json.dumps({"encrypt": encrypt, "transport": None, **demands}))


def fetch(
    reader: _native.Endpoint, object: str, sizes: list[int], addresses: list[str], job: str = "job", **demands: Any
) -> bytes:
    """Return all parts of an object as one."""
    demanded = {"encrypt": "none", "transport": None, **demands}
    parts = [(object, number, size, addresses) for number, size in enumerate(sizes)]
    return bytes(reader.fetch(job, "map", "reduce", json.dumps(demanded), parts, True)[1])


def tally(reader: _native.Endpoint) -> dict[str, Any]:
    """Return the record of the reader's only transfer."""
    (record,) = json.loads(reader.transfers())
    return record
