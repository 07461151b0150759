"""World `lab`: scheduler and workers of Dask are hosts of a data centre made for the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
from distributed import Client, Security

import mission_control
from mission_control import lab
from mission_control.lab import described, namespaces
from mission_control.lab.events import Watching, dilated
from mission_control.scenario import BadInput, EnvironmentFailed, Event, Scenario, Topology
from mission_control.worlds.site import Site

PORT = 8786
START_S = 90
"""For all workers to be there: 40 of them take 30 s on two processors (FACTS)."""
DASK_WAITS_S = 30
"""For a connection to be made, and for bytes to be acknowledged: Dask's own defaults."""
LIMIT_SHARE = 0.6
"""Of the machine's memory that all workers together may take, unless told."""


QUIET = {
    "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "2s",
}
"""Settings of Dask's processes. One that does nothing looks at its own stacks every 10 ms and at its clock every 20 ms:
48 of them would take more than a core from what forwards packets (docs/measurements.md)."""


@contextmanager
def in_lab(
    scenario: Scenario, scheduler: str | None = None, *, install_policy: bool = False, plain: bool = False
) -> Iterator[Site]:
    """Builds the topology with one host more, for the scheduler and for this process; starts a worker on each of the
    others.

    Args:
        plain: Dask alone, without Mission Control.

    Raises:
        PrerequisiteMissing: no root, or what the lab needs is not there.
        EnvironmentFailed: its scheduler or its workers did not come up.
        BadInput: links that make no network.
    """
    control = scenario.control
    security = Security.temporary() if control.encrypt is True else None
    with ExitStack() as stack:
        # Before the lab, which ends all processes that write there.
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mission-lab-", ignore_cleanup_errors=True))
        )
        built = stack.enter_context(described.lab_of(scenario, spare=1))
        *workers, first = built.topology.hosts
        check(built, scenario.topology.events, workers)
        given = certificates(security, folder) if security else []
        given += [] if plain else ["--preload", "mission_control.dask"]
        address = f"{'tls' if security else 'tcp'}://{built.topology.address(first)}:{PORT}"
        words = ["--host", address.rpartition(":")[0], "--port", str(PORT)]
        # What is installed later finds a cluster that has its number of flows already.
        own = [] if plain else ["--mission-flows-per-host", str(control.flows_per_host)]
        slow = scenario.topology.dilation
        started = [_start(built, first, folder, slow, "scheduler", *words, *given, *own)]
        stack.enter_context(namespaces.entered(built.namespace(first)))
        limit = memory_limit(scenario.topology, len(workers))
        for host in workers:
            words = [
                "--nthreads",
                str(scenario.topology.threads),
                "--no-nanny",
                "--memory-limit",
                str(limit),
                "--host",
                built.topology.address(host),
                *given,
            ]
            started.append(_start(built, host, folder, slow, "worker", address, *words, "--name", host))
        connect = partial(Client, address, security=security, set_as_default=False)
        with _connect(connect, started, folder) as client:
            _wait(client, len(workers), started, folder)
            if not plain:
                mission_control.install(client, policy=control.policy, flows_per_host=control.flows_per_host)
            watching = Watching(built, dilated(scenario.topology))
            try:
                yield Site(connect, watching.begin, watching.stop_and_summarize)
            finally:
                watching.end()


def check(built: lab.Lab, events: Sequence[Event], workers: Sequence[str]) -> None:
    """
    Raises:
        BadInput: an event is about a host or a link that is not there, or would end the run itself.
    """
    for event in events:
        if event.host:
            built.link_of(event.host, event.path)
        if event.do == "die" and event.host not in workers:
            raise BadInput(f"{event.host} is the scheduler's host: let one of {workers[0]} to {workers[-1]} die")
        if event.do in ("cut", "restore"):
            built.require_own_links()


def certificates(security: Security, folder: Path) -> list[str]:
    """The options of Dask's processes that give them the cluster's certificates, in files that only we can read."""
    words = []
    for option, content in (("ca-file", "tls_ca_file"), ("cert", "tls_worker_cert"), ("key", "tls_worker_key")):
        path = folder / f"{option}.pem"
        path.touch(mode=0o600)
        path.write_text(getattr(security, content))
        words += [f"--tls-{option}", str(path)]
    return words


def memory_limit(topology: Topology, workers: int) -> int:
    if topology.memory_limit != "auto":
        return topology.memory_limit
    return int(psutil.virtual_memory().available * LIMIT_SHARE / workers)


def in_slow_motion(slow: int) -> dict[str, str]:
    """What a process in a lab of this dilation needs to know: its waits for the network last that many times longer.

    One minimum RTO of 200 ms is longer than Dask waits for a connection from a dilation of 150 on.
    """
    if slow == 1:
        return {}
    longer = f"{DASK_WAITS_S * slow}s"
    return {
        "MISSION_SLOW_MOTION": str(slow),
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": longer,
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": longer,
    }


def _start(built: lab.Lab, host: str, folder: Path, slow: int, what: str, *words: str) -> subprocess.Popen[bytes]:
    """A part of Dask on a host of a lab in slow motion; what it says goes to a file of its own."""
    module = f"distributed.cli.dask_{what}"
    # What forwards packets must not wait for programs: a queue would stand still, and nobody could say why.
    command = [
        "chrt",
        "--idle",
        "0",
        sys.executable,
        "-m",
        module,
        *words,
        "--no-dashboard",
    ]
    if what == "worker":
        command += ["--local-directory", str(folder / host)]
    # Its interfaces do not know what the switch lets through.
    rate = sum(link.bits_per_second for _, link in built.links_of(host))
    environment = {**QUIET, **in_slow_motion(slow), **os.environ, "OMP_NUM_THREADS": "1"}
    environment["MISSION_LINK_RATE"] = f"{rate} bit/s"
    with open(folder / f"{host}.log", "wb") as log:
        return built.host(host).popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


def _connect(connect: Callable[..., Client], started: list[subprocess.Popen[bytes]], folder: Path) -> Client:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return connect(timeout=2)
        except (OSError, ValueError) as error:
            _all_run(started, folder)
            if time.monotonic() > deadline:
                raise EnvironmentFailed(f"the scheduler does not answer: {error}") from None


def _wait(client: Client, workers: int, started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while (there := len(client.scheduler_info(n_workers=-1)["workers"])) < workers:
        _all_run(started, folder)
        if time.monotonic() > deadline:
            raise EnvironmentFailed(f"only {there} of {workers} workers are up after {START_S} s: use fewer hosts")
        time.sleep(0.1)


def _all_run(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """
    Raises:
        EnvironmentFailed: a part of Dask has ended; its last words.
    """
    for process in started:
        if process.poll() is not None:
            said = ""
            for log in sorted(folder.glob("*.log")):
                with suppress(OSError):
                    said = log.read_text(errors="replace").strip() or said
            raise EnvironmentFailed(f"a process of the lab ended with status {process.returncode}: {said[-400:]}")
