"""World `cluster`: a Dask cluster that is already running."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
from distributed import Client

import mission_control
from mission_control.printable import printable
from mission_control.scenario import BadInput, EnvironmentFailed, Scenario
from mission_control.workers import workers_of
from mission_control.worlds.site import Site

CONNECT_S = 10
CERTIFICATES = "set distributed.comm.tls (ca-file, client.cert, client.key) in Dask's configuration"


@contextmanager
def cluster(scenario: Scenario, scheduler: str | None = None, *, install_policy: bool = False) -> Iterator[Site]:
    """Connect to the scheduler. The cluster keeps its settings; a note reports where the scenario differs.

    Args:
        install_policy: the scenario's policy replaces the cluster's, for all its jobs and permanently. If the cluster
            has no Mission Control, it is installed, and stays.

    Raises:
        BadInput: it has no workers, or no Mission Control and is to get none.
        EnvironmentFailed: no scheduler answers.
    """
    assert scheduler is not None
    control, notes = scenario.control, []
    with connect(scheduler) as client:
        if not workers_of(client):
            raise BadInput(f"{scheduler} has no workers: start some with 'dask worker {scheduler}'")
        if mission_control.jobs.installed(client):
            before = Cluster(client).status(0)
            mission_control.install(client, policy=control.policy if install_policy else None)
        else:
            if not install_policy:
                raise BadInput(
                    f"{scheduler} has no Mission Control: --install-policy installs it there, for all of its jobs and "
                    "for good; or start it with --preload mission_control.dask"
                )
            mission_control.install(client, policy=control.policy, flows_per_host=control.flows_per_host)
            before = Cluster(client).status(0)
            notes.append(
                f"{scheduler} had no Mission Control: it was installed, with policy {before['policy']}, and stays"
            )
        status = Cluster(client).status(0)
        if status["policy"] != before["policy"]:
            notes.append(
                f"policy {status['policy']} was installed for all jobs of this cluster, in place of {before['policy']}"
            )
        if status["policy"] != control.policy:
            notes.append(
                f"control.policy = {control.policy} is not in force: the cluster has {status['policy']}; "
                "--install-policy replaces it, for all of its jobs"
            )
        flows = status.get("flows_per_host")
        if flows is not None and flows != control.flows_per_host:
            notes.append(f"control.flows_per_host = {control.flows_per_host} is not in force: the cluster has {flows}")
        yield Site(lambda: connect(scheduler), notes=notes, policy=status["policy"])


@contextmanager
def observe(scheduler: str | None) -> Iterator[Cluster]:
    """Connect to a cluster that has Mission Control already, to observe it.

    Raises:
        BadInput: no scheduler is named, or it has no Mission Control.
        EnvironmentFailed: none answers.
    """
    scheduler = scheduler or dask.config.get("scheduler-address", None)
    if scheduler is None:
        raise BadInput("which cluster? give --scheduler tcp://HOST:8786, or set DASK_SCHEDULER_ADDRESS")
    # A cluster that closes is said in one line; Dask's client logs tracebacks of its attempts to reconnect.
    for name in ("distributed", "tornado", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with connect(scheduler) as client:
        if not mission_control.jobs.installed(client):
            raise BadInput(
                f"{scheduler} has no Mission Control: start it with --preload mission_control.dask, or "
                "install it from a client: mission_control.install(client)"
            )
        yield Cluster(client)


def connect(scheduler: str) -> Client:
    """Connect to a scheduler.

    Raises:
        BadInput: The address is none, or a file of Dask's certificates cannot be read.
        EnvironmentFailed: Nobody answers.
    """
    if not re.fullmatch(r"(\w+://)?[^/\s]+:\d{1,5}/?|inproc://.+", scheduler):
        raise BadInput(f"--scheduler {scheduler}: this is no address; write tcp://HOST:PORT, e.g. tcp://localhost:8786")
    refuse_unreadable_certificates()
    try:
        return Client(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (TypeError, RuntimeError) as error:
        if "ssl_context" not in str(error) and "encrypt" not in str(error):
            raise
        raise BadInput(f"{scheduler} needs certificates: {CERTIFICATES}") from None
    except (OSError, ValueError) as error:
        kind = EnvironmentFailed if isinstance(error, OSError) else BadInput
        raise kind(
            f"no scheduler answers at {scheduler}: start one with 'dask scheduler'; or, if it needs certificates, "
            f"{CERTIFICATES} ({error})"
        ) from None


def refuse_unreadable_certificates() -> None:
    """
    Raises:
        BadInput: A file that Dask's configuration names cannot be read. Dask's own error does not name it.
    """
    for name in ("ca-file", "client.cert", "client.key"):
        file = dask.config.get(f"distributed.comm.tls.{name}", None)
        # Dask accepts the text of a PEM file in place of its name.
        if file is None or "\n" in file:
            continue
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise BadInput(
                f"distributed.comm.tls.{name} = {file} cannot be read ({error.strerror}): correct Dask's configuration"
            ) from None


class Cluster:
    """Requests to a Mission Controller."""

    def __init__(self, client: Client):
        self._client = client
        self._address = client.scheduler.address

    def _ask(self, what: str, **arguments: Any) -> Any:
        """Call a handler of the scheduler plug-in; texts of its answer can be printed.

        Raises:
            EnvironmentFailed: the scheduler closed or cannot be reached.
        """
        try:
            return printable(self._client.sync(getattr(self._client.scheduler, f"mission_control_{what}"), **arguments))
        except OSError as error:
            raise EnvironmentFailed(
                f"the scheduler at {self._address} closed or cannot be reached: start it again, or give --scheduler "
                f"another address ({error})"
            ) from None

    def status(self, most: int | None = None) -> dict[str, Any]:
        """See ``MissionControlScheduler.status``."""
        return self._ask("status", most=most)

    def job(self, name: str) -> dict[str, Any]:
        """Return one job of the status.

        Raises:
            BadInput: there is none of this name now.
        """
        jobs = {job["job"]: job for job in self.status()["jobs"]}
        if name not in jobs:
            raise BadInput(f"there is no job {name!r} now: {', '.join(sorted(jobs)) or 'no job runs'}")
        return jobs[name]

    def job_or_ended(self, name: str) -> dict[str, Any]:
        """As :meth:`job`; or the record of the last job of this name that has ended, with ``ended``: seconds since
        1970.

        Raises:
            BadInput: there is neither.
        """
        try:
            return self.job(name)
        except BadInput as error:
            ended = self._ask("ended", job=name)
            if ended is None:
                lately = ", ".join(self.ended_lately()) or "none"
                raise BadInput(f"{error}; ended and still on record: {lately}") from None
            return ended

    def ended_lately(self) -> list[str]:
        """Return the names of the jobs that ended last and are still on record, the newest first; at most ten."""
        return self._ask("ended")

    def change(self, job: str, *, transport: str | None, priority: float | None) -> dict[str, Any]:
        """Change a job while it runs; return its status.

        Raises:
            BadInput: there is no such job, or a value is wrong.
            JobRejected: the demand cannot be met; nothing changed.
        """
        self.job(job)
        reply = self._ask("change", job=job, transport=transport, priority=priority)
        if reply["error"]:
            raise BadInput(reply["error"])
        if reply["refused"]:
            raise mission_control.JobRejected(f"job {job}: {reply['refused']}")
        return self.job(job)
