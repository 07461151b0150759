"""The Mission Controller beside Dask's scheduler: translates the scheduler's transitions to events, and keys to
numbers.

Uses private parts of `distributed` (stream handlers, `transitions`, `_task_to_msg`), so its minor version is pinned in
pyproject.toml.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import dask
from dask.utils import key_split
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import pickle
from tornado.ioloop import PeriodicCallback

from mission_control import _native, page
from mission_control.controller import SAID, MissionController, one_line
from mission_control.dask.comm import clear_addresses, is_encrypted, requires_encryption
from mission_control.dask.labels import as_json, as_text, for_worker, kind_of, parsed
from mission_control.dask.seams import objects, queue, shuffles, wanted
from mission_control.dask.seams.delegates import Delegates
from mission_control.dask.seams.seam import ERRORS, Part, Parts, Seam
from mission_control.jobs import ANNOTATION, name_of_span
from mission_control.map_reduce.phases import PHASES
from mission_control.metrics import Metrics
from mission_control.policies import Policy, name_of
from mission_control.service.membership import Service
from mission_control.streams import CONTINUES
from mission_control.throttle import MEMORY

logger = logging.getLogger(__name__)

USED = "from the first named job or object until nothing of ours is used"
TO_MESSAGE = Seam("Scheduler", "_task_to_msg", "tells a worker the job of a named task", ("ts",), when=USED)
UPDATE = Seam("Scheduler.stream_handlers", "update-graph", "notes which task has submitted a graph")
CARRYING = ("shuffles", "demands", "messages", "results", "jobs of tasks", "jobs of children")
"""Parts, here or on a worker, without which the demand of a job for encryption cannot be kept everywhere."""
CARRYING_HERE = (*CARRYING, "transition", "registration")
"""The same of the scheduler, with what it does itself; a worker has a callback of the same name."""
GONE_MAX = 10_000
"""Most tasks that are remembered though the scheduler has forgotten them: their threads may still submit work."""
OFF_MAX = 64
"""Most parts and callbacks of one worker that are shown as off: it has some 20."""
HERE = "the scheduler"
IN_USE = (
    *("objects", "lost objects", "objects handed over", "objects in doubt", "writers of streams"),
    *("tasks that delegated", "shuffles", "transfers"),
)
"""While core's books have one of these, tasks stay registered."""
FORGOTTEN_AT_ONCE = 10_000
"""Most tasks that are forgotten in one event of the scheduler: some 0.1 s. With more, their own ends are awaited."""
JOINS_WITHIN_S = 10.0
"""How long a shuffle waits for workers that are joining; usually it takes some 0.1 s."""
LOOKED_S = 60.0
"""After somebody has asked for the status, tasks are registered for so long, so that the next answer has them."""
DRAIN_LOOK_S = 0.2
"""How often to check whether shuffles have ended."""


def never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a callback of the plug-in: Dask goes on, and the first error is logged and shown."""

    @wraps(method)
    def call(self: MissionControlScheduler, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except ERRORS as error:
            self.parts.fault(method.__name__, error)

    return call


class MissionControlScheduler(SchedulerPlugin, MissionController):
    """Scheduler plug-in.

    Args:
        policy: how jobs share the network; see ``mission weights --help``; or a function, see
            :mod:`mission_control.policies`.
        flows_per_host: concurrent flows that every host receives (paper 001, table 4.4: 10); or ``all``, or ``auto``:
            each host finds the number with the highest goodput by trial.
    """

    name = "mission-control"
    idempotent = True
    delegates: Delegates
    started = False
    sends_jobs: Part | None = None
    """The part that tells workers the jobs of tasks, once somebody has named one or put an object."""
    encrypts = False
    """Whether a job has ever demanded encryption here."""
    counts_objects: Sequence[Part] = ()
    """The parts that count objects, once a task has put one."""

    def __init__(
        self, policy: str | Policy = "performance-centric", flows_per_host: int | str = _native.FLOWS_PER_HOST
    ):
        self.policy = policy
        self.flows_per_host = flows_per_host
        _native.Controller(name_of(policy), flows_per_host, "{}")  # invalid arguments are refused here, on the client

    async def start(self, scheduler: Scheduler) -> None:
        if self.started:
            # Dask starts the plug-in again after the preload has started it.
            return
        self.scheduler = scheduler
        clear = clear_addresses(scheduler, "scheduler")
        if 0 < len(clear) < len(scheduler.listeners):
            logger.warning(
                "Dask listens at %s without encryption: whoever connects there gets the cluster's token, so jobs that "
                "demand encrypt=True are refused. Use tls:// there.",
                ", ".join(clear),
            )
        environment = {
            "carriers": _native.carriers(),
            "interfaces": 1,
            "link_bits_per_sec": _native.link_rate(),
            "engine_tls": is_encrypted(scheduler, "scheduler"),
            "requires_encryption": requires_encryption(scheduler, "scheduler"),
        }
        service = Service.of(os.environ, scheduler.address)
        # Workers number their jobs with it, so it does not change.
        self.member_name = None if service is None else service.cluster
        self.begin(self.policy, self.flows_per_host, environment)
        self.event("sessions", apart=not wanted("host-sessions"))
        self.undo = ExitStack()
        self.token = secrets.token_bytes(32)
        self.numbers: dict[Any, int] = {}
        self.keys: dict[int, Any] = {}
        self.next_number = itertools.count()
        # For the stimulus of a graph update: the task that submitted the graph.
        self.submitted_by: dict[str, Any] = {}
        # Tasks that return to the worker where their threads wait, if possible; and their previous restrictions.
        self.preferred: dict[Any, tuple[set[str], set[str] | None, bool]] = {}
        self.drains = False
        self.silent = False
        self.books = False
        """Whether tasks are registered with core. Until something of Mission Control is used, nothing of ours runs for
        each task."""
        self.looked_at = -math.inf
        """When somebody last asked for the status."""
        self.queue: Part | None = None
        self.contention = False
        self.parents: dict[Any, Any] = {}
        """Of each task that a task submitted: the key of that one."""
        self.gone: dict[Any, str] = {}
        """Specifications of the jobs of tasks that were forgotten, where they demand encryption, the oldest first."""
        self.settled: set[str] = set()
        """Workers with a data plane, and those that have reported that they have none."""
        self.late: set[str] = set()
        """Workers whose data planes nobody waits for any more."""
        self.off_at: dict[str, dict[str, str]] = {}
        """By worker: parts that are off there, or callbacks that have failed, and why."""
        self.parts = Parts("this scheduler", self.soon, self._off)
        try:
            await self._start(scheduler, service)
        except BaseException:
            await self._undo()
            raise

    async def _start(self, scheduler: Scheduler, service: Service | None) -> None:
        self.metrics = Metrics(scheduler.address, scheduler.loop, self.parts.callback(self.status))
        self.metrics.register()
        self.undo.callback(self.metrics.unregister)
        self.delegates = Delegates(self, scheduler)
        self.undo.callback(self.delegates.close)
        handlers = ("secret", "join", "without", "admit", "change", "status", "policy", "since", "ended")
        offered = {f"mission_control_{name}": getattr(self, f"on_{name}") for name in handlers}
        offered |= {"mission_control_uninstall": self.on_uninstall, "mission_control_await": self.delegates.on_await}
        # As for Dask's handlers: docs/explanation/security.md.
        for name in dask.config.get("distributed.scheduler.blocked-handlers", default=[]):
            offered.pop(name, None)
        if hasattr(scheduler, "http_application"):  # not without a dashboard
            self.undo.callback(page.add_to(scheduler.http_application, self.looked))
        self._inherit_jobs(scheduler)
        shuffles.carry_shuffles(self, scheduler)
        for worker in scheduler.workers:
            self.known(worker)
        tick = PeriodicCallback(self.parts.callback(self.tick), 1000)
        scheduler.periodic_callbacks[self.name] = tick
        self.undo.callback(lambda: scheduler.periodic_callbacks.pop(self.name).stop())
        tick.start()
        streams: dict[str, Callable[..., Any]] = {name: partial(self.said, name) for name in SAID}
        more: dict[str, Callable[..., Any]] = {
            "task": self.on_task,
            "stale": self.on_stale,
            "writes": self.on_writes,
            "wrote": self.on_wrote,
            "waits": self.on_waits,
            "phases": self.on_phases,
            "delegate": self.delegates.on_delegate,
            "step-lost": self.delegates.on_step_lost,
            "off": self.on_off,
        }
        if any(ANNOTATION in (own.annotations or {}) for own in scheduler.tasks.values()) or service is not None:
            self.open_books()
        # Last: whoever calls them finds everything in place.
        for name, handler in (streams | more).items():
            scheduler.stream_handlers[f"mission-control-{name}"] = guarded(handler)
        scheduler.handlers.update(offered)
        self.started = True
        if service is not None:
            self.follow(service)

    def tick(self) -> None:
        self.event("tick")
        self._close_books()

    async def close(self) -> None:
        self.started = False
        await self._undo()

    async def _undo(self) -> None:
        """Undo everything that :meth:`start` has done, and what came later."""
        self.follow_no_more()
        for key in list(self.preferred):
            self._prefer_no_more(key, self.scheduler.tasks.get(key))
        self.queue, self.contention = None, False
        self.parts.undo()
        self.undo.close()
        for name in [name for name in self.scheduler.handlers if name.startswith("mission_control_")]:
            del self.scheduler.handlers[name]
        # Dask drops a worker that sends an unknown operation, and a worker's last report may be on its way.
        for name in [name for name in self.scheduler.stream_handlers if name.startswith("mission-control-")]:
            self.scheduler.stream_handlers[name] = ignored

    async def on_uninstall(self, timeout: float) -> dict[str, Any]:
        """Uninstall once no shuffle runs on the data plane; or return why that is not possible, and stay."""
        if self.drains:
            return {"error": "it is being uninstalled already"}
        self.drains = True
        try:
            if (why := self._in_use() or await self._drained(timeout) or self._in_use()) is not None:
                return {"error": why}
            # Earlier messages arrive before the workers lose their handlers.
            self.silent = self.delegates.closed = True
            await asyncio.sleep(DRAIN_LOOK_S)
            self.scheduler.worker_plugins.pop(self.name, None)
            # A worker that has left meanwhile needs nothing.
            await self.scheduler.broadcast(msg={"op": "plugin-remove", "name": self.name}, on_error="return")
            await self._end()
            return {"error": None}
        finally:
            self.drains = self.silent = False
            self.delegates.closed = self.name not in self.scheduler.plugins

    def _in_use(self) -> str | None:
        if (why := self.controller.engine_alone_refuses()) is not None:
            return f"{why}: release its results first"
        if chains := len(self.delegates.first):
            return (
                f"{chains} tasks have delegated, and what they delegated to is not over: wait for them, or cancel them"
            )
        objects = self.controller.held().get("objects", 0)
        return (
            f"{objects} objects that tasks put are in use: release the results with their references"
            if objects
            else None
        )

    async def _drained(self, timeout: float) -> str | None:
        """Wait for shuffles on the data plane; return an error with those that still run after the timeout."""
        deadline = self.now() + timeout
        while running := shuffles.running(self.scheduler):
            if self.now() > deadline:
                return f"after {timeout} s these shuffles still run: {', '.join(running)}"
            await asyncio.sleep(DRAIN_LOOK_S)
        return None

    async def _end(self) -> None:
        await self.close()
        self.scheduler.remove_plugin(self.name)

    # --- books ------------------------------------------------------------------------------------------------------

    def open_books(self, beside: Collection[Any] = ()) -> None:
        """Register all tasks, and those that come, with core: something of Mission Control is used.

        Args:
            beside: Keys of new tasks that are going to be registered by what their graph says.
        """
        if self.books:
            return
        self.books = True
        self._number_all(beside)
        self._send_jobs()
        by_parent: defaultdict[int, list[int]] = defaultdict(list)
        for child, parent in self.parents.items():
            if child in self.numbers and parent in self.numbers:
                by_parent[self.numbers[parent]].append(self.numbers[child])
        for by, children in by_parent.items():
            self.carry_out(self.controller.submitted(self.now(), by, children))

    def _close_books(self) -> None:
        """Forget all tasks once nothing of Mission Control is used any more."""
        if not self.books or len(self.numbers) > FORGOTTEN_AT_ONCE or self.now() - self.looked_at < LOOKED_S:
            return
        held, delegates = self.controller.held(), self.delegates
        of_use = (
            self.membership,
            self.controller.named,
            *(held[name] for name in IN_USE),
            *(delegates.first, delegates.awaited, delegates.next, self.preferred, self.submitted_by, self.parents),
            shuffles.running(self.scheduler),
        )
        if any(of_use):
            return
        self.books = False
        known = list(self.keys)
        self.numbers.clear()
        self.keys.clear()
        if self.sends_jobs is not None:
            self.sends_jobs.undo()
            self.sends_jobs = None
        for part in self.counts_objects:
            part.undo()
        self.counts_objects = ()
        for number in known:
            try:
                self.carry_out(self.controller.forgotten(self.now(), number))
            except ERRORS as error:
                self.parts.fault("books", error)

    def contend(self, contended: bool) -> None:
        # Dask may be in the middle of its transitions.
        self.contention = contended
        self.soon(self._contend)

    def _contend(self) -> None:
        if not self.started:
            return
        if self.contention and self.queue is None:
            self.queue = queue.queue_by_job(self)
        elif not self.contention and self.queue is not None:
            self.queue.undo()
            self.queue = None

    def _off(self, name: str, why: str) -> None:
        """A part of this scheduler is off."""
        if name == "jobs of tasks":
            self._write_jobs(self.scheduler.tasks.values())
        self.log.add({"kind": "off", "where": HERE, "part": name, "why": why})

    def on_off(self, worker: str, name: str, why: str) -> None:
        """A part of a worker is off."""
        if worker not in self.scheduler.workers:
            return
        name, why, known = one_line(str(name)), one_line(str(why)), self.off_at.setdefault(worker, {})
        if name in known or len(known) < OFF_MAX:
            known[name] = why
            self.log.add({"kind": "off", "where": worker, "part": name, "why": why})

    def off(self) -> list[dict[str, str]]:
        """What Mission Control cannot do on this cluster, because of an error or an unknown version of Dask."""
        own = {**self.parts.off, **self.parts.faults}
        places = [(HERE, own), *self.off_at.items()]
        return [{"where": where, "part": part, "why": why} for where, parts in places for part, why in parts.items()]

    # --- requests to the plug-in ------------------------------------------------------------------------------------

    async def on_secret(self) -> dict[str, Any]:
        """Return the cluster's secret to a worker that sets up its data plane; Dask's channel carries it, encrypted if
        that is."""
        no_delegates = self.delegates.problem
        return {
            "token": self.token,
            "flows_per_host": self.flows_per_host,
            "no_delegates": no_delegates,
            "cluster": self.member_name,
        }

    async def on_without(self, worker: str, why: str) -> None:
        """A worker has no data plane; it may have joined before its data plane failed."""
        logger.warning("worker %s has no data plane: %s", worker, one_line(why))
        self.event("without", worker=worker, why=why)
        self.settled.add(worker)
        self.known(worker)

    async def on_join(
        self, worker: str, host: str, environment: str, address: str, problems: Sequence[str] = (), protocol: int = 0
    ) -> dict[str, Any]:
        """A worker's data plane is up; return the state that it needs, and the version of that state."""
        introduction = {"host": host, "environment": environment, "address": address, "problems": list(problems)}
        briefing = self.join(worker=worker, **introduction, protocol=protocol)
        if "rejected" not in briefing:
            self.settled.add(worker)
            self.known(worker)
        return {**briefing, "steps": self.delegates.used}

    async def on_admit(self, spec: dict[str, Any], client: str) -> dict[str, Any]:
        """Admit a job: return whether it may run, and under which name. It stays at least until its client leaves
        it."""
        self.open_books()
        if shuffles.encryption(spec) != "none":
            self.encrypts = True
            needed = (own for own in self.off() if own["part"] in (CARRYING_HERE if own["where"] == HERE else CARRYING))
            if (off := next(needed, None)) is not None:
                return {"job": spec.get("job"), "refused": f"{off['part']} of {off['where']} is off: {off['why']}"}
        admitted = self.admit(spec, client)
        if client not in self.scheduler.clients:
            self.event("client-gone", client=client)  # the client left during the request
        return admitted

    async def on_change(self, job: str, transport: str | None, priority: float | None) -> dict[str, Any]:
        self.open_books()
        return self.change(job, transport, priority)

    async def on_policy(self, policy: str | bytes) -> dict[str, Any]:
        """Install another policy: its name, or a pickled function."""
        return {"error": self.set_policy(policy if isinstance(policy, str) else pickle.loads(policy))}

    async def on_status(self, most: int | None = None) -> dict[str, Any]:
        return self.looked(most)

    def looked(self, most: int | None = None) -> dict[str, Any]:
        """Return the status to somebody who looks, and wants to see programs that named no job, too."""
        self.looked_at = self.now()
        self.open_books()
        return self.status(most)

    def status(self, most: int | None = None) -> dict[str, Any]:
        status = super().status(most) | {"flows_per_host": self.flows_per_host, "off": self.off()}
        for worker, own in status["workers"].items():
            known = self.scheduler.workers.get(worker)
            # Bytes that the worker's data plane uses, by kind, from its last heartbeat.
            said = known.metrics.get(self.name) if known is not None else None
            said = said if isinstance(said, dict) else {}
            own["memory"] = {kind: said[kind] for kind in MEMORY if isinstance(said.get(kind), int)}
        return status

    def workers_without(self) -> list[str]:
        """Workers of Dask that have not joined."""
        joined = super().status(0)["workers"]
        return [address for address in self.scheduler.workers if address not in joined]

    def joined_workers(self) -> set[str]:
        """Workers with a data plane."""
        return set(super().status(0)["workers"])

    async def all_joined(self) -> None:
        """Wait a moment for workers that have got the plug-in from Dask, and are setting up their data planes."""
        deadline = self.now() + JOINS_WITHIN_S
        while joining := self._joining():
            if self.now() > deadline:
                # Once for each worker.
                logger.warning("these workers have set up no data plane within %s s: %s", JOINS_WITHIN_S, joining)
                self.late.update(joining)
                return
            await asyncio.sleep(DRAIN_LOOK_S / 4)

    def _joining(self) -> set[str]:
        # Preloaded workers join before Dask knows them; others get the plug-in when they register.
        if self.name not in self.scheduler.worker_plugins:
            return set()
        return self.scheduler.workers.keys() - self.settled - self.late

    async def on_since(self, seen: int) -> tuple[int, str]:
        """Return how many records there have been, and those after the first ``seen`` ones: a line of JSON for each."""
        count, texts = self.log.texts_since(seen)
        return count, await asyncio.to_thread("\n".join, texts)

    async def on_ended(self, job: str | None = None, most: int = 10) -> Any:
        """Return the record of the last ended job of this name; ``None``: names of the ``most`` that ended last."""
        if job is None:
            names: list[str] = []
            for ended in self.log.newest("job-ended"):
                if len(names) == most:
                    break
                if ended["job"] not in names:
                    names.append(ended["job"])
            return names
        record = self.log.last("job-ended", job=job)
        return {**record, "ended": record["time"]} if record is not None else None

    # --- events from workers ----------------------------------------------------------------------------------------

    def on_task(self, worker: str, key: Any, carries: list[Any]) -> None:
        """A task's result carries references; this message arrives before the one that the task is done."""
        self.use_objects()
        task = self.scheduler.tasks.get(key)
        alive = task is not None and task.state not in ("released", "forgotten", "erred")
        number = self.number_of(key)
        if number is None:
            # The task was forgotten meanwhile, so its objects are freed.
            number, alive = next(self.next_number), False
        self.carry_out(self.controller.carries(self.now(), number, carries, alive))

    def on_stale(self, worker: str, keys: list[Any]) -> None:
        """A worker's copies of these results carry lost objects.

        The message is ordered with the worker's reports of its keys: a key that it no longer holds was recomputed after
        it sent the message.
        """
        holder = self.scheduler.workers.get(worker)
        held = holder.has_what if holder is not None else ()
        self.free(key for key in keys if self.scheduler.tasks.get(key) in held)

    def on_writes(self, worker: str, key: Any, stream: str, repeats: bool, needs: list[Any]) -> None:
        """A task begins a stream; this message arrives before the one that the task is done."""
        self.use_objects()
        task, number = self.scheduler.tasks.get(key), self.number_of(key)
        runs_on = task.processing_on if task is not None else None
        # Ignored if another worker runs the task by now.
        if number is not None and runs_on is not None and runs_on.address == worker:
            self.carry_out(self.controller.writes(self.now(), number, worker, (stream, repeats), needs))

    def on_wrote(self, worker: str, key: Any, stream: str, again: bool) -> None:
        """A task that wrote a stream is over. `again`: the stream is lost, and recomputed if it is still wanted."""
        if (number := self.number_of(key)) is None:
            return
        self.carry_out(self.controller.wrote(self.now(), number, stream))
        # Another run may have begun another stream meanwhile.
        if again and self.controller.is_carried(number, stream):
            self.free([key])

    def on_waits(self, worker: str, key: Any, run: int, stream: str | None) -> None:
        """The thread of a task waits on this worker until a stream is written again; ``None``: it waits no more."""
        self.use_objects()
        task, number = self.scheduler.tasks.get(key), self.number_of(key)
        runs_on = task.processing_on.address if task is not None and task.processing_on is not None else None
        if stream is None:
            if number is not None:
                self.carry_out(self.controller.waits(self.now(), number, worker, None))
        elif number is None or task is None or task.state not in ("waiting", "processing", "released", "no-worker"):
            self._continue(worker, key, run, {})
        elif runs_on is None or (runs_on == worker and task.run_id == run and stream not in self._written_again(task)):
            # The task will be assigned to a worker, maybe after it is revoked from this one.
            self.carry_out(self.controller.waits(self.now(), number, worker, run))
            self._prefer(task, worker)
        elif runs_on == worker:
            # The task was assigned to this worker again already, and Dask lets its thread continue.
            if streams := self._written_again(task):
                task.run_id = run
            self._continue(worker, key, run, streams)
        else:
            self._continue(worker, key, run, {})

    def _continue(self, worker: str, key: Any, run: int, streams: dict[str, tuple[str, str]]) -> None:
        """Answer a waiting thread; without `streams` its task has to restart."""
        stream = self.scheduler.stream_comms.get(worker)
        if not self.silent and stream is not None and not stream.closed():
            stream.send({"op": "mission-control-continue", "key": key, "run": run, "streams": streams})

    def _written_again(self, task: Any) -> dict[str, tuple[str, str]]:
        writers = [self.numbers[own.key] for own in task.dependencies if own.key in self.numbers]
        return self.controller.written_again(writers)

    def _prefer(self, task: Any, worker: str) -> None:
        """Make Dask assign a task to the worker where its thread waits, and not to one that has its inputs."""
        strict = task.worker_restrictions and not task.loose_restrictions
        if not (strict or task.host_restrictions or task.resource_restrictions or task.key in self.preferred):
            only = {worker}
            self.preferred[task.key] = (only, task.worker_restrictions, task.loose_restrictions)
            task.worker_restrictions, task.loose_restrictions = only, True

    def _prefer_no_more(self, key: Any, task: Any) -> None:
        only, *before = self.preferred.pop(key, (None, None, False))
        # The restrictions of the task may have changed meanwhile.
        if only is not None and task is not None and task.worker_restrictions is only:
            task.worker_restrictions, task.loose_restrictions = before

    def on_phases(self, worker: str, key: Any, seconds: dict[str, float]) -> None:
        """Record how long the map, shuffle and reduce phases of a task took."""
        number = self.numbers.get(key)
        job = self.controller.job_of(number) if number is not None else None
        phases = {name: float(seconds[name]) for name in PHASES if name in seconds}
        self.log.add({"kind": "phases", "job": job, "key": str(key), "worker": worker, **phases})

    # --- events of the scheduler ------------------------------------------------------------------------------------

    @never_raises
    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self.known(worker)

    def known(self, worker: str) -> None:
        """Report to core that Dask knows a worker; it may have refused or removed one that has joined."""
        if worker in self.scheduler.workers:
            self.event("known", worker=worker)
            if self.delegates.used:
                # It may have joined before, and the stream to it has just begun.
                self.delegates.tell_of_steps([worker])

    @never_raises
    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.off_at.pop(worker, None)
        self.late.discard(worker)
        self.settled.discard(worker)
        self.event("gone", worker=worker)

    def use_objects(self) -> None:
        """A task puts objects: from now on Dask counts them when it places tasks and retires workers."""
        self.open_books()
        if not self.counts_objects:
            self.counts_objects = objects.count_objects(self, self.scheduler)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Dask considers a worker idle whose tasks write streams, because their results are known."""
        try:
            writers = set(self.controller.writers()) if self.books else ()
        except ERRORS as error:
            self.parts.fault("valid_workers_downscaling", error)
            writers = ()
        return [own for own in workers if own.address not in writers]

    @never_raises
    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.event("client-gone", client=client)

    @never_raises
    def update_graph(
        self, scheduler: Scheduler, *, client: str, tasks: list[Any], annotations: dict, stimulus_id: str, **_: Any
    ) -> None:
        """Register new tasks with their origin and their inputs. Runs before the transitions, so that `_send_jobs`
        finds the job of each task when it goes to its worker."""
        if ANNOTATION in annotations:
            self.encrypts = self.encrypts or any(
                shuffles.encryption(own) != "none" for own in annotations[ANNOTATION].values()
            )
        is_named = ANNOTATION in annotations or any(map(name_of_span, annotations.get("span", {}).values()))
        parent = self.submitted_by.pop(stimulus_id, None)
        new = [own for key in tasks if (own := scheduler.tasks.get(key)) is not None]
        if parent is not None:
            # A graph names tasks that were there before, too, maybe the one that submits it.
            own = (task.key for task in new if task.state == "released" and task.key != parent)
            self.parents.update(dict.fromkeys(own, parent))
        if is_named:
            self.open_books(set(tasks))
        if not self.books:
            return
        by = self.number_of(parent) if parent is not None else None
        if by is None and parent in scheduler.tasks:
            # Core does not know whose they are, and nobody may take them for tasks that demand nothing.
            return
        if by is None and parent in self.gone:
            # The thread of a task goes on though nobody wants its result any more.
            given = for_worker(self.gone[parent])
            specs = dict.fromkeys((task.key for task in new), given) | annotations.get(ANNOTATION, {})
            annotations = {**annotations, ANNOTATION: specs}
        self._number(client, new, annotations, by)
        if by is not None:
            its = [self.numbers[key] for key in tasks if key in self.numbers]
            self.carry_out(self.controller.submitted(self.now(), by, its))
        if self.sends_jobs is not None and self.sends_jobs.is_off:
            self._write_jobs(new)
        # The graph itself is processed with the next event.
        self.event("flush")

    def _number(self, client: str, tasks: Iterable[Any], annotations: dict, by: int | None = None) -> None:
        """Register tasks that core does not know; those that it does not take get no number."""
        specs, spans = annotations.get(ANNOTATION, {}), annotations.get("span", {})

        def origin(key: Any) -> tuple[str | None, str | None]:
            spec, span = specs.get(key), name_of_span(spans.get(key))
            return (as_json(spec) if spec is not None else None), (as_text(span) if span is not None else None)

        numbers = self.numbers
        new = [task for task in tasks if task.key not in numbers]
        try:
            for task, number in zip(new, self.next_number, strict=False):
                numbers[task.key] = number
                self.keys[number] = task.key
            groups: defaultdict[Any, list[Any]] = defaultdict(list)
            for task in new:
                key = task.key
                inputs = [numbers[own.key] for own in task.dependencies if own.key in numbers]
                stage = as_text(key_split(key))
                groups[origin(key)].append((numbers[key], stage, kind_of(stage), inputs))
            for (spec, span), numbered_tasks in groups.items():
                self.submit(numbered_tasks, as_text(client), spec, by, span)
        except ERRORS:
            # A number says that core knows what the task demands.
            for task in new:
                given = numbers.get(task.key)
                if given is not None and not self.knows(given):
                    del numbers[task.key]
                    self.keys.pop(given, None)
            raise

    def knows(self, number: int) -> bool:
        """Whether core knows a task's job, and so what it demands."""
        try:
            return self.controller.job_of(number) is not None
        except ERRORS:
            return False

    def number_of(self, key: Any) -> int | None:
        """Return a task's number while books are kept. Register it now if an error of ours has lost its registration;
        ``None``: that fails again, so nobody knows its job."""
        number = self.numbers.get(key)
        if number is not None or not self.books or key not in self.scheduler.tasks:
            return number
        # First those that have submitted it: it belongs to their job.
        tasks, chain, last = self.scheduler.tasks, {key: None}, key
        while (parent := self.parents.get(last)) in tasks and parent not in self.numbers and parent not in chain:
            chain[last := parent] = None
        try:
            for own in reversed(chain):
                self._register_late(tasks[own])
        except ERRORS as error:
            self.parts.fault("registration", error)
        return self.numbers.get(key)

    def _register_late(self, task: Any) -> None:
        given = {
            name: {task.key: own} for name, own in (task.annotations or {}).items() if name in (ANNOTATION, "span")
        }
        parent = self.parents.get(task.key)
        by = self.numbers.get(parent)
        if by is None and parent in self.gone:
            given.setdefault(ANNOTATION, {task.key: for_worker(self.gone[parent])})
        self._number(client_of(task), [task], given, by)
        number = self.numbers[task.key]
        if task.processing_on is not None:
            self.carry_out(self.controller.begins(self.now(), number, task.processing_on.address))
        if by is not None:
            self.carry_out(self.controller.submitted(self.now(), by, [number]))

    def _number_all(self, beside: Collection[Any] = ()) -> None:
        """Register tasks that were submitted before: their objects must live, and they may delegate."""
        tasks = self.scheduler.tasks
        # A client wants few of its tasks; the others are those that they depend on.
        whose: dict[Any, str] = {}
        for task in tasks.values():
            pending = [task] if task.who_wants and task.key not in whose else []
            client = next(iter(task.who_wants)).client_key if pending else ""
            while pending:
                own = pending.pop()
                if own.key not in whose:
                    whose[own.key] = client
                    pending += own.dependencies
        of_client: defaultdict[str, list[Any]] = defaultdict(list)
        for key, task in tasks.items():
            if key not in beside:
                of_client[whose.get(key, "before")].append(task)
        for client, its in of_client.items():
            annotations: dict[str, dict[Any, Any]] = {ANNOTATION: {}, "span": {}}
            for own in its:
                for name, given in annotations.items():
                    if name in (own.annotations or {}):
                        given[own.key] = own.annotations[name]
            try:
                self._number(client, its, annotations)
            except ERRORS as error:
                # They are registered when they use something of ours (`number_of`).
                self.parts.fault("books", error)

    @never_raises
    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """An object lives as long as a result that carries it."""
        if finish == "forgotten" and self.parents:
            self.parents.pop(key, None)
        if not self.books:
            return
        if self.delegates.first or self.delegates.awaited or self.delegates.next:
            try:
                self.delegates.transition(key, start, finish)
            except ERRORS as error:
                self.parts.fault("steps", error)
        if finish == "released":
            shuffles.restart_without_run(self.scheduler, key)
        # Dask calls this several times for each task; most transitions do not concern core.
        is_gone = start == "memory" and finish != "memory"
        if not (is_gone or start == "processing" or finish == "forgotten"):
            return
        number = self.numbers.get(key)
        if number is None:
            return
        controller, now = self.controller, self.now()
        if finish == "forgotten":
            # First: a number that core does not know any more must not stay.
            del self.numbers[key], self.keys[number]
            self._prefer_no_more(key, None)
            try:
                spec = controller.spec_of(number) if self.encrypts else None
                if spec and shuffles.encryption(parsed(spec)) != "none":
                    self.gone[key] = spec
                    if len(self.gone) > GONE_MAX:
                        del self.gone[next(iter(self.gone))]
            finally:
                # For core, its result is gone and it has ended, too.
                self.carry_out(controller.forgotten(now, number))
            return
        if is_gone:
            task = self.scheduler.tasks.get(key)
            wanted = finish == "released" and task is not None and bool(task.who_wants or task.waiters)
            self.carry_out(controller.result_gone(now, number, wanted))
            if wanted and task is not None and controller.repeats(number):
                # Dask revokes them next.
                for own in task.dependents:
                    if own.processing_on is not None:
                        self._prefer(own, own.processing_on.address)
        if start == "processing":
            self.carry_out(controller.ends(now, number))

    # --- commands ---------------------------------------------------------------------------------------------------

    def tell(self, worker: str, version: int, message: dict[str, Any]) -> None:
        stream = self.scheduler.stream_comms.get(worker)
        if not self.silent and stream is not None and not stream.closed():
            stream.send({"op": "mission-control", "version": version, **message})

    def taken(self, shuffle: str, run: int, cohort: int) -> None:
        for worker in shuffles.that_may_free(self.scheduler, shuffle, run):
            stream = self.scheduler.stream_comms.get(worker)
            if not self.silent and stream is not None and not stream.closed():
                stream.send({"op": "mission-control-taken", "shuffle": shuffle, "run": run, "cohort": cohort})

    def recompute(self, tasks: Sequence[int]) -> None:
        keys = [self.keys[task] for task in tasks if task in self.keys]
        self.free(keys)
        for key in keys:
            self.delegates.begin_again(key)

    def drain(self, workers: Sequence[str]) -> None:
        # Dask assigns them no more tasks, moves their results, and ends them.
        self.scheduler.loop.add_callback(self.scheduler.retire_workers, list(workers), close_workers=True)

    def free(self, keys: Iterable[Any]) -> None:
        """Free these results and all their copies; Dask recomputes those that are still needed."""
        tasks = self.scheduler.tasks
        stale = {key: "released" for key in keys if key in tasks and tasks[key].state == "memory"}
        if stale:
            self.scheduler.transitions(stale, stimulus_id=f"mission-control-lost-{time.time()}")

    def soon(self, call: Callable[[], Any]) -> None:
        self.scheduler.loop.add_callback(call)

    def name_of_task(self, task: int) -> str:
        return str(self.keys.get(task))

    def _send_jobs(self) -> None:
        """Add the job of each task to the message that takes the task to a worker.

        Users and their plug-ins read the annotations of the scheduler's tasks, so those stay as they were given.
        """
        if self.sends_jobs is not None and not self.sends_jobs.is_off:
            return

        def with_job(task_to_message: Callable[[Any], dict[str, Any]], task: Any) -> dict[str, Any]:
            message = task_to_message(task)
            try:
                return named(message, task)
            except ERRORS as error:
                part.fail(error)
                # The job stands there by now (`_write_jobs`).
                return message | {"annotations": task.annotations or {}}

        def named(message: dict[str, Any], task: Any) -> dict[str, Any]:
            # Until the job is known, its client's annotation stays: without it a task would lose its demands.
            number = self.numbers.get(task.key)
            if number is None and (number := self.number_of(task.key)) is None:
                return message
            self._prefer_no_more(task.key, task)
            annotations = {k: v for k, v in message["annotations"].items() if k != ANNOTATION}
            run = self.controller.continues(number, task.processing_on.address) if task.processing_on else None
            if run is not None and (streams := self._written_again(task)):
                # The thread waits there, so Dask must use the worker's number of the run.
                task.run_id = message["run_id"] = run
                annotations[CONTINUES] = streams
            if task.processing_on is not None:
                # This also covers stealing, which is no transition.
                self.carry_out(self.controller.begins(self.now(), number, task.processing_on.address))
            # A program that neither names a job nor puts objects has nothing of ours on its tasks.
            if self.counts_objects or self.controller.named_job_of(number):
                spec = self.controller.spec_of(number)
                if spec is None:
                    return message
                # As core parsed it: the client's annotation may be invalid. A span says its name itself.
                if (own := for_worker(spec)) != {"job": name_of_span(annotations.get("span"))}:
                    annotations[ANNOTATION] = own
            message["annotations"] = annotations
            return message

        part = self.parts.part("jobs of tasks", "tasks that somebody named run as unnamed ones")
        part.replace(TO_MESSAGE, self.scheduler, with_job)
        self.sends_jobs = part
        if part.is_off:
            self._write_jobs(self.scheduler.tasks.values())
        for task in self.scheduler.tasks.values():
            if task.processing_on is not None and (number := self.numbers.get(task.key)) is not None:
                self.carry_out(self.controller.begins(self.now(), number, task.processing_on.address))

    def _write_jobs(self, tasks: Iterable[Any]) -> None:
        """Write the jobs of tasks into their annotations, which Dask itself sends to workers: `_send_jobs` is off."""
        try:
            for task in tasks:
                number, given = self.numbers.get(task.key), task.annotations or {}
                if number is None or ANNOTATION in given or not self.controller.named_job_of(number):
                    continue
                if (spec := self.controller.spec_of(number)) is not None:
                    task.annotations = {**given, ANNOTATION: for_worker(spec)}
        except ERRORS as error:
            self.parts.fault("jobs in annotations", error)

    def _inherit_jobs(self, scheduler: Scheduler) -> None:
        """Dask passes the task that submits a graph to the stream handler, but not to plug-ins."""

        async def with_parent(
            update_graph: Callable[..., Any],
            *args: Any,
            submitting_task: Any = None,
            stimulus_id: str | None = None,
            **kwargs: Any,
        ) -> Any:
            stimulus_id = stimulus_id or f"update-graph-{secrets.token_hex(8)}"
            if submitting_task is not None:
                self.submitted_by[stimulus_id] = submitting_task
            try:
                return await update_graph(*args, submitting_task=submitting_task, stimulus_id=stimulus_id, **kwargs)
            finally:
                self.submitted_by.pop(stimulus_id, None)

        part = self.parts.part("jobs of children", "what tasks submit belongs to no job")
        part.replace(UPDATE, scheduler.stream_handlers, with_parent)


def ignored(**said: Any) -> None:
    """Ignore messages to a plug-in that was removed."""


def guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """Wrap a stream handler so that it never raises: Dask would remove the worker or the client that sent the
    message."""

    def handle(**said: Any) -> None:
        try:
            handler(**said)
        except ERRORS:
            logger.exception("%s sent an invalid message", said.get("worker") or said.get("client"))

    return handle


def client_of(task: Any) -> str:
    """Return the client that wants a task, or one that depends on it."""
    seen, pending = {task}, [task]
    while pending:
        own = pending.pop()
        if own.who_wants:
            return str(next(iter(own.who_wants)).client_key)
        pending += own.dependents - seen
        seen |= own.dependents
    return "before"
