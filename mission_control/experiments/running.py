"""A point of jobs: runs them in threads on a cluster of one of the worlds, and collects the cluster's records."""

from __future__ import annotations

import json
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mission_control import interrupts
from mission_control.experiments import observed
from mission_control.experiments.points import Conditions, Measuring, Planned, Watch
from mission_control.experiments.result import Point
from mission_control.jobs import JobRejected
from mission_control.records import records_since
from mission_control.scenario import Scenario, not_in_force
from mission_control.worlds import READS, WORLDS
from mission_control.worlds.site import Site

if TYPE_CHECKING:
    from distributed import Client

WATCH_EVERY_S = 0.25
SETTLE_S = 0.6
"""Seconds to wait after the last byte for the workers' last reports (sent every 250 ms)."""
ENDS_S = 10.0
"""Seconds for interrupted jobs to end; those that still compute are abandoned."""
CLOSE_S = 2
"""Seconds for a client to close; one that has lost its cluster may be unable to."""
ALL_SEEN = 1 << 62
"""A number of records that no cluster has: a request with it only returns the number."""
RECORDS = "records.jsonl"


class Running(ABC):
    """The jobs of a point while they run: the interface of each way to run them, and what all ways share.

    Args:
        data: folder for input and output of the jobs.
    """

    names: list[str]
    """Names of the jobs."""

    def __init__(self, scenario: Scenario, site: Site, data: Path):
        self.scenario, self.site = scenario, site
        self.clients: list[Client] = []
        self.admitted: dict[str, str] = {}
        """For each job's name, the name under which the cluster admitted it."""
        self.checks: dict[str, bool] = {}
        self.errors: dict[str, str] = {}
        self.refusal: JobRejected | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def work(self) -> list[Callable[[], None]]:
        """Return the functions that run the jobs, each in a thread."""

    @abstractmethod
    def release(self) -> None:
        """Cancel what threads wait for, so that they stop."""

    @abstractmethod
    def in_words(self) -> str:
        """The progress in words."""

    @abstractmethod
    def found(self, records: list[dict[str, Any]], status: dict[str, Any]) -> dict[str, Any]:
        """Return the point's fields about its jobs."""

    def go(self, each: Callable[[], None]) -> None:
        """Run all jobs to completion; call ``each`` meanwhile."""
        # Daemon threads: a computation that continues after an interrupt does not delay the process's exit.
        self._threads = [threading.Thread(target=one, daemon=True) for one in self.work()]
        for thread in self._threads:
            thread.start()
        while running := [thread for thread in self._threads if thread.is_alive()]:
            running[0].join(WATCH_EVERY_S)
            interrupts.check()
            each()

    def cancel(self) -> None:
        """End the jobs: closing their clients cancels what they wait for on the cluster."""
        self._stop.set()
        self.release()
        self.close()
        deadline = time.monotonic() + ENDS_S
        for thread in (one for one in self._threads if one.ident is not None):
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        for client in self.clients:
            with suppress(Exception):
                client.close(timeout=CLOSE_S)


@contextmanager
def opened(world: str, whole: Scenario, conditions: Conditions) -> Iterator[Measuring]:
    """A cluster on which points of jobs are measured; see ``Settings.opened``."""
    with WORLDS[world](whole, conditions.scheduler, install_policy=conditions.install_policy) as site:

        def measure(one: Planned, folder: Path, watch: Watch) -> Point:
            # The folder's name contains the run's, which is unique.
            data = Path(conditions.data, "-".join(folder.absolute().parts[-4:])) if conditions.data else folder / "data"
            shutil.rmtree(data, ignore_errors=True)  # left by an interrupted attempt
            try:
                return measured(one, site, folder, data.absolute(), watch)
            finally:
                if not conditions.keep_data:
                    shutil.rmtree(data, ignore_errors=True)

        yield measure


def measured(one: Planned, site: Site, folder: Path, data: Path, watch: Watch) -> Point:
    """Run the jobs of a point, and write their records.

    Raises:
        JobRejected: a job's demand cannot be met; no byte has moved.
        BadInput: the workload's input is malformed.
    """
    interrupted, workload = False, one.scenario.workload
    running: Running = workload.running(one.scenario, site, data)
    watching = site.connect()
    running.clients.append(watching)
    watcher = Watcher(watching, running)
    try:
        running.go(lambda: watch(running.in_words(), watcher.look()))
        time.sleep(SETTLE_S)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        status, records = watcher.look(), watcher.own()
        if interrupted:
            running.cancel()
        running.close()
    seen = site.stop_and_summarize()
    (folder / RECORDS).write_text("".join(json.dumps(record) + "\n" for record in records))
    if running.refusal is not None:
        raise running.refusal
    found = running.found(records, status)
    found |= {"checks": running.checks, "errors": running.errors, "interrupted": interrupted}
    found["notes"] = [*site.notes, *not_in_force(one.scenario, one.world, READS[one.world])]
    point: Point = one.point(**found, **seen, policy=site.policy or one.scenario.control.policy)
    if site.policy and status.get("policy", site.policy) != site.policy:
        point.valid = False
        point.invalid_because.append(f"policy {status['policy']} took the place of {site.policy} meanwhile")
    if watcher.missed:
        point.valid = False
        point.invalid_because.append(f"the scheduler had dropped {watcher.missed} records before they were collected")
    workload.found(point, running, one.scenario)
    expect(one.scenario, point)
    return point


def expect(scenario: Scenario, point: Point) -> None:
    """Check the point against the scenario's expectations."""
    expected = scenario.expect
    for condition in expected.condition:
        # Without its condition (drops, marks) the run does not test its subject.
        if point.ports and not sum(port[condition] for port in point.ports):
            point.valid = False
            point.invalid_because.append(f"no {condition} at any port, but the run tests them")
    if expected.refetches_max is not None:
        refetches = sum(transfer.refetches for job in point.jobs for transfer in job.transfers)
        point.expectations[f"refetches at most {expected.refetches_max}"] = refetches <= expected.refetches_max
    if expected.recomputed_max is not None:
        recomputed = sum(job.recomputed for job in point.jobs)
        point.expectations[f"recomputed at most {expected.recomputed_max}"] = recomputed <= expected.recomputed_max


class Watcher:
    """Collects the Mission Controller's records of these jobs; skips earlier records and those of other jobs."""

    def __init__(self, client: Client, running: Running):
        self.client, self.running = client, running
        self.records: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.missed = 0
        """Records that the scheduler dropped between two requests: it keeps a bounded number."""
        self.seen, _ = records_since(client, ALL_SEEN)

    def look(self) -> dict[str, Any]:
        """The cluster's status, reduced to these jobs."""
        try:
            status = self.client.sync(self.client.scheduler.mission_control_status)
            seen, new = records_since(self.client, self.seen)
        except (OSError, RuntimeError):
            return self.status  # the scheduler is unreachable or busy; the next request returns the same records
        self.missed += max(0, seen - self.seen - len(new))
        self.seen, names = seen, set(self.running.admitted.values())
        # Until all jobs are admitted a record may belong to one whose name is not known yet.
        self.records += observed.of_jobs(new, names) if len(names) == len(self.running.names) else new
        self.status = {**status, "jobs": [job for job in status["jobs"] if job["job"] in names]}
        return self.status

    def own(self) -> list[dict[str, Any]]:
        """The records of these jobs."""
        return observed.of_jobs(self.records, set(self.running.admitted.values()))
