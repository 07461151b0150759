"""World `lab`: Dask's scheduler and workers run on hosts of a lab that is made for the run."""

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
from mission_control.workers import workers_of
from mission_control.worlds.site import Site

PORT = 8786
START_S = 90
"""Seconds for all workers to start: 40 of them take 30 s on two CPUs (FACTS)."""
DASK_WAITS_S = 30
"""Dask's default timeouts for connecting and for acknowledgments, in seconds."""
LIMIT_SHARE = 0.6
"""Default fraction of the machine's memory that all workers together may take."""


QUIET = {
    "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "2s",
}
"""Settings of Dask's processes. By default an idle one profiles its stacks every 10 ms and reads its clock every 20 ms:
48 of them would take more than a core from the forwarding of packets (docs/measurements/decisions/idle-workers.md)."""


@contextmanager
def in_lab(
    scenario: Scenario, scheduler: str | None = None, *, install_policy: bool = False, plain: bool = False
) -> Iterator[Site]:
    """Build the topology with one more host, for the scheduler and this process; start a worker on each other host.

    Args:
        plain: Dask alone, without Mission Control.

    Raises:
        PrerequisiteMissing: the user is not root, or something that a lab needs is missing.
        EnvironmentFailed: its scheduler or its workers did not start.
        BadInput: links that make no network.
    """
    control = scenario.control
    security = Security.temporary() if control.encrypt is True else None
    with ExitStack() as stack:
        # Entered before the lab, so that it is removed after the lab has ended all processes that write there.
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
        # A later install keeps the number of flows that the cluster has.
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
        BadInput: an event names a host or a link that does not exist, or would end the run itself.
    """
    for event in events:
        if event.host:
            built.link_of(event.host, event.path)
        if event.do == "die" and event.host not in workers:
            raise BadInput(f"{event.host} is the scheduler's host: let one of {workers[0]} to {workers[-1]} die")
        if event.do in ("cut", "restore"):
            built.require_own_links()


def certificates(security: Security, folder: Path) -> list[str]:
    """Write the cluster's certificates to files that only this user can read; return Dask's options for them."""
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
    """Return the environment of a process in a lab with this dilation: timeouts for the network are longer by this
    factor.

    From a dilation of 150 on, one minimum RTO of 200 ms is longer than Dask's timeout for a connection.
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
    """Start a process of Dask on a host of a dilated lab; its output goes to a separate file."""
    module = f"distributed.cli.dask_{what}"
    # Programs yield to the forwarding of packets: otherwise a queue would stall without a visible reason.
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
    # Its interfaces do not know the rate of the switch port.
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
    while (there := len(workers_of(client))) < workers:
        _all_run(started, folder)
        if time.monotonic() > deadline:
            raise EnvironmentFailed(f"only {there} of {workers} workers are up after {START_S} s: use fewer hosts")
        time.sleep(0.1)


def _all_run(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """
    Raises:
        EnvironmentFailed: a process of Dask has ended; the text has the end of its output.
    """
    for process in started:
        if process.poll() is not None:
            said = ""
            for log in sorted(folder.glob("*.log")):
                with suppress(OSError):
                    said = log.read_text(errors="replace").strip() or said
            raise EnvironmentFailed(f"a process of the lab ended with status {process.returncode}: {said[-400:]}")
