"""World `lab`: scheduler and workers of Dask are hosts of a data centre made for the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from distributed import Client

import mission_control
from mission_control import lab
from mission_control.lab import described, namespaces
from mission_control.lab.watch import Watch
from mission_control.scenario import BadInput, Missing, Scenario, Topology
from mission_control.worlds.site import Site

PORT = 8786
START_S = 90
"""For all workers to be there: 40 of them take 30 s on two processors (FACTS)."""
LIMIT_SHARE = 0.6
"""Of the machine's memory that all workers together may take, unless told."""


@contextmanager
def in_lab(scenario: Scenario, scheduler: str | None = None) -> Iterator[Site]:
    """Builds the topology with one host more, for the scheduler and for this process; starts a worker on each of the
    others.

    Raises:
        Missing: no root, or what the lab needs is not there.
        BadInput: the scenario demands what the lab does not have yet.
    """
    control = scenario.control
    if control.encrypt is True:
        raise BadInput("a cluster with certificates is not built in the lab yet: use --opportunistic")
    with ExitStack() as stack:
        built = stack.enter_context(described.lab_of(scenario, spare=1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mission-lab-")))
        *workers, first = built.topology.hosts
        address = f"tcp://{built.topology.address(first)}:{PORT}"
        started = [
            _start(built, first, folder, "scheduler", "--host", built.topology.address(first), "--port", str(PORT))
        ]
        stack.enter_context(_inside(built.namespace(first)))
        limit = memory_limit(scenario.topology, len(workers))
        for host in workers:
            words = [
                "--nthreads",
                "1",
                "--no-nanny",
                "--memory-limit",
                str(limit),
                "--host",
                built.topology.address(host),
            ]
            started.append(_start(built, host, folder, "worker", address, *words, "--name", host))
        with _connect(address, started, folder) as client:
            _wait(client, len(workers), started, folder)
            mission_control.install(client, policy=control.policy, flows_per_host=control.flows_per_host)
            watch = Watch(built)
            yield Site(lambda: Client(address, set_as_default=False), watch.start, watch.told)


def memory_limit(topology: Topology, workers: int) -> int:
    if topology.memory_limit != "auto":
        return topology.memory_limit
    return int(psutil.virtual_memory().available * LIMIT_SHARE / workers)


def _start(built: lab.Lab, host: str, folder: Path, what: str, *words: str) -> subprocess.Popen[bytes]:
    """A part of Dask on a host; what it says goes to a file of its own."""
    module = f"distributed.cli.dask_{what}"
    command = [sys.executable, "-m", module, *words, "--preload", "mission_control.dask", "--no-dashboard"]
    if what == "worker":
        command += ["--local-directory", str(folder / host)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning"}
    with open(folder / f"{host}.log", "wb") as log:
        return built.host(host).popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


@contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """This thread is in the namespace meanwhile, and so are the threads that it starts."""
    with open("/proc/self/ns/net") as before:
        namespaces.enter(namespace)
        try:
            yield
        finally:
            namespaces.enter_file(before)


def _connect(address: str, started: list[subprocess.Popen[bytes]], folder: Path) -> Client:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return Client(address, timeout=2, set_as_default=False)
        except (OSError, ValueError) as error:
            _all_run(started, folder)
            if time.monotonic() > deadline:
                raise Missing(f"the scheduler does not answer at {address}: {error}") from None


def _wait(client: Client, workers: int, started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while (there := len(client.scheduler_info(n_workers=-1)["workers"])) < workers:
        _all_run(started, folder)
        if time.monotonic() > deadline:
            raise Missing(f"only {there} of {workers} workers are up after {START_S} s: use fewer hosts")
        time.sleep(0.1)


def _all_run(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """
    Raises:
        Missing: a part of Dask has ended; its last words.
    """
    for process in started:
        if process.poll() is not None:
            said = ""
            for log in sorted(folder.glob("*.log")):
                with suppress(OSError):
                    said = log.read_text(errors="replace").strip() or said
            raise Missing(f"a process of the lab ended with status {process.returncode}: {said[-400:]}")
