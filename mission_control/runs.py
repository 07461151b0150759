"""Runs a scenario in a world and leaves `results/<id>/`: scenario, environment, records, result, report."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

import mission_control
from mission_control import interrupts, report
from mission_control.environment import describe
from mission_control.map_reduce.phases import PHASES
from mission_control.scenario import Scenario, plain
from mission_control.workloads import WORKLOADS
from mission_control.worlds import WORLDS
from mission_control.worlds.site import Site

if TYPE_CHECKING:
    from distributed import Client

WATCH_EVERY_S = 0.25
SETTLE_S = 0.6
"""After the last byte, for the workers' last reports (they come every 250 ms)."""


@dataclass
class Progress:
    """What a run shows while it goes on."""

    steps: dict[str, str] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False


class Observer:
    """Is shown the progress; the default shows nothing."""

    def show(self, progress: Progress) -> None:
        """Called four times a second, and at each step."""


def run(
    scenario: Scenario,
    *,
    world: str = "local",
    scheduler: str | None = None,
    results: Path = Path("results"),
    folder: Path | None = None,
    data: Path | None = None,
    keep_data: bool = False,
    observer: Observer | None = None,
    sites: Sites | None = None,
) -> dict[str, Any]:
    """Runs the scenario; gives the result as docs/results.md describes it.

    Args:
        scheduler: address, for the world `cluster`.
        results: folder in which the run's own folder is made.
        folder: the run's own folder itself.
        data: folder for input and output files, which all workers must see; by default inside the run's folder.
        keep_data: leave them there.
        sites: worlds that are kept from run to run; by default the run has its own.

    Raises:
        JobRejected: a job demands what cannot be had; no byte has moved.
        BadInput: one line that names the mend.
    """
    observer = observer or Observer()
    progress = Progress()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{scenario.workload.kind}-{secrets.token_hex(2)}"
    folder = folder or results / name
    data = data / name if data else folder / "data"
    result: dict[str, Any] = {"ok": False, "world": world, "checks": {}, "jobs": [], "seconds": None}
    records: list[dict[str, Any]] = []
    environment = describe(scenario.workload.seed)
    with ExitStack() as stack:
        sites = sites or stack.enter_context(Sites())
        site = sites.get(world, scenario, scheduler)
        connect = site.connect
        folder.mkdir(parents=True)
        try:
            with connect() as watching:
                jobs = Jobs(scenario, data.absolute(), site, progress)
                watcher = Watcher(watching, records, site)
                if site.seen:
                    watcher.pass_over()
                try:
                    jobs.go(lambda: observer.show(watcher.look(progress)))
                except KeyboardInterrupt:
                    progress.interrupted = True
                    jobs.cancel()
                finally:
                    if not progress.interrupted:
                        time.sleep(SETTLE_S)
                    watcher.look(progress)
                    jobs.close()
            result.update(summary(jobs, progress, records))
            result.update(site.stop_and_summarize())
            require(scenario, result)
            expect(scenario, result)
            result["ok"] = all(result["checks"].values()) and not result["errors"] and not progress.interrupted
        finally:
            if not keep_data:
                shutil.rmtree(data, ignore_errors=True)
            result["environment"] = environment
            result["results"] = str(folder)
            write(folder, scenario, environment, records, result)
    if jobs.refusal is not None:
        raise jobs.refusal
    return result


class Sites:
    """Worlds that are kept for the next run, where it fits into them: starting workers takes longer than most runs."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._key: Any = None
        self._site: Site | None = None

    def __enter__(self) -> Sites:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, world: str, scenario: Scenario, scheduler: str | None) -> Site:
        """The world for this scenario: the last one, or a new one in its place."""
        control = scenario.control
        # All that a world is made of; jobs bring the rest with them.
        made_of = (control.policy, control.flows_per_host, control.encrypt is True, marks_for(scenario))
        key = (world, scheduler, scenario.topology, scenario.stack, made_of)
        if self._site is None or self._key != key or scenario.topology.events:
            self.close()
            self._site = self._stack.enter_context(WORLDS[world](scenario, scheduler))
            self._key = key
        return self._site

    def close(self) -> None:
        self._site = None
        self._stack.close()


def marks_for(scenario: Scenario) -> bool:
    """Whether ports mark because every job demands DCTCP, and not because the scenario says so."""
    return scenario.control.transport == "dctcp" and scenario.topology.port.ecn_threshold is None


class Jobs:
    """The jobs of a run: each in a thread of its own, with a client of its own."""

    def __init__(self, scenario: Scenario, data: Path, site: Site, progress: Progress):
        self.scenario, self.site, self.progress = scenario, site, progress
        workload, control = scenario.workload, scenario.control
        many = workload.jobs > 1
        self.names = [f"{workload.kind}-{number + 1}" if many else workload.kind for number in range(workload.jobs)]
        self.priorities = control.priorities or (1.0,) * workload.jobs
        self.clients = [site.connect() for _ in self.names]
        workers = len(self.clients[0].scheduler_info(n_workers=-1)["workers"])
        make = WORKLOADS[workload.kind]
        sizes = workload.sizes or (workload.size,) * workload.jobs
        own = [workload.model_copy(update={"size": size}) for size in sizes]
        self.work = [make(own[number], number, data / name, workers) for number, name in enumerate(self.names)]
        self.seconds: dict[str, float] = {}
        self.checks: dict[str, bool] = {}
        self.errors: dict[str, str] = {}
        self.refusal: mission_control.JobRejected | None = None
        self.started: float | None = None
        self.ended: float | None = None
        self._barrier = threading.Barrier(workload.jobs, action=self._start)
        self._stop = False

    def go(self, each: Callable[[], None]) -> None:
        """Runs all jobs to their ends; calls ``each`` meanwhile."""
        with ThreadPoolExecutor(len(self.names)) as pool:
            futures = [pool.submit(self._one, number) for number in range(len(self.names))]
            try:
                while wait_for(futures, timeout=WATCH_EVERY_S).not_done:
                    interrupts.check()
                    each()
                each()
            except BaseException:
                self.cancel()
                raise
        for future in futures:
            future.result()

    def cancel(self) -> None:
        """Ends the jobs: what they wait for on the cluster is cancelled with their clients."""
        self._stop = True
        self._barrier.abort()
        for client in self.clients:
            client.close(timeout=2)

    def close(self) -> None:
        for client in self.clients:
            client.close(timeout=2)

    def _start(self) -> None:
        self.site.begin()
        self.started = time.time()

    def _one(self, number: int) -> None:
        name, work, client = self.names[number], self.work[number], self.clients[number]

        def say(text: str) -> None:
            self.progress.steps[name] = text

        control = self.scenario.control
        try:
            # Refused before anything moves, the input included.
            demands: dict[str, Any] = {
                "priority": self.priorities[number],
                "encrypt": control.encrypt,
                "transport": control.transport,
            }
            with mission_control.job(name, client=client, **demands):
                pass
            work.prepare(client, say)
            self._barrier.wait()
            with mission_control.job(name, client=client, **demands):
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
            pass  # another job's failure, told there
        except Exception as error:
            if not self._stop:
                self._barrier.abort()
                self.errors[name] = f"{type(error).__name__}: {error}"
                say(f"failed: {error}")


class Watcher:
    """Looks at the Mission Controller and collects its records."""

    def __init__(self, client: Client, records: list[dict[str, Any]], site: Site):
        self.client, self.records, self.site = client, records, site

    def pass_over(self) -> None:
        """What came after an earlier run's last look is not of this one."""
        self.look(Progress())
        self.records.clear()

    def look(self, progress: Progress) -> Progress:
        try:
            progress.status = self.client.sync(self.client.scheduler.mission_control_status)
            seen = self.site.seen
            self.site.seen, new = self.client.sync(self.client.scheduler.mission_control_since, seen=seen)
            self.records.extend(new)
        except (OSError, RuntimeError):
            pass  # the scheduler is away or busy; what it knows is told the next time
        return progress


def phases_of(records: list[dict[str, Any]], job: str) -> dict[str, float]:
    """Seconds of map, shuffle and reduce of all tasks of a job together; empty if none said so."""
    said = [record for record in records if record["kind"] == "phases" and record["job"] == job]
    return {phase: sum(record.get(phase, 0.0) for record in said) for phase in PHASES} if said else {}


def summary(jobs: Jobs, progress: Progress, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The result as others script against it (docs/results.md)."""
    weights = busiest_weights(records)
    known = [record for record in records if record["kind"] == "job-ended"]
    known += progress.status.get("jobs", [])
    recomputed = [record["job"] for record in records if record["kind"] == "recomputed"]
    fair = fairness(records)
    crossed = parts_of_bytes(records, [(name,) for name in jobs.names])
    crossed |= parts_of_bytes(records, busiest_transfers(records))
    result = []
    for name in jobs.names:
        weight, flows = weights.get((name,), (None, None))
        transfers = [
            (transfer, (name, transfer["from"], transfer["to"]))
            for entry in known
            if entry["job"] == name
            for transfer in entry["transfers"]
            if transfer["asked_bytes"]
        ]
        result.append(
            {
                "name": name,
                "weight": weight,
                "flows": flows,
                "share": crossed.get((name,)),
                "seconds": jobs.seconds.get(name),
                "phases": phases_of(records, name),
                "recomputed": recomputed.count(name),
                "transfers": [
                    {
                        **transfer_summary(entry),
                        "weight": weights.get(key, (None, None))[0],
                        "flows": weights.get(key, (None, None))[1],
                        "share": crossed.get(key),
                        "fairness": fair.get(key),
                    }
                    for entry, key in transfers
                ],
            }
        )
    seconds = jobs.ended - jobs.started if jobs.ended and jobs.started else None
    return {
        "checks": jobs.checks,
        "jobs": result,
        "seconds": seconds,
        "errors": jobs.errors,
        "interrupted": progress.interrupted,
        "policy": jobs.scenario.control.policy,
    }


Key = tuple[str, ...]
"""A job, ``(job,)``; or a transfer, ``(job, from, to)``."""


def busiest_weights(records: list[dict[str, Any]]) -> dict[Key, tuple[float, int]]:
    """Of each job and transfer the weight and the flows that it had while most were active: then shares matter."""
    best: dict[Key, tuple[int, float, int]] = {}
    for record in records:
        if record["kind"] == "decision" and record["command"] == "weights":
            active: dict[Key, list[tuple[float, int]]] = defaultdict(list)
            for own in record["transfers"]:
                active[(own["job"],)].append((own["weight"], own["flows"]))
                active[(own["job"], own["from"], own["to"])].append((own["weight"], own["flows"]))
            for key, owned in active.items():
                if len(record["transfers"]) >= best.get(key, (0, 0.0, 0))[0]:
                    best[key] = (len(record["transfers"]), sum(one[0] for one in owned), sum(one[1] for one in owned))
    return {key: (weight, flows) for key, (_, weight, flows) in best.items()}


def busiest_transfers(records: list[dict[str, Any]]) -> list[Key]:
    """The transfers that were active when most were."""
    most: list[Key] = []
    for record in records:
        if record["kind"] == "decision" and record["command"] == "weights" and len(record["transfers"]) >= len(most):
            most = [(own["job"], own["from"], own["to"]) for own in record["transfers"]]
    return most


def fairness(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """Of each transfer Jain's index of its receivers' rates (Jain, Chiu and Hawe 1984): 1 where all are equal, 1/n
    where one of n gets everything."""
    last: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        if record["kind"] == "progress":
            key = (record["job"], record["from"], record["to"])
            last.setdefault(key, {})[record["worker"]] = record
    found = {}
    for key, workers in last.items():
        # What never left its worker says nothing of the network.
        took = [
            (worker["served_bytes"] - worker["local_bytes"], worker["ended"], worker["started"])
            for worker in workers.values()
        ]
        rates = [moved / (ended - started) for moved, ended, started in took if moved and ended and ended > started]
        if rates:
            found[key] = sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))
    return found


def parts_of_bytes(records: list[dict[str, Any]], keys: Sequence[Key]) -> dict[Key, float]:
    """Of each job, or of each transfer, its part of the bytes that crossed the network to receivers while all of them
    had some under way there; empty where they never had. Shares are made at each receiver, so each is looked at for
    itself."""
    now: dict[tuple[str, ...], int] = {}
    points: dict[str, dict[Key, list[tuple[float, int]]]] = {}
    for record in records:
        if record["kind"] == "progress":
            transfer, worker = (record["job"], record["from"], record["to"]), record["worker"]
            key = next((key for key in keys if transfer[: len(key)] == key), None)
            if key is None:
                continue
            now[(worker, *transfer)] = record["served_bytes"] - record["local_bytes"]
            total = sum(value for own, value in now.items() if own[: len(key) + 1] == (worker, *key))
            if total:
                points.setdefault(worker, {}).setdefault(key, []).append((record["time"], total))
    moved: dict[Key, int] = dict.fromkeys(keys, 0)
    for point in points.values():
        if len(point) == len(keys):
            first = max(path[0][0] for path in point.values())
            last = min(next(at for at, total in path if total == path[-1][1]) for path in point.values())
            for key, path in point.items():
                moved[key] += until(path, last) - until(path, min(first, last))
    total = sum(moved.values())
    return {key: entry / total for key, entry in moved.items()} if total else {}


def until(path: list[tuple[float, int]], end: float) -> int:
    """What had been moved by then."""
    return max((total for at, total in path if at <= end), default=0)


def transfer_summary(transfer: dict[str, Any]) -> dict[str, Any]:
    begun, ended = transfer.get("started"), transfer.get("ended")
    return {
        "from": transfer["from"],
        "to": transfer["to"],
        "pattern": transfer["pattern"],
        "evidence": transfer["evidence"],
        "bytes": transfer["served_bytes"],
        "local_bytes": transfer.get("local_bytes", 0),
        "peer_bytes": transfer.get("peer_bytes", 0),
        "seconds": ended - begun if begun and ended else None,
        "started": begun,
        "flows_peak": transfer.get("flows_peak", 0),
        "refetches": transfer.get("refetches", 0),
        "resumed": transfer.get("resumed", 0),
        "transport": transfer.get("transport"),
    }


def require(scenario: Scenario, result: dict[str, Any]) -> None:
    """What the run is about must have happened in it, or it says nothing."""
    for condition in scenario.expect.condition:
        if "ports" in result and not sum(port[condition] for port in result["ports"]):
            result["valid"] = False
            result["invalid_because"].append(f"no {condition} at any port, and the run is about them")


def expect(scenario: Scenario, result: dict[str, Any]) -> None:
    """Adds the scenario's expectations to the checks."""
    expected = scenario.expect
    refetches = sum(transfer["refetches"] for job in result["jobs"] for transfer in job["transfers"])
    if expected.refetches_max is not None:
        result["checks"][f"refetches at most {expected.refetches_max}"] = refetches <= expected.refetches_max
    if expected.recomputed_max is not None:
        recomputed = sum(job["recomputed"] for job in result["jobs"])
        result["checks"][f"recomputed at most {expected.recomputed_max}"] = recomputed <= expected.recomputed_max


def write(folder: Path, scenario: Scenario, environment: dict, records: list[dict], result: dict) -> None:
    """Leaves the run's files; the report is drawn from the records and nothing else."""
    (folder / "scenario.toml").write_text(tomli_w.dumps(plain(scenario.alone)))
    (folder / "environment.json").write_text(json.dumps(environment, indent=1))
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    with open(folder / "records.jsonl", "w") as file:
        file.write(json.dumps({"number": -1, "kind": "environment", "time": time.time(), **environment}) + "\n")
        for record in records:
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"number": len(records), "kind": "result", "time": time.time(), **result}) + "\n")
    report.write(folder)
