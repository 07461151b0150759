"""The Mission Controller beside Dask's scheduler: hears what the scheduler knows, tells the workers.

Decisions are in `crates/core`; here events are gathered and commands handed on. Uses private parts of `distributed`
(stream handlers, `transitions`, `_task_to_msg`), so its minor version is pinned in pyproject.toml.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import re
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dask
from dask.utils import key_split
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import pickle
from tornado.ioloop import PeriodicCallback

from mission_control import _native
from mission_control.dask import page
from mission_control.dask.holds import Holds
from mission_control.dask.jobs_of_tasks import Jobs
from mission_control.dask.metrics import Metrics
from mission_control.dask.objects_of_keys import Objects
from mission_control.dask.policy import PREFIX, Policy, Runner, load
from mission_control.jobs import ANNOTATION, check

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5
"""After the last task of a job, for its workers' last reports: a worker that does not answer may be gone."""
REGISTERED_WITHIN_S = 30
"""After it joined, a worker that Dask does not know by then is gone."""
OBJECT = re.compile("[0-9a-f]{32}")
"""What :meth:`mission_control.put` calls an object."""
TOLD_TO_ALL = ("shares", "plan", "broadcast", "refuse", "hosts")
"""Commands for every worker."""
PARTS_MAX = 2**32 - 1
"""Parts that an object can have."""
RECORDS_MAX = 200_000
"""Records kept for reports; beyond it the oldest are forgotten."""


class MissionControlScheduler(SchedulerPlugin):
    """Scheduler plug-in.

    Args:
        policy: how jobs share the network; see ``mission weights --help``; or a function, see
            :mod:`mission_control.dask.policy`.
        flows_per_host: receiving slots of every host (paper 001, table 4.4: 10); or ``all``, or ``auto``: each host
            finds by trial how many bring most.
    """

    name = "mission-control"
    idempotent = True

    def __init__(
        self, policy: str | Policy = "performance-centric", flows_per_host: int | str = _native.FLOWS_PER_HOST
    ):
        self.policy = policy
        self.flows_per_host = flows_per_host
        _native.MissionController(name_of(policy), flows_per_host, "{}")  # refuses here, on the client, what is wrong

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.engine_tls = scheduler.address.startswith("tls://")
        environment = {
            "carriers": _native.carriers(),
            "interfaces": 1,
            "link_bits_per_sec": _native.link_rate(),
            "engine_tls": self.engine_tls,
        }
        self.runner: Runner | None = self.runner_of(self.policy)
        self.mission = _native.MissionController(name_of(self.policy), self.flows_per_host, json.dumps(environment))
        self.policy_error: str | None = None
        self.started = time.monotonic()
        self.token = secrets.token_bytes(32)
        self.workers: dict[str, dict[str, Any]] = {}
        # When workers joined that may not be registered: Dask may refuse them, or has removed them meanwhile.
        self.unregistered: dict[str, float] = {}
        # Workers that have no data plane, and why.
        self.without: dict[str, str] = {}
        # What was said to each worker, until the worker has seen it.
        self.outbox = _native.Outbox()
        self.jobs = Jobs()
        # Jobs that are over, and the workers whose last words on them are awaited.
        self.ending: dict[str, set[str]] = {}
        self.objects = Objects()
        # Not told yet, by the worker that they went with.
        self.lost: defaultdict[str, set[str]] = defaultdict(set)
        self.numbers: dict[Any, int] = {}
        self.next_number = itertools.count()
        self.submitted_by: dict[str, Any] = {}
        # Of each task that tasks submitted, the workers on which they ran.
        self.submitted_on: defaultdict[Any, set[str]] = defaultdict(set)
        self.holds = Holds()
        # What each worker says of each transfer, and all of it as one, until one of them says more.
        self.transfers: defaultdict[tuple[str, str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
        self.merged: dict[tuple[str, str, str], dict[str, Any]] = {}
        # When a worker last said something new of each.
        self.moved: dict[tuple[str, str, str], float] = {}
        self.records: deque[dict[str, Any]] = deque(maxlen=RECORDS_MAX)
        self.recomputed: defaultdict[str, int] = defaultdict(int)
        # What somebody changed of a job while it runs; its tasks still carry what they were submitted with.
        self.changed: dict[str, dict[str, Any]] = {}
        # What may fail comes first: without its plug-in the scheduler is to offer none of what follows.
        if hasattr(scheduler, "http_application"):  # not without a dashboard
            page.add_to(scheduler.http_application, self.status)
        self.metrics = Metrics(scheduler.address, scheduler.loop, self.status)
        self.metrics.register()
        handlers = ("secret", "join", "without", "admit", "change", "status", "policy", "since")
        offered = {f"mission_control_{name}": getattr(self, f"on_{name}") for name in handlers}
        # As Dask does with its own: docs/security.md.
        for name in dask.config.get("distributed.scheduler.blocked-handlers", default=[]):
            offered.pop(name, None)
        scheduler.handlers.update(offered)
        for name in ("progress", "task", "again", "stale", "leave", "probed"):
            scheduler.stream_handlers[f"mission-control-{name}"] = guarded(getattr(self, f"on_{name}"))
        self._inherit_jobs(scheduler)
        self._send_jobs(scheduler)
        tick = PeriodicCallback(self.tick, 1000)
        scheduler.periodic_callbacks[self.name] = tick
        tick.start()

    def tick(self) -> None:
        self.event({"event": "tick"})
        for worker, joined_at in list(self.unregistered.items()):
            registered = worker in self.scheduler.workers
            if registered or time.monotonic() - joined_at > REGISTERED_WITHIN_S:
                del self.unregistered[worker]
                if not registered:
                    self.leave(worker)

    # --- what is asked of the plug-in -------------------------------------------------------------------------------

    async def on_secret(self) -> dict[str, Any]:
        """For a worker that sets up its data plane; travels over Dask's own channel, encrypted if that is."""
        return {"token": self.token, "flows_per_host": self.flows_per_host}

    async def on_without(self, worker: str, why: str) -> None:
        """A worker works without a data plane; it may have joined before something failed."""
        logger.warning("worker %s has no data plane: %s", worker, why)
        if worker in self.workers:
            self.leave(worker)
        self.without[worker] = why
        self.unregistered[worker] = time.monotonic()
        self.record("worker-without", worker=worker, why=why)

    async def on_join(
        self, worker: str, host: str, environment: str, address: str, problems: Sequence[str] = ()
    ) -> dict[str, Any]:
        """A worker's data plane is up; gives it all that it must know, and the version as of which that holds."""
        self.workers[worker] = {"host": host, "address": address, "problems": list(problems)}
        self.unregistered[worker] = time.monotonic()
        self.record("worker", worker=worker, host=host, address=address)
        where = {"worker": worker, "host": host, "address": address}
        self.event({"event": "worker-joined", **where, "environment": json.loads(environment)})
        return {"commands": json.loads(self.mission.briefing(worker)), "version": self.outbox.last(worker)}

    async def on_admit(self, spec: dict[str, Any], client: str) -> dict[str, Any]:
        """Whether a job may run, and the name under which it does; it arrives now, and stays at least until left."""
        refused = self.mission.admits(json.dumps(spec)) or self.lacks(spec["demands"])
        job = self.jobs.name(spec["job"], client)
        if refused:
            self.record("refused", job=job, reason=refused)
            self.jobs.release_name(job)
        elif client not in self.scheduler.clients:
            # It went while it asked.
            self.jobs.release_name(job)
        else:
            self.arrive({**spec, "job": job})
            self.jobs.hold(job, client)
        return {"job": job, "refused": refused}

    def lacks(self, demands: dict[str, Any]) -> str | None:
        """Why no worker can do what a job demands of its transfers, if none has a data plane."""
        demanded = demands.get("transport") is not None or demands.get("encrypt", "none") != "none"
        if not demanded or self.workers or not self.without:
            return None
        worker, why = next(iter(self.without.items()))
        return f"no worker has a data plane; of {worker}: {why}"

    def on_leave(self, job: str, client: str) -> None:
        """The client submits no more for this job, and its graphs are read in: the job ends with its last task."""
        if self.jobs.leave(job, client):
            self.end(job)

    async def on_change(self, job: str, transport: str | None, priority: float | None) -> dict[str, Any]:
        """Another transport or priority for a job that runs; its workers hear of it at once."""
        spec = self.jobs.specs.get(job)
        if spec is None:
            return {"error": f"there is no job {job!r} now", "refused": None}
        changed = {**spec, "priority": spec["priority"] if priority is None else priority}
        if transport is not None:
            demands = {"encrypt": "none", **spec["demands"]}
            changed["demands"] = {**demands, "transport": None if transport == "auto" else transport}
        try:
            check(changed)
        except ValueError as error:
            return {"error": str(error), "refused": None}
        refused = self.mission.admits(json.dumps(changed))
        if refused is None:
            self.changed[job] = {name: changed[name] for name in ("priority", "demands")}
            self.arrive(changed)
        return {"error": None, "refused": refused}

    async def on_policy(self, policy: str | bytes) -> dict[str, Any]:
        """Another policy: its name, or a pickled function."""
        wanted = policy if isinstance(policy, str) else pickle.loads(policy)
        before = self.runner
        try:
            self.runner = self.runner_of(wanted)
            self.event({"event": "policy", "policy": name_of(wanted)})
        except ValueError as error:
            self.runner = before
            return {"error": str(error)}
        return {"error": None}

    def runner_of(self, policy: str | Policy) -> Runner | None:
        """What computes a policy of the user's own; ``None`` for those of core."""
        if isinstance(policy, str):
            if not policy.startswith(PREFIX):
                return None
            policy = load(policy.removeprefix(PREFIX))
        runner = Runner(policy, lambda event: self.scheduler.loop.add_callback(self.weighed, runner, event))
        return runner

    def weighed(self, runner: Runner, event: dict[str, Any]) -> None:
        """A policy's answer, unless it was replaced meanwhile."""
        if runner is self.runner:
            self.event(event)

    async def on_status(self, most: int | None = None) -> dict[str, Any]:
        return self.status(most)

    def status(self, most: int | None = None) -> dict[str, Any]:
        """All that can be shown of the cluster now; of the transfers at most so many, those that moved last."""
        jobs, hidden = self.job_status(most=most)
        return {
            "time": time.time(),
            "policy": self.mission.policy,
            "policy_error": self.mission.policy_error,
            "workers": {worker: {**own, "memory": self.memory_of(worker)} for worker, own in self.workers.items()},
            "without": self.without,
            "objects": len(self.objects),
            "graph_tasks": self.mission.tasks,
            "jobs": jobs,
            "hidden": hidden,
        }

    def memory_of(self, worker: str) -> dict[str, int]:
        """Bytes that a worker's data plane uses, by kind, as of its last heartbeat."""
        known = self.scheduler.workers.get(worker)
        return known.metrics.get(self.name, {}) if known is not None else {}

    def job_status(self, only: str | None = None, most: int | None = None) -> tuple[list[dict[str, Any]], int]:
        """What the Mission Controller knows of each job, or of one, with what the workers say of its transfers; and how
        many transfers were left out."""
        jobs = [job for job in json.loads(self.mission.status()) if only in (None, job["job"])]
        hidden = 0
        if most is not None:
            keys = [(job["job"], entry["from"], entry["to"]) for job in jobs for entry in job["transfers"]]
            shown = set(heapq.nlargest(most, keys, key=lambda key: self.moved.get(key, 0)))
            hidden = len(keys) - len(shown)
        for job in jobs:
            job["recomputed"] = self.recomputed.get(job["job"], 0)
            if hidden:
                job["transfers"] = [
                    entry for entry in job["transfers"] if (job["job"], entry["from"], entry["to"]) in shown
                ]
            for transfer in job["transfers"]:
                key = (job["job"], transfer["from"], transfer["to"])
                if key not in self.merged:
                    self.merged[key] = merge(list(self.transfers[key].values()))
                transfer.update(self.merged[key])
        return jobs, hidden

    async def on_since(self, seen: int) -> tuple[int, list[dict[str, Any]]]:
        """Records after the first ``seen`` ones."""
        first = self.records[0]["number"] if self.records else 0
        return (self.records[-1]["number"] + 1 if self.records else seen), list(self.records)[max(0, seen - first) :]

    # --- what workers say -------------------------------------------------------------------------------------------

    def on_progress(
        self,
        worker: str,
        records: list[dict[str, Any]],
        asked: list[dict[str, Any]],
        copied: list[str],
        cpu: float,
        seen: int,
        last_of: str | None = None,
    ) -> None:
        """What a worker's fetches asked for and got since its last word, what it keeps copies of, what it has seen."""
        self.outbox.seen(worker, seen)
        for name in copied:
            if not self.objects.copied(name, worker):
                self.free({worker: [name]})  # it was freed while it was copied
        for event in asked:
            if self.known(event["transfer"]["job"]):
                try:
                    self.event({"event": "asked", **event})
                except ValueError as error:
                    # An error in a stream's handler would end the worker, and this is only for the pattern.
                    logger.warning("what worker %s asked for makes no sense: %s", worker, error)
        for record in records:
            if not self.known(record["job"]):
                continue  # late words on a job that is over would bring it back for ever
            transfer = {"job": record["job"], "from": record["from"], "to": record["to"]}
            key = (record["job"], record["from"], record["to"])
            if self.transfers[key].get(worker) == record:
                continue
            self.transfers[key][worker] = record
            self.merged.pop(key, None)
            self.moved[key] = time.monotonic()
            totals = {"asked_bytes": record["asked_bytes"], "served_bytes": record["served_bytes"]}
            more = {name: record[name] for name in ("moved", "waits_for")}
            self.event({"event": "progress", "worker": worker, "transfer": transfer, **totals, **more})
            more = {name: record[name] for name in ("local_bytes", "flows", "started", "ended")}
            self.record("progress", worker=worker, cpu=cpu, **transfer, **totals, **more)
        if last_of in self.ending:
            self.ending[last_of].discard(worker)
            if not self.ending[last_of]:
                self.finish(last_of)

    def on_again(self, worker: str, after: int) -> None:
        """A worker missed something: it is said again, with all that came after it."""
        logger.info("worker %s missed what was said after version %d", worker, after)
        for version, message in self.outbox.after(worker, after):
            self.send(worker, version, message)

    def on_probed(self, worker: str, seen: dict[str, Any]) -> None:
        """What a worker learnt of ECN marks."""
        self.record("ecn-probed", worker=worker, **seen)
        self.event({"event": "ecn-probed", "worker": worker, "seen": seen})

    def known(self, job: str) -> bool:
        return job in self.jobs.specs or job in self.ending

    def on_task(self, worker: str, key: Any, carries: list[tuple[str, str, int]]) -> None:
        """A task's result carries references; said before the scheduler hears that the task is done."""
        for name, owner, parts in carries:
            # A task may return a reference that somebody made up.
            if not (isinstance(name, str) and isinstance(owner, str) and OBJECT.fullmatch(name)):
                continue
            if key in self.numbers and isinstance(parts, int) and 0 < parts <= PARTS_MAX:
                self.mission.put(self.numbers[key], parts)
            self.objects.carry(key, name, owner)
            if owner not in self.scheduler.workers:
                self.lose(owner, [name])
        task = self.scheduler.tasks.get(key)
        if task is None or task.state in ("released", "forgotten", "erred"):
            self.free(self.objects.release(key))

    def on_stale(self, worker: str, keys: list[Any]) -> None:
        """A worker's copies of these results carry lost objects.

        It says so in order with what it holds: a key that it holds no longer was recomputed after it spoke.
        """
        holder = self.scheduler.workers.get(worker)
        held = holder.has_what if holder is not None else ()
        self.recompute(key for key in keys if self.scheduler.tasks.get(key) in held)

    # --- what the scheduler does ------------------------------------------------------------------------------------

    def update_graph(
        self, scheduler: Scheduler, *, client: str, tasks: list[Any], annotations: dict, stimulus_id: str, **_: Any
    ) -> None:
        """New tasks: to which job they belong, and what the graph tells of its patterns."""
        submitter = self.submitted_by.pop(stimulus_id, None)
        parent = self.jobs.of.get(submitter)
        specs, spans = annotations.get(ANNOTATION, {}), annotations.get("span", {})
        submitting = scheduler.tasks.get(submitter)
        if submitting is not None and submitting.processing_on is not None:
            for key in tasks:
                self.submitted_on[key].add(submitting.processing_on.address)
        new = [scheduler.tasks[key] for key in tasks if key not in self.jobs.of and key in scheduler.tasks]
        for task in new:
            spec = specs.get(task.key)
            if spec is None and parent is not None:
                spec = self.jobs.specs[parent]
            if spec is None:
                span = (spans.get(task.key) or {}).get("name") or ()
                name = span[0] if span and span[0] != "default" else client
                spec = {"job": self.jobs.name(name, client), "priority": 1.0, "demands": {}, "machines": 0}
            self.arrive(spec)
            # Runs before the transitions, so `_send_jobs` finds it when a task goes to its worker.
            self.jobs.add(task.key, spec)
        self.learn(new)

    def learn(self, new: list[Any]) -> None:
        """Adds tasks to the Mission Controller's graph, inputs first."""
        pending = list(reversed(new))
        wanted = {task.key for task in new}
        while pending:
            task = pending[-1]
            if task.key in self.numbers:
                pending.pop()
                continue
            before = [
                dependency
                for dependency in task.dependencies
                if dependency.key in wanted and dependency.key not in self.numbers
            ]
            if before:
                pending.extend(before)
                continue
            pending.pop()
            number = self.numbers[task.key] = next(self.next_number)
            job, stage, kind = self.jobs.of.get(task.key, ""), key_split(task.key), kind_of(task.key)
            inputs = [
                self.numbers[dependency.key] for dependency in task.dependencies if dependency.key in self.numbers
            ]
            self.mission.add_task(number, job, stage, kind, inputs)
        self.event({"event": "tick"})

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """A key's life is the life of the objects that it carries."""
        if start == "memory" and finish != "memory":
            task = self.scheduler.tasks.get(key)
            if (
                finish == "released"
                and task is not None
                and (task.who_wants or task.waiters)
                and self.objects.carried(key)
            ):
                job = self.jobs.of.get(key, "unnamed")
                self.recomputed[job] += 1
                self.record("recomputed", job=job, key=str(key))
            self.hold_for_submitters(key)
            self.free(self.objects.release(key))
        if start == "processing":
            for hold in self.holds.end(key):
                self.free(self.objects.release(("held", hold)))
        if finish == "forgotten":
            # What a worker that had been away said of it late.
            self.free(self.objects.release(key))
            self.submitted_on.pop(key, None)
            number = self.numbers.pop(key, None)
            if number is not None:
                self.mission.forget_task(number)
            ended = self.jobs.remove(key)
            if ended is not None:
                self.end(ended)

    def hold_for_submitters(self, key: Any) -> None:
        """The tasks that submitted this one may return its references: they live until their own results are known.

        Tasks of one worker share a client, which submits equal calls once: whichever of them run there may have it.
        """
        carried = self.objects.carried_by(key)
        hold = self.holds.hold(self.submitted_on.get(key, ())) if carried else None
        if hold is not None:
            for name, owner in carried:
                self.objects.carry(("held", hold), name, owner)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.leave(worker)

    def leave(self, worker: str) -> None:
        """A worker is gone, and its objects with it: the keys that carry them are invalid, wherever copies survive."""
        self.unregistered.pop(worker, None)
        self.without.pop(worker, None)
        if self.workers.pop(worker, None) is None:
            return  # it had no data plane
        self.outbox.forget(worker)
        for job, awaited in list(self.ending.items()):
            awaited.discard(worker)
            if not awaited:
                self.finish(job)
        self.record("worker-left", worker=worker)
        self.event({"event": "worker-left", "worker": worker})
        lost, keys = self.objects.lost_with(worker)
        self.lose(worker, lost)
        self.recompute(keys)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A client that is gone submits no more."""
        for job in self.jobs.leave_all(client):
            self.end(job)

    async def close(self) -> None:
        callback = self.scheduler.periodic_callbacks.pop(self.name, None)
        if callback is not None:
            callback.stop()
        self.metrics.unregister()
        # The class has the original.
        vars(self.scheduler).pop("_task_to_msg", None)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def event(self, event: dict[str, Any]) -> None:
        """Lets the Mission Controller decide, and tells the workers."""
        commands = json.loads(self.mission.handle(time.monotonic() - self.started, json.dumps(event)))
        for command in commands:
            kind = command["command"]
            if kind == "weigh":
                if self.runner is not None:
                    self.runner.ask(command["transfers"])
                continue
            if kind == "probe-ecn":
                senders = [self.workers[sender]["address"] for sender in command["senders"] if sender in self.workers]
                self.tell({"probe_ecn": senders}, [command["worker"]])
                continue
            self.record("decision", **command)
            if kind == "own":
                self.tell({"commands": [command]}, [command["worker"]])
        commands = [command for command in commands if command["command"] in TOLD_TO_ALL]
        if self.mission.policy_error != self.policy_error:
            self.policy_error = self.mission.policy_error
            if self.policy_error is not None:
                logger.warning(self.policy_error)
                self.record("policy-error", why=self.policy_error)
        if commands:
            self.tell({"commands": commands})

    def tell(self, message: dict[str, Any], workers: list[str] | None = None) -> None:
        """To workers whose plug-in is up: an unknown operation would raise on the others."""
        for worker in self.workers if workers is None else workers:
            if worker in self.workers:
                self.send(worker, self.outbox.send(worker, message), message)

    def send(self, worker: str, version: int, message: dict[str, Any]) -> None:
        stream = self.scheduler.stream_comms.get(worker)
        if stream is not None and not stream.closed():
            stream.send({"op": "mission-control", "version": version, **message})

    def free(self, names: dict[str, list[str]]) -> None:
        for worker, objects in names.items():
            if worker in self.scheduler.workers:
                self.tell({"free": objects}, [worker])
            else:
                self.lose(worker, objects)

    def lose(self, worker: str, objects: list[str]) -> None:
        """Objects that went with their worker: a copy of a result that carries them may still be on its way."""
        if not objects:
            return
        if not self.lost:
            # Once for all of them: where the only copy of a result went, Dask says so result by result.
            self.scheduler.loop.add_callback(self.tell_lost)
        self.lost[worker].update(objects)

    def tell_lost(self) -> None:
        lost, self.lost = self.lost, defaultdict(set)
        for worker, objects in lost.items():
            self.tell({"lost": list(objects), "why": f"worker {worker} left"})

    def recompute(self, keys: Iterable[Any]) -> None:
        """Frees these results and all their copies; Dask computes again what is still needed of them."""
        tasks = self.scheduler.tasks
        stale = {key: "released" for key in keys if key in tasks and tasks[key].state == "memory"}
        if stale:
            self.scheduler.transitions(stale, stimulus_id=f"mission-control-lost-{time.time()}")

    def arrive(self, spec: dict[str, Any]) -> None:
        spec = {**spec, **self.changed.get(spec["job"], {})}
        if self.jobs.specs.get(spec["job"]) != spec:
            self.mission.admits(json.dumps(spec))  # raises where a hand-made annotation makes no sense
            self.jobs.specs[spec["job"]] = spec
            self.record("job", **spec)
            self.event({"event": "job-arrived", "spec": spec})

    def end(self, job: str) -> None:
        """The job is over; its workers have a moment to say what is still to be said of it."""
        self.ending[job] = set(self.workers)
        self.tell({"report": job})
        # With no workers there is nobody to wait for.
        self.scheduler.loop.call_later(LAST_WORDS_S if self.workers else 0, self.finish, job)

    def finish(self, job: str) -> None:
        if self.ending.pop(job, None) is None:
            return
        if job in self.jobs.specs:
            return  # it has come back meanwhile
        self.changed.pop(job, None)
        for status in self.job_status(job)[0]:
            self.record("job-ended", **status)
        self.recomputed.pop(job, None)
        for key in [key for key in self.transfers if key[0] == job]:
            del self.transfers[key]
            self.merged.pop(key, None)
            self.moved.pop(key, None)
        self.event({"event": "job-ended", "job": job})
        self.tell({"forget_job": job})

    def record(self, kind: str, **values: Any) -> None:
        number = self.records[-1]["number"] + 1 if self.records else 0
        self.records.append({"number": number, "kind": kind, "time": time.time(), **values})

    def _send_jobs(self, scheduler: Scheduler) -> None:
        """Add the job of each task to the message that takes the task to a worker.

        Users and their plug-ins read the annotations of the scheduler's tasks, so those stay as they were given.
        """
        task_to_message = scheduler._task_to_msg

        def with_job(task: Any) -> dict[str, Any]:
            message = task_to_message(task)
            if task.processing_on is not None:
                # Also where another worker steals it, which is no transition.
                self.holds.begin(task.key, task.processing_on.address)
            if (spec := self.jobs.submitted.get(task.key)) is not None:
                message["annotations"] = {**message["annotations"], ANNOTATION: spec}
            return message

        scheduler._task_to_msg = with_job

    def _inherit_jobs(self, scheduler: Scheduler) -> None:
        """Plug-ins are not told which task submits a graph; the stream handler is."""
        update_graph = scheduler.stream_handlers["update-graph"]

        async def with_parent(
            *args: Any, submitting_task: Any = None, stimulus_id: str | None = None, **kwargs: Any
        ) -> Any:
            stimulus_id = stimulus_id or f"update-graph-{secrets.token_hex(8)}"
            if submitting_task is not None:
                self.submitted_by[stimulus_id] = submitting_task
            try:
                return await update_graph(*args, submitting_task=submitting_task, stimulus_id=stimulus_id, **kwargs)
            finally:
                self.submitted_by.pop(stimulus_id, None)

        scheduler.stream_handlers["update-graph"] = with_parent


def guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """A handler of a stream that raises would have Dask remove the worker, or the client, that spoke."""

    def handle(**said: Any) -> None:
        try:
            handler(**said)
        except Exception:
            logger.exception("What was said by %s makes no sense", said.get("worker") or said.get("client"))

    return handle


def name_of(policy: str | Policy) -> str:
    """As core and people call it."""
    if isinstance(policy, str):
        return policy
    return PREFIX + getattr(policy, "__qualname__", type(policy).__name__)


def kind_of(key: Any) -> str:
    """What a task is to the graph (DESIGN 4.2)."""
    name = key_split(key)
    if name.startswith("shuffle-barrier"):
        return "barrier"
    return "select" if name == "getitem" or name.startswith("split-") else "work"


def merge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What all workers say of one transfer, as one."""
    merged: dict[str, Any] = {}
    for name in ("local_bytes", "peer_bytes", "fetches", "refetches", "resumed", "busy"):
        merged[name] = sum(record[name] for record in records)
    merged["flows_now"] = sum(record["flows"] for record in records)
    merged["flows_peak"] = max((record["flows_peak"] for record in records), default=0)
    merged["started"] = min((record["started"] for record in records), default=None)
    merged["ended"] = max((record["ended"] for record in records), default=None)
    facts = [record["transport"] for record in records]
    carried: defaultdict[str, int] = defaultdict(int)
    for fact in facts:
        for name, count in fact["bytes"].items():
            carried[name] += count
    # What is said of the transfer as a whole is said of the transport that carried most of it.
    main = max(carried, key=lambda name: carried[name], default=None)
    nothing = {"chosen": None, "reason": "nothing had to leave its worker", "planned": None}
    first = next((fact for fact in facts if main is not None and fact["chosen"] == main), nothing)
    agreements = {json.dumps(entry, sort_keys=True) for fact in facts for entry in fact["negotiated"]}
    observed: dict[str, int] = {}
    for fact in facts:
        for name, value in fact["observed"].items():
            observed[name] = max(observed.get(name, 0), value)
    merged["transport"] = {
        "bytes": dict(carried),
        "chosen": first["chosen"],
        "reason": first["reason"],
        "planned": first["planned"],
        "negotiated": [json.loads(agreement) for agreement in sorted(agreements)],
        "observed": observed,
        "fallbacks": sorted({fallback for fact in facts for fallback in fact["fallbacks"]}),
    }
    return merged
