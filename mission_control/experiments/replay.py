"""Hundreds of jobs, each started at its time, from a bounded number of threads that share one client.

The job of a task comes from a context variable (`dask.annotate`), of which each thread has its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mission_control
from mission_control.experiments import observed
from mission_control.experiments.result import JobResult
from mission_control.experiments.running import Running
from mission_control.scenario import Scenario
from mission_control.traces.describe import quantiles
from mission_control.traces.scale import ScaledJob, distortion
from mission_control.traces.swim import QUANTITIES
from mission_control.workers import workers_of
from mission_control.workloads.replay import LATE_S, ReplayedJob
from mission_control.worlds.site import Site

SHOWN = 4
"""Most running jobs that the progress names."""


class Replay(Running):
    """The jobs of a trace during their replay."""

    def __init__(self, scenario: Scenario, site: Site, data: Path):
        super().__init__(scenario, site, data)
        workload: Any = scenario.workload
        self.client = site.connect()
        self.clients = [self.client]
        self.homes = sorted(workers_of(self.client))
        self.jobs: list[ScaledJob] = workload.scaled(len(self.homes))
        self.distortion = distortion(self.jobs, workload.factor(len(self.homes)), workload.job_limit)
        self.names = [job.name for job in self.jobs]
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.failed: dict[str, float] = {}
        """Times of jobs that ended with an error."""
        self.held: dict[str, dict[str, bool]] = {}
        self._began = 0.0
        self._next = iter(enumerate(self.jobs))
        self._lock = threading.Lock()
        self._places = threading.Semaphore(workload.at_once)

    def work(self) -> list[Callable[[], None]]:
        workload: Any = self.scenario.workload
        self.site.begin()
        self._began = time.monotonic()
        # An equal number of threads checks ended jobs, so that a due job does not wait for a check.
        return [self._several] * min(2 * workload.at_once, len(self.jobs))

    def release(self) -> None:
        self._places.release(max(1, len(self._threads)))

    def in_words(self) -> str:
        under_way = sorted(set(self.started) - set(self.ended) - set(self.errors))
        named = ", ".join(under_way[:SHOWN]) + (", ..." if len(under_way) > SHOWN else "")
        return (
            f"{len(self.ended)} of {len(self.jobs)} jobs done; {len(under_way)} under way{': ' if named else ''}{named}"
        )

    def _several(self) -> None:
        """Take the next job, wait for its time, and run it, until there are no more."""
        while True:
            with self._lock:
                number, job = next(self._next, (0, None))
            if job is None or self._stop.wait(max(0.0, self._began + job.submit_s - time.monotonic())):
                return
            self._one(number, job)

    def _one(self, number: int, job: ScaledJob) -> None:
        control, workload = self.scenario.control, self.scenario.workload
        settings: Any = workload
        demands: dict[str, Any] = {"encrypt": control.encrypt, "transport": control.transport}
        try:
            work = ReplayedJob(job, number, settings.block, settings.seed, self.homes)
            with self._places:
                if self._stop.is_set():
                    return
                self.started[job.name] = time.monotonic() - self._began
                with mission_control.job(job.name, client=self.client, **demands) as admitted:
                    self.admitted[job.name] = admitted
                    work.run(self.client)
                    ended = time.monotonic() - self._began
            self.ended[job.name] = ended
            self.held[job.name] = work.check(self.client)
        except mission_control.JobRejected as refusal:
            self.refusal = refusal
            self._stop.set()
        except BaseException as error:  # CancelledError of a client that was closed is none of Exception
            if not self._stop.is_set():
                self.errors[job.name] = f"{type(error).__name__}: {error}"
                self.failed[job.name] = time.monotonic() - self._began

    def found(self, records: list[dict[str, Any]], status: dict[str, Any]) -> dict[str, Any]:
        self.judge()
        return {**self.summary(), "jobs": self.results(records, status)}

    def judge(self) -> None:
        """Record the checks of all jobs together; name failed ones."""
        self.checks["every job ended"] = len(self.ended) == len(self.jobs)
        for what in ("input", "shuffle", "output"):
            wrong = [name for name, held in self.held.items() if not held[what]]
            words = f"{what} of every job" + (f": not of {', '.join(wrong[:SHOWN])}" if wrong else "")
            self.checks[words] = not wrong and bool(self.held)

    def summary(self) -> dict[str, Any]:
        """The fields of a point that only a replay has, beside its jobs."""
        due = {job.name: job.submit_s for job in self.jobs}
        late = [max(0.0, began - due[name]) for name, began in self.started.items()]
        return {
            "seconds": max(self.ended.values(), default=None),
            "job_time_s": quantiles([ended - due[name] for name, ended in self.ended.items()]),
            "late_s": quantiles(late),
            "late": sum(one > LATE_S for one in late),
            "under_way_max": max((count for _, count in under_way(self.started, self.failed | self.ended)), default=0),
            "distortion": self.distortion,
        }

    def results(self, records: list[dict[str, Any]], status: dict[str, Any]) -> list[JobResult]:
        """Return each job that began, with its transfers."""
        known = {one["job"]: one for one in status.get("jobs", ())}
        known |= {record["job"]: record for record in records if record["kind"] == "job-ended"}
        fair, recomputed = observed.fairness(records), [one["job"] for one in records if one["kind"] == "recomputed"]
        found = []
        for job in (job for job in self.jobs if job.name in self.started):
            own, ended = self.admitted.get(job.name), self.ended.get(job.name)
            entries = [one for one in known.get(own, {}).get("transfers", ()) if one["asked_bytes"]]
            unknown: dict[str, Any] = {"weight": None, "flows": None, "share": None}
            transfers = [
                observed.transfer_of(one, {**unknown, "fairness": fair.get((own or "", one["from"], one["to"]))})
                for one in entries
            ]
            times = {"submitted_s": job.submit_s, "started_s": self.started[job.name], "ended_s": ended}
            sizes = {name.removesuffix("_bytes"): getattr(job.before, name) for name in QUANTITIES}
            found.append(
                JobResult(
                    name=job.name,
                    admitted=own,
                    **unknown,
                    **times,
                    seconds=None if ended is None else ended - job.submit_s,
                    phases={},
                    recomputed=recomputed.count(own),
                    transfers=transfers,
                    bytes=job.bytes,
                    trace_bytes=sizes,
                )
            )
        return found


def under_way(started: dict[str, float], ended: dict[str, float]) -> list[tuple[float, int]]:
    """Return the number of running jobs over time: seconds, and the number from then on."""
    changes = sorted([(at, 1) for at in started.values()] + [(at, -1) for at in ended.values()])
    found, count = [], 0
    for at, change in changes:
        count += change
        found.append((at, count))
    return found
