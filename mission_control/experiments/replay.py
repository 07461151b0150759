"""A point of a replay: hundreds of jobs, each at its time, from a bounded number of threads that share one client.

What says to which job a task belongs lies in a context variable (`dask.annotate`), and each thread has its own.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mission_control
from mission_control import interrupts
from mission_control.experiments import observed
from mission_control.experiments.jobs import ENDS_S, RECORDS, SETTLE_S, WATCH_EVERY_S, Watcher, expect
from mission_control.experiments.points import Conditions, Measuring, Planned, Watch
from mission_control.experiments.result import JobResult, Point
from mission_control.scenario import Scenario, not_in_force
from mission_control.traces.describe import quantiles
from mission_control.traces.scale import ScaledJob, distortion
from mission_control.traces.swim import QUANTITIES
from mission_control.workloads.replay import LATE_S, ReplayedJob
from mission_control.worlds import READS, WORLDS
from mission_control.worlds.site import Site

if TYPE_CHECKING:
    from distributed import Client

CLOSE_S = 2
SHOWN = 4
"""Jobs that are named while they are under way."""


@contextmanager
def opened(world: str, whole: Scenario, conditions: Conditions) -> Iterator[Measuring]:
    """A cluster on which a trace is replayed; see ``Settings.opened``."""
    workload: Any = whole.workload
    workload.scaled(whole.topology.hosts)  # a malformed trace is refused before a cluster is made
    with WORLDS[world](whole, conditions.scheduler, install_policy=conditions.install_policy) as site:
        yield lambda one, folder, watch: measured(one, site, folder, watch)


def measured(one: Planned, site: Site, folder: Path, watch: Watch) -> Point:
    """Replay the trace of a point; leave the records of its jobs.

    Raises:
        JobRejected: jobs demand what cannot be had; no byte has moved.
        BadInput: the trace is malformed.
    """
    interrupted, control = False, one.scenario.control
    with connected(site) as watching, connected(site) as client:
        replay = Replay(one.scenario, site, client)
        watcher = Watcher(watching, replay)
        try:
            replay.go(lambda: watch(replay.in_words(), watcher.look()))
        except KeyboardInterrupt:
            interrupted = True
            replay.cancel()
        else:
            time.sleep(SETTLE_S)
        status, records = watcher.look(), watcher.own()
    seen = site.stop_and_summarize()
    (folder / RECORDS).write_text("".join(json.dumps(record) + "\n" for record in records))
    if replay.refusal is not None:
        raise replay.refusal
    notes = [*site.notes, *not_in_force(one.scenario, one.world, READS[one.world])]
    found = {"checks": replay.checks(), "errors": replay.errors, "interrupted": interrupted, "notes": notes, **seen}
    point: Point = one.point(
        **found,
        **replay.summary(),
        jobs=replay.results(records, status),
        policy=site.policy or control.policy,
    )
    expect(one.scenario, point)
    return point


@contextmanager
def connected(site: Site) -> Iterator[Client]:
    """A client of the cluster. One that has lost it may not be able to close either; what it had is known by then."""
    client = site.connect()
    try:
        yield client
    finally:
        with suppress(Exception):
            client.close(timeout=CLOSE_S)


class Replay:
    """The jobs of a trace, while they are replayed.

    Args:
        client: shared by all jobs.
    """

    def __init__(self, scenario: Scenario, site: Site, client: Client):
        workload: Any = scenario.workload
        self.scenario, self.site, self.client = scenario, site, client
        self.homes = sorted(client.scheduler_info(n_workers=-1)["workers"])
        self.jobs: list[ScaledJob] = workload.scaled(len(self.homes))
        self.distortion = distortion(self.jobs, workload.factor(len(self.homes)), workload.job_limit)
        # A name is free for others once its job is over, while its last totals still come: others' would be added.
        self.end = f"-{secrets.token_hex(3)}" if site.shared else ""
        self.names = [job.name for job in self.jobs]
        self.admitted: dict[str, str] = {}
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.held: dict[str, dict[str, bool]] = {}
        self.errors: dict[str, str] = {}
        self.refusal: mission_control.JobRejected | None = None
        self._began = 0.0
        self._next = iter(enumerate(self.jobs))
        self._lock = threading.Lock()
        self._places = threading.Semaphore(workload.at_once)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def go(self, each: Callable[[], None]) -> None:
        """Replay all jobs to their ends; call ``each`` meanwhile."""
        workload: Any = self.scenario.workload
        # As many again compare what has ended: a job that is due does not wait for that.
        count = min(2 * workload.at_once, len(self.jobs))
        # Daemons: one that computes when an interrupt comes does not hold the process back.
        self._threads = [threading.Thread(target=self._several, daemon=True) for _ in range(count)]
        self.site.begin()
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        while running := [thread for thread in self._threads if thread.is_alive()]:
            running[0].join(WATCH_EVERY_S)
            interrupts.check()
            each()

    def cancel(self) -> None:
        """End the jobs: what they wait for on the cluster is cancelled with their client."""
        self._stop.set()
        self._places.release(len(self._threads))
        with suppress(Exception):
            self.client.close(timeout=CLOSE_S)
        deadline = time.monotonic() + ENDS_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def in_words(self) -> str:
        """How far it is."""
        under_way = sorted(set(self.started) - set(self.ended) - set(self.errors))
        named = ", ".join(under_way[:SHOWN]) + (", ..." if len(under_way) > SHOWN else "")
        return (
            f"{len(self.ended)} of {len(self.jobs)} jobs done; {len(under_way)} under way{': ' if named else ''}{named}"
        )

    def _several(self) -> None:
        """Take the next job, wait for its time, run it; until there are no more."""
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
                with mission_control.job(job.name + self.end, client=self.client, **demands) as admitted:
                    self.admitted[job.name] = admitted
                    work.run(self.client)
                    ended = time.monotonic() - self._began
            self.held[job.name] = work.check(self.client)
            self.ended[job.name] = ended
        except mission_control.JobRejected as refusal:
            self.refusal = refusal
            self._stop.set()
        except BaseException as error:  # CancelledError of a client that was closed is none of Exception
            if not self._stop.is_set():
                self.errors[job.name] = f"{type(error).__name__}: {error}"

    def checks(self) -> dict[str, bool]:
        """Of all jobs together; a wrong one is named."""
        found = {"every job ended": len(self.ended) == len(self.jobs)}
        for what in ("input", "shuffle", "output"):
            wrong = [name for name, held in self.held.items() if not held[what]]
            words = f"{what} of every job" + (f": not of {', '.join(wrong[:SHOWN])}" if wrong else "")
            found[words] = not wrong and bool(self.held)
        return found

    def summary(self) -> dict[str, Any]:
        """What a point has of a replay, beside its jobs."""
        due = {job.name: job.submit_s for job in self.jobs}
        late = [max(0.0, began - due[name]) for name, began in self.started.items()]
        return {
            "seconds": max(self.ended.values(), default=None),
            "job_time_s": quantiles([ended - due[name] for name, ended in self.ended.items()]),
            "late_s": quantiles(late),
            "late": sum(one > LATE_S for one in late),
            "under_way_max": max((count for _, count in under_way(self.started, self.ended)), default=0),
            "distortion": self.distortion,
        }

    def results(self, records: list[dict[str, Any]], status: dict[str, Any]) -> list[JobResult]:
        """Each job that began, with its transfers."""
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
    """How many jobs had begun and not ended: seconds, and from then on how many."""
    changes = sorted([(at, 1) for at in started.values()] + [(at, -1) for at in ended.values()])
    found, count = [], 0
    for at, change in changes:
        count += change
        found.append((at, count))
    return found
