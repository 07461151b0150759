"""A point of jobs: each job in a thread of its own, with a client of its own, on a cluster of one of the worlds."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import mission_control
from mission_control import interrupts
from mission_control.experiments import observed
from mission_control.experiments.points import Conditions, Measuring, Planned, Watch
from mission_control.experiments.result import Point
from mission_control.scenario import Scenario, not_in_force
from mission_control.worlds import READS, WORLDS
from mission_control.worlds.site import Site

if TYPE_CHECKING:
    from distributed import Client

WATCH_EVERY_S = 0.25
SETTLE_S = 0.6
"""After the last byte, for the workers' last reports (they come every 250 ms)."""
ENDS_S = 10.0
"""In which jobs that were interrupted may end; what still computes then is left behind."""
ALL_SEEN = 1 << 62
"""More records than there are: asks for their number alone."""
RECORDS = "records.jsonl"


@contextmanager
def opened(world: str, whole: Scenario, conditions: Conditions) -> Iterator[Measuring]:
    """A cluster on which points of jobs are measured; see ``Settings.opened``."""
    with WORLDS[world](whole, conditions.scheduler, install_policy=conditions.install_policy) as site:

        def measure(one: Planned, folder: Path, watch: Watch) -> Point:
            # By a name with the run's own, which no other run has.
            data = Path(conditions.data, "-".join(folder.absolute().parts[-4:])) if conditions.data else folder / "data"
            shutil.rmtree(data, ignore_errors=True)  # of an attempt that was cut off
            try:
                return measured(one, site, folder, data.absolute(), watch)
            finally:
                if not conditions.keep_data:
                    shutil.rmtree(data, ignore_errors=True)

        yield measure


def measured(one: Planned, site: Site, folder: Path, data: Path, watch: Watch) -> Point:
    """Run the jobs of a point; leave their records.

    Raises:
        JobRejected: a job demands what cannot be had; no byte has moved.
    """
    interrupted, control = False, one.scenario.control
    with site.connect() as watching:
        jobs = Jobs(one.scenario, data, site)
        watcher = Watcher(watching, jobs)
        try:
            jobs.go(lambda: watch("; ".join(f"{job}: {step}" for job, step in jobs.steps.items()), watcher.look()))
        except KeyboardInterrupt:
            interrupted = True
            jobs.cancel()
        finally:
            if not interrupted:
                time.sleep(SETTLE_S)
            status, records = watcher.look(), watcher.own()
            jobs.close()
    seen = site.stop_and_summarize()
    (folder / RECORDS).write_text("".join(json.dumps(record) + "\n" for record in records))
    if jobs.refusal is not None:
        raise jobs.refusal
    notes = [*site.notes, *not_in_force(one.scenario, one.world, READS[one.world])]
    found = {"checks": jobs.checks, "errors": jobs.errors, "interrupted": interrupted, "notes": notes, **seen}
    point: Point = one.point(
        **found,
        jobs=observed.jobs_of(records, status, jobs.admitted, jobs.seconds),
        seconds=jobs.ended - jobs.started if jobs.ended and jobs.started else None,
        policy=site.policy or control.policy,
    )
    if site.policy and status.get("policy", site.policy) != site.policy:
        point.valid = False
        point.invalid_because.append(f"policy {status['policy']} took the place of {site.policy} meanwhile")
    workload: Any = one.scenario.workload
    workload.found(point, jobs.work, one.scenario)
    expect(one.scenario, point)
    return point


def expect(scenario: Scenario, point: Point) -> None:
    """Hold the point against the scenario's expectations."""
    expected = scenario.expect
    for condition in expected.condition:
        # What the run is about must have happened in it, or it says nothing.
        if point.ports and not sum(port[condition] for port in point.ports):
            point.valid = False
            point.invalid_because.append(f"no {condition} at any port, and the run is about them")
    if expected.refetches_max is not None:
        refetches = sum(transfer.refetches for job in point.jobs for transfer in job.transfers)
        point.expectations[f"refetches at most {expected.refetches_max}"] = refetches <= expected.refetches_max
    if expected.recomputed_max is not None:
        recomputed = sum(job.recomputed for job in point.jobs)
        point.expectations[f"recomputed at most {expected.recomputed_max}"] = recomputed <= expected.recomputed_max


class Jobs:
    """The jobs of a point."""

    def __init__(self, scenario: Scenario, data: Path, site: Site):
        self.scenario, self.site = scenario, site
        workload: Any = scenario.workload
        many = workload.jobs > 1
        self.names = [f"{workload.kind}-{number + 1}" if many else workload.kind for number in range(workload.jobs)]
        self.priorities = scenario.control.priorities or (1.0,) * workload.jobs
        self.clients = [site.connect() for _ in self.names]
        workers = len(self.clients[0].scheduler_info(n_workers=-1)["workers"])
        self.work = [workload.of_job(at).make(at, data / name, workers) for at, name in enumerate(self.names)]
        # A name is free for others once its job is over, while its last totals still come: others' would be added.
        end = f"-{secrets.token_hex(3)}" if site.shared else ""
        self.asked = [name + end for name in self.names]
        self.steps: dict[str, str] = {}
        self.admitted: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.checks: dict[str, bool] = {}
        self.errors: dict[str, str] = {}
        self.refusal: mission_control.JobRejected | None = None
        self.started: float | None = None
        self.ended: float | None = None
        self._barrier = threading.Barrier(workload.jobs, action=self._start)
        self._stop = False
        self._threads: list[threading.Thread] = []

    def go(self, each: Callable[[], None]) -> None:
        """Run all jobs to their ends; call ``each`` meanwhile."""
        # Daemons: one that computes when an interrupt comes does not hold the process back.
        self._threads = [threading.Thread(target=self._one, args=(at,), daemon=True) for at in range(len(self.names))]
        for thread in self._threads:
            thread.start()
        while running := [thread for thread in self._threads if thread.is_alive()]:
            running[0].join(WATCH_EVERY_S)
            interrupts.check()
            each()

    def cancel(self) -> None:
        """End the jobs: what they wait for on the cluster is cancelled with their clients."""
        self._stop = True
        self._barrier.abort()
        self.close()
        deadline = time.monotonic() + ENDS_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        for client in self.clients:
            client.close(timeout=2)

    def _start(self) -> None:
        self.site.begin()
        self.started = time.time()

    def _one(self, number: int) -> None:
        name, work, client = self.names[number], self.work[number], self.clients[number]

        def say(text: str) -> None:
            self.steps[name] = text

        control = self.scenario.control
        demands: dict[str, Any] = {"encrypt": control.encrypt, "transport": control.transport}
        demands["priority"] = self.priorities[number]
        try:
            # Refused before anything moves, the input included.
            with mission_control.job(self.asked[number], client=client, **demands):
                pass
            work.prepare(client, say)
            self._barrier.wait()
            with mission_control.job(self.asked[number], client=client, **demands) as admitted:
                self.admitted[name] = admitted
                began = time.time()
                work.run(client, say)
                self.ended = time.time()
                self.seconds[name] = self.ended - began
            checks = work.check(client, say)
            prefix = f"{name}: " if len(self.names) > 1 else ""
            self.checks.update({prefix + check: held for check, held in checks.items()})
            say("done")
        except mission_control.JobRejected as refusal:
            self.refusal = refusal
            self._barrier.abort()
        except threading.BrokenBarrierError:
            pass  # another job's failure, which that job records
        except Exception as error:
            if not self._stop:
                self._barrier.abort()
                self.errors[name] = f"{type(error).__name__}: {error}"
                say(f"failed: {error}")


class Admitting(Protocol):
    """Jobs that are admitted one after another."""

    names: list[str]
    admitted: dict[str, str]
    """By each job's name the one under which the cluster admitted it."""


class Watcher:
    """Collects the Mission Controller's records of these jobs; what came before is passed over, and so are others'."""

    def __init__(self, client: Client, jobs: Admitting):
        self.client, self.jobs = client, jobs
        self.records: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.seen, _ = client.sync(client.scheduler.mission_control_since, seen=ALL_SEEN)

    def look(self) -> dict[str, Any]:
        """The cluster's status, of these jobs alone."""
        try:
            status = self.client.sync(self.client.scheduler.mission_control_status)
            self.seen, new = self.client.sync(self.client.scheduler.mission_control_since, seen=self.seen)
        except (OSError, RuntimeError):
            return self.status  # the scheduler is away or busy; the next look gets what it knows
        names = set(self.jobs.admitted.values())
        # Until all are admitted a record may be of one whose name is not known yet.
        self.records += observed.of_jobs(new, names) if len(names) == len(self.jobs.names) else new
        self.status = {**status, "jobs": [job for job in status["jobs"] if job["job"] in names]}
        return self.status

    def own(self) -> list[dict[str, Any]]:
        """The records of these jobs."""
        return observed.of_jobs(self.records, set(self.jobs.admitted.values()))
