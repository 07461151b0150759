"""The Throttle Controller beside a Dask worker: sets up the data plane, and keeps objects as long as they are
needed."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import dask
from distributed import Reschedule, Worker
from distributed.comm import CommClosedError
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.system import MEMORY_LIMIT
from distributed.utils import parse_ports
from tornado.ioloop import PeriodicCallback

from mission_control import _native
from mission_control.carried import carried_by, described
from mission_control.dask import results
from mission_control.dask.comm import PLANES, is_encrypted, requires_encryption
from mission_control.dask.seams import changed, messages, shuffles, wanted
from mission_control.dask.seams.early import Early
from mission_control.dask.seams.lanes import Lanes
from mission_control.dask.seams.seam import ERRORS, Parts
from mission_control.dask.seams.turns import Turns
from mission_control.delegates import Described, objects_of
from mission_control.objects import Reference
from mission_control.streams import CONTINUES
from mission_control.throttle import MEMORY, ThrottleController

if TYPE_CHECKING:
    from mission_control.interface.server import Interface

logger = logging.getLogger(__name__)

RUNNING = ("executing", "long-running", "cancelled", "resumed")
"""States in which a task's code may still run."""
CONTINUES_WITHIN_S = 60.0
"""How long a task that reads a lost stream keeps its state and waits until the stream is written again: as long as a
reader waits for a writer that does not answer (`PROGRESS_TIMEOUT`)."""
CONTINUES_LOOK_S = 0.02
"""How often it checks: short compared with the time to restart a task."""
SECRET_AGAIN_S = 0.5
"""Pause before the request to a scheduler that does not answer is repeated."""
REST_S = 2.0
"""How often a worker with nothing to report frees what lingers: short compared with `LINGER_S`, and rare enough that an
idle worker costs no more than Dask's, which wakes 50 times a second."""
RESCHEDULES_MAX = 5
"""How often one task may find its object lost before that is an error."""
RESCHEDULE_AFTER_S = 0.05
"""First pause before a rerun, doubled each time: the scheduler may not know yet that the object is lost."""


HOST_TOKEN_FILE = "MISSION_HOST_TOKEN_FILE"
"""Names the file with the secret of all clusters that share this host's slots."""
HOST_TOKEN_MIN = 16
"""Smallest secret in bytes: 128 bits cannot be guessed."""


def host_token() -> bytes | None:
    """Return the secret of the clusters that share this host's slots; ``None``: this cluster does not share them.

    Raises:
        RuntimeError: The secret's file cannot be used.
    """
    path = os.environ.get(HOST_TOKEN_FILE)
    if not path:
        return None
    try:
        token = Path(path).read_bytes().strip()
        others = Path(path).stat().st_mode & 0o007
    except OSError as error:
        raise RuntimeError(f"{HOST_TOKEN_FILE}: {error}") from None
    if len(token) < HOST_TOKEN_MIN or others:
        raise RuntimeError(
            f"{HOST_TOKEN_FILE}: {path} must have {HOST_TOKEN_MIN} bytes or more, and not be readable by everybody: "
            f"head -c 32 /dev/urandom | base64 > {path}; chmod 640 {path}"
        )
    return token


class NoMissionController(RuntimeError):
    """The worker's scheduler runs no Mission Controller."""


class MissionControlWorker(WorkerPlugin, ThrottleController):
    """Worker plug-in."""

    name = "mission-control"
    idempotent = True
    # Dask uses the plug-in before its setup.
    turns: Turns | None = None
    lanes: Lanes | None = None
    contended = False
    """Whether two jobs or more were named, so that they share threads and messages by weight."""
    shares = False
    """Whether what shares threads and messages was put in."""
    transition: Any
    """Dask calls it if it is there: while tasks use something of ours."""
    steps = False
    """Whether tasks of this cluster have delegated."""
    news: int | None = None
    """The descriptor that is readable while there is something to report."""
    interface: Interface | None = None
    """The socket for programs, once a program was started."""

    no_delegates: str | None = "its scheduler has not answered yet"
    """Why tasks cannot delegate, if they cannot."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why there is no data plane on this worker, if there is none."""

    def __getstate__(self) -> dict[str, Any]:
        return {"problem": None}

    async def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.process = os.getpid()
        self.begin()
        self.objects.on_put = self.watch_tasks
        self.rescheduled: dict[Any, tuple[int, int | None]] = {}
        """How often each task was rescheduled, and by which run last."""
        self.rescheduling = threading.Lock()
        self.shuffles: WeakValueDictionary[tuple[Any, int], Any] = WeakValueDictionary()
        """Runs of shuffles that the data plane carries, by shuffle and number."""
        self.continued: dict[tuple[Any, int], dict[str, tuple[str, str]]] = {}
        """By task and run, the new streams with which a waiting thread continues; nothing: its task has to restart."""
        self.outputs: dict[Any, dict[Any, dict[str, Any]]] = {}
        """By the task that joined them, and by shuffle: the report of outputs to send once the task is done."""
        self.inherited = messages.Inherited(worker)
        self.early = Early(worker)
        self.parts = Parts("this worker", self.soon, self.report_off)
        """What is replaced in Dask's worker."""
        self.thread = threading.local()
        """State of the task in this thread: ``run``, the number of its run; ``delegated``, the last function to which
        it delegated."""
        for name, handler in self.handlers().items():
            # Dask closes a worker whose handler raises.
            worker.stream_handlers[name] = self.parts.callback(handler)
        shuffles.listen(worker)
        try:
            await self.start(worker)
        except Exception as error:
            # Errors here must not stop the worker: Dask works without Mission Control.
            self.problem = f"{type(error).__name__}: {error}"
            self.leave_to_dask()
            self.parts.undo()
            if self.endpoint is not None:
                # It has joined already: objects that tasks put now would be considered lost.
                endpoint, self.endpoint = self.endpoint, None
                PLANES.remove(endpoint)
                await asyncio.get_running_loop().run_in_executor(None, endpoint.close)
            logger.warning("This worker has no data plane, and its tasks cannot put or fetch: %s", self.problem)
            if isinstance(error, NoMissionController):
                return
            # A scheduler that blocks this handler does not receive the report; the worker's log has the reason.
            with suppress(Exception):
                await worker.scheduler.mission_control_without(worker=worker.address, why=self.problem)
            return
        if self.closing:
            # The plug-in was removed meanwhile.
            await self.teardown(worker)
            return
        results.watch(worker, self)
        Reference.on_made[id(self)] = self.watch_tasks
        if Reference._live:
            self.watch_tasks()
        # Dask's heartbeats carry it to the scheduler.
        worker.metrics[self.name] = self.parts.callback(self.memory)
        report = self.parts.callback(self.report)
        try:
            self.listen_for_news(report)
            every_s = REST_S
        except OSError as error:
            logger.warning("This worker looks itself whether there is something to report: %s", error)
            every_s = _native.REPORT_EVERY_MS / 1000
        rest = PeriodicCallback(report, every_s * 1000)
        worker.periodic_callbacks[self.name] = rest
        rest.start()

    def listen_for_news(self, report: Callable[[], None]) -> None:
        """Report when there is something to report.

        Raises:
            OSError: The process is out of descriptors or threads.
        """
        assert self.endpoint is not None
        news = self.endpoint.news()

        def tell() -> None:
            # Read even when the report is off: the loop would come back at once.
            with suppress(BlockingIOError):
                os.eventfd_read(news)
            report()

        asyncio.get_running_loop().add_reader(news, tell)
        self.news = news

    async def start(self, worker: Worker) -> None:
        """Set up the data plane, and join the cluster's."""
        secret = await self.secret(worker)
        if not isinstance(secret, dict):
            raise NoMissionController("its scheduler runs none: start it with --preload mission_control.dask")
        self.no_delegates = secret["no_delegates"]
        limit = worker.memory_manager.memory_limit or MEMORY_LIMIT
        settings = {
            "memory_limit": int(limit * _native.STORE_MEMORY_FRACTION),
            "spool_folder": os.path.join(worker.local_directory, "mission-control"),
            "flows_per_host": secret["flows_per_host"],
            **certificates(worker),
            "requires_encryption": requires_encryption(worker, "worker"),
            "ports": data_ports(),
            "send_limit": send_limit(),
            "cluster": secret["cluster"],
            "host_token": host_token(),
        }
        # In a thread, because it may wait some seconds for the host's arbiter.
        make = functools.partial(_native.Endpoint, worker.ip, secret["token"], **settings)
        endpoint = await asyncio.get_running_loop().run_in_executor(None, make)
        for problem in endpoint.problems:
            logger.warning("Mission Control on this worker: %s", problem)
        briefing = await worker.scheduler.mission_control_join(worker=worker.address, **self.introduction(endpoint))
        if "rejected" in briefing:
            await asyncio.get_running_loop().run_in_executor(None, endpoint.close)
            raise RuntimeError(briefing["rejected"])
        self.memory_limit = settings["memory_limit"]
        self.join(endpoint, briefing)
        if briefing.get("steps"):
            self.on_steps()
        PLANES.add(secret["token"], endpoint)
        # Connections that were made before do not know the data plane.
        worker.rpc.collect()
        if worker.address.startswith("mission://"):
            messages.name_transfers(worker, self.parts)

    def contend(self, contended: bool) -> None:
        """Share threads and messages by the weights of jobs, or leave both to Dask: nobody has named two jobs."""
        self.contended = contended
        if self.endpoint is None or self.closing or contended == self.shares:
            return
        if not contended:
            self.leave_to_dask()
            return
        self.shares = True
        turns = Turns(self.worker, self.endpoint, self.memory_limit, self.parts)
        self.turns = turns if turns.start() else None
        if self.worker.address.startswith("mission://") and wanted("gather-by-job"):
            lanes = Lanes(self.worker, self.endpoint, self.parts)
            self.lanes = lanes if lanes.start() else None
        for own in (self.turns, self.lanes):
            if own is not None:
                own.weigh()

    def leave_to_dask(self) -> None:
        """Put back Dask's own order of tasks and messages."""
        self.shares = False
        turns, lanes, self.turns, self.lanes = self.turns, self.lanes, None, None
        for own in (lanes, turns):
            if own is not None:
                own.close()

    async def secret(self, worker: Worker) -> Any:
        """Send a request to the scheduler; if it has not started yet, repeat it for ever, as Dask does."""
        while True:
            try:
                return await worker.scheduler.mission_control_secret()
            except OSError as error:
                if self.closing or worker.status in (Status.closing, Status.closed, Status.failed):
                    raise
                logger.warning("Mission Control on this worker waits for the scheduler: %s", error)
                await asyncio.sleep(SECRET_AGAIN_S)

    async def teardown(self, worker: Worker) -> None:
        worker.metrics.pop(self.name, None)
        callback = worker.periodic_callbacks.pop(self.name, None)
        if callback is not None:
            callback.stop()
        if self.news is not None:
            asyncio.get_running_loop().remove_reader(self.news)
            self.news = None
        self.closing = True
        for name in self.handlers():
            worker.stream_handlers[name] = ignored
        if (hashing := sys.modules.get("mission_control.hashing")) is not None:
            hashing.uninstall()
        self.leave_to_dask()
        self.early.close()
        self.parts.undo()
        results.unwatch(worker)
        Reference.on_made.pop(id(self), None)
        self.__dict__.pop("transition", None)
        if "mission_control.interface.server" in sys.modules:
            from mission_control.interface.server import close_interface

            await asyncio.get_running_loop().run_in_executor(None, close_interface, self)
        if self.endpoint is not None:
            PLANES.remove(self.endpoint)
            self.endpoint.leaves_session()
            self.parts.callback(self.report)()
            # Waits for the data plane's threads, which may wait for the network.
            await asyncio.get_running_loop().run_in_executor(None, self.endpoint.close)

    # --- messages ---------------------------------------------------------------------------------------------------

    def handlers(self) -> dict[str, Callable[..., None]]:
        """Handlers of the scheduler's messages to this plug-in."""
        return {
            "mission-control": self.on_message,
            "mission-control-taken": self.on_taken,
            "mission-control-continue": self.on_continue,
            "mission-control-steps": self.on_steps,
        }

    def on_message(self, version: int, **message: Any) -> None:
        self.hear(version, message)

    def on_steps(self) -> None:
        """A task of this cluster has delegated, so that this worker may get one with other inputs."""
        if not self.steps and not self.closing:
            self.steps = True
            changed.watch(self.worker, self.parts)

    def report_off(self, name: str, why: str) -> None:
        """Report a part that was switched off. In any thread."""
        if self.endpoint is not None:
            self.soon(lambda: self.say("off", name=name, why=why))

    def on_taken(self, shuffle: Any, run: int, cohort: int) -> None:
        """Handle the message that all outputs of a cohort of a shuffle are done."""
        if (own := self.shuffles.get((shuffle, run))) is not None:
            # Dask's stream waits for its handlers.
            self.worker.loop.add_callback(own.take, cohort)

    def on_continue(self, key: Any, run: int, streams: dict[str, tuple[str, str]]) -> None:
        """Handle the answer about the streams for which a task's thread waits."""
        task = self.worker.state.tasks.get(key)
        if task is None:
            return
        if streams and task.state in RUNNING:
            # Use the scheduler's number of the run, so that the worker's messages about the task belong to it.
            task.run_id = run
        self.continued[key, run] = streams
        self.watch_tasks()

    def say(self, kind: str, **said: Any) -> None:
        # If the scheduler is unreachable the data plane continues, and later reports repeat the totals.
        with suppress(CommClosedError):
            self.worker.batched_stream.send({"op": f"mission-control-{kind}", **said})

    def note_phases(self, key: Any, seconds: dict[str, float]) -> None:
        """In any thread."""
        self.soon(lambda: self.say("phases", key=key, seconds=seconds))

    def soon(self, call: Callable[[], Any]) -> None:
        self.worker.loop.add_callback(call)

    def report(self, last_of: str | None = None) -> None:
        PLANES.sweep()
        self.watch_tasks_if_used()
        super().report(last_of)
        # After the report: shares that arrive from here on are news.
        for own in (self.turns, self.lanes):
            if own is not None:
                own.weigh()

    def memory(self, worker: Worker) -> dict[str, int]:
        """Return the bytes of objects and fetched parts, free bytes kept for later, and bytes on disk."""
        resources = self.resources()
        return {kind: resources[f"{kind}_bytes"] for kind in MEMORY}

    def writes(self, key: Any, stream: str, repeats: bool) -> None:
        """Report that a task begins a stream; `repeats`: it writes the same each time it runs. Runs in its thread."""
        needs = self.needs_of(key)
        self.soon(lambda: self.say("writes", key=key, stream=stream, repeats=repeats, needs=needs))

    def wrote(self, key: Any, stream: str, again: bool) -> None:
        """Report that a task that wrote a stream is over; `again`: it should run again. May be called in any thread."""
        self.soon(lambda: self.say("wrote", key=key, stream=stream, again=again))

    # --- what tasks do ----------------------------------------------------------------------------------------------

    def reschedule_if_lost(self, key: Any, objects: set[str], error: Exception) -> None:
        """Handle a lost object: its key is being recomputed, and this task has to wait for that."""
        lost = set(self.endpoint.known_lost(list(objects))) if self.endpoint is not None else set()
        if lost:
            run = getattr(self.thread, "run", None)
            self.worker.loop.add_callback(self.tell_stale, key, run, lost)
            self.run_again(key, error)

    def written_again(self, key: Any, first: str, stream: str, error: Exception) -> tuple[str, str] | None:
        """Wait in a task's thread until a lost stream that it reads is written again.

        Dask revokes the task meanwhile. If it assigns the task to this worker again, the thread continues.

        Args:
            first: The stream that the task's inputs name.
            stream: The run of its writer that was lost, the first or a later one.

        Returns:
            The new stream, and the address of its writer's data plane; ``None``: the task has to restart.
        """
        run = getattr(self.thread, "run", None)
        if run is None or self.early.is_done or self.endpoint is None or not self.endpoint.known_lost([stream]):
            return None
        self.worker.loop.add_callback(self.tell_stale, key, run, {stream})
        self.continued.pop((key, run), None)
        self.soon(lambda: self.say("waits", key=key, run=run, stream=stream))
        logger.info("%s waits until a stream is written again: %s", key, error)
        with self.turns.thread_released() if self.turns is not None else nullcontext():
            found = self._continuation(key, run, first, stream)
        if found is None:
            # Before Dask learns that the task restarts.
            self.soon(lambda: self.say("waits", key=key, run=run, stream=None))
        return found

    def _continuation(self, key: Any, run: int, first: str, stream: str) -> tuple[str, str] | None:
        thread_is_free = self.turns is not None and self.turns.lends
        end = time.monotonic() + CONTINUES_WITHIN_S
        while time.monotonic() < end and not self.closing:
            task = self.worker.state.tasks.get(key)
            if task is None:
                return None
            # The answer arrives with the task, or after it.
            given = (task.annotations or {}).get(CONTINUES) if task.run_id == run else None
            for streams in (given, answer := self.continued.pop((key, run), None)):
                now = streams.get(first) if streams else None
                if now is not None and now[0] != stream:
                    return now[0], now[1]
            # The stream's writer may be among the tasks that wait for this thread.
            waiting = self.worker.state.ready or self.worker.state.constrained
            if answer is not None or (not thread_is_free and waiting):
                return None
            time.sleep(CONTINUES_LOOK_S)
        return None

    def run_again(self, key: Any, why: Exception) -> None:
        """Reschedule the task of this thread. If several threads act for it, that counts once.

        Raises:
            distributed.Reschedule: Always, unless the task has run too often.
        """
        run = getattr(self.thread, "run", None)
        with self.rescheduling:
            times, last = self.rescheduled.get(key, (0, None))
            if run is None or run != last:
                times += 1
                self.rescheduled[key] = times, run
                self.watch_tasks()
        if times <= RESCHEDULES_MAX:
            time.sleep(RESCHEDULE_AFTER_S * 2 ** (times - 1))
            raise Reschedule() from why

    def needs_of(self, key: Any) -> list[Described]:
        """Return the objects that a task's inputs carry, and its arguments where it is a step. Runs in its thread."""
        task = self.worker.state.tasks.get(key)
        if task is None:
            return []
        inputs = [own.key for own in list(task.dependencies)] if Reference._live else []
        found = (carried_by(self.worker.data[own]) for own in inputs if own in self.worker.data)
        references = {reference for references in found for reference in references}
        return [*described(references), *objects_of(task.run_spec)]

    def tell_stale(self, key: Any, run: int | None, lost: set[str]) -> None:
        """Report which local copies of a task's inputs carry lost objects; and the task, if it is a step that names
        one.

        Such a copy was on its way here, or was made from one, when the worker of its objects left. The scheduler, which
        has recomputed its key meanwhile, considers it a copy of the new result.
        """
        task = self.worker.state.tasks.get(key)
        inputs = (
            [dependency.key for dependency in task.dependencies if dependency.key in self.worker.data] if task else []
        )
        carried = {entry: carried_by(self.worker.data[entry]) for entry in inputs}
        stale = [entry for entry, held in carried.items() if any(reference.object in lost for reference in held)]
        if stale:
            self.say("stale", keys=stale)
        if task is not None and task.run_id == run and any(own[0] in lost for own in objects_of(task.run_spec)):
            self.say("step-lost", key=key, run=run)

    def watch_tasks(self) -> None:
        """Have Dask call :meth:`on_transition`, several times for each task. May be called in any thread."""
        self.transition = self.on_transition

    def watch_tasks_if_used(self) -> None:
        """Have Dask call nothing while tasks use nothing of ours."""
        if not self.are_tasks_used():
            self.__dict__.pop("transition", None)
        # Another thread may have begun to use something meanwhile.
        if self.are_tasks_used():
            self.watch_tasks()

    def are_tasks_used(self) -> bool:
        return bool(self.rescheduled or self.continued or self.outputs or self.objects.are_used())

    def on_transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if finish in RUNNING or (start not in RUNNING and finish != "memory"):
            return
        try:
            if self.are_tasks_used():
                self.over(key, start, finish)
        except ERRORS as error:
            self.parts.fault("transition", error)

    def over(self, key: Any, start: str, finish: str) -> None:
        """End a task: only objects that its result carries live on."""
        if finish != "rescheduled" and not (finish == "memory" and self.early.writes(key)):
            # A task that has begun a stream may still find that an input's object is lost.
            self.rescheduled.pop(key, None)
        for of in [own for own in list(self.continued) if own[0] == key]:
            self.continued.pop(of, None)
        outputs = self.outputs.pop(key, {})
        if finish == "memory":
            for shuffle, output in outputs.items():
                self.say("shuffle-out", shuffle=shuffle, **output)
        result = None
        if finish == "memory":
            if start not in RUNNING:
                return  # the result came from another worker
            actors, data = self.worker.state.actors, self.worker.data
            # Dask could not store it if a disk is full: then the task has no result.
            if key in actors or key in data:
                result = lambda: actors[key] if key in actors else data[key]  # noqa: E731
        self.ended(key, result)


def data_ports() -> list[int]:
    """Return the ports at which a worker may serve its data, from Dask's configuration; 0: any free port.

    Raises:
        ValueError: The configured port is invalid.
    """
    given = dask.config.get("mission-control.port", default=0)
    try:
        ports = [int(port) for port in parse_ports(given)]
    except (TypeError, ValueError):
        ports = []
    if not ports or not all(0 <= port < 1 << 16 for port in ports):
        raise ValueError(f"mission-control.port is {given!r}: give a port, or a range such as '9900:9999'")
    return ports


def send_limit() -> int | None:
    """Return the most bytes per second that a worker's data plane sends, from Dask's configuration; ``None``: no limit.

    Raises:
        ValueError: The configuration names no rate.
    """
    given = dask.config.get("mission-control.send-limit", default=None)
    if given is None:
        return None
    try:
        limit = _native.parse_rate(str(given)) // 8
    except ValueError as error:
        raise ValueError(f"mission-control.send-limit: {error}") from None
    if limit == 0:
        raise ValueError(f"mission-control.send-limit is {given!r}: give a rate above 0, or leave it out for no limit")
    return limit


def ignored(**said: Any) -> None:
    """Ignore messages to a removed plug-in: Dask closes a worker that receives an unknown operation."""


def certificates(worker: Worker) -> dict[str, Any]:
    """Return the cluster's certificates if Dask's channel uses them; Dask's settings hold PEM texts or their paths."""
    if not is_encrypted(worker, "worker"):
        return {}
    settings = worker.security.get_tls_config_for_role("worker")

    def pem(value: str) -> bytes:
        if "-----BEGIN" in value:
            return value.encode()
        with open(value, "rb") as file:
            return file.read()

    certificate = pem(settings["cert"])
    # Dask allows one file for both.
    key = pem(settings["key"]) if settings.get("key") else certificate
    return {"ca": pem(settings["ca_file"]), "certificate": certificate, "key": key}
