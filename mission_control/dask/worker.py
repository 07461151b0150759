"""The Throttle Controller beside a Dask worker: sets the data plane up, keeps objects as long as they are needed."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
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
"""A task that reads a stream waits so long until that is written again, with what it has: as long as a reader waits for
a writer that does not answer (`PROGRESS_TIMEOUT`)."""
CONTINUES_LOOK_S = 0.02
"""How often it looks: little beside what it takes to begin a task again."""
SECRET_AGAIN_S = 0.5
"""Pause before a scheduler that does not answer is asked once more."""
RESCHEDULES_MAX = 5
"""Times that one task may find its object lost before that is an error."""
RESCHEDULE_AFTER_S = 0.05
"""At first, and twice as long each time: whoever recomputes the object may not have heard yet that it is lost."""


HOST_TOKEN_FILE = "MISSION_HOST_TOKEN_FILE"
"""Names the secret of all clusters that share this host's slots."""
HOST_TOKEN_MIN = 16
"""Bytes: 128 bits cannot be guessed."""


def host_token() -> bytes | None:
    """Return the secret of those who share this host's slots; ``None``: they are this cluster's alone.

    Raises:
        RuntimeError: There is a file for it, and it cannot be used.
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
    # Dask knows the plug-in before it is set up.
    turns: Turns | None = None
    lanes: Lanes | None = None
    interface: Interface | None = None
    """The socket for programs, once one was started."""

    no_delegates: str | None = "it has not said so yet"
    """Why the scheduler cannot have tasks delegate, if it cannot."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why there is no data plane on this worker, if there is none."""

    def __getstate__(self) -> dict[str, Any]:
        return {"problem": None}

    async def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.process = os.getpid()
        self.begin()
        self.rescheduled: dict[Any, tuple[int, int | None]] = {}
        """How often each task was to run again, and in which run it last said so."""
        self.rescheduling = threading.Lock()
        self.shuffles: WeakValueDictionary[tuple[Any, int], Any] = WeakValueDictionary()
        """Runs of shuffles that the data plane carries, by shuffle and number."""
        self.continued: dict[tuple[Any, int], dict[str, tuple[str, str]]] = {}
        """By task and run what a thread that waits for streams may go on with; nothing: it has to begin again."""
        self.outputs: dict[Any, dict[Any, dict[str, Any]]] = {}
        """By the task that joined them, and by shuffle: what is said of outputs once the task is done."""
        self.inherited = messages.Inherited(worker)
        self.early = Early(worker)
        self.thread = threading.local()
        """Of the task in this thread: ``run``, the number of its run; ``delegated``, to which function it last did."""
        self.undo = ExitStack()
        worker.stream_handlers["mission-control"] = self.on_message
        worker.stream_handlers["mission-control-taken"] = self.on_taken
        worker.stream_handlers["mission-control-continue"] = self.on_continue
        shuffles.listen(worker)
        try:
            await self.start(worker)
        except Exception as error:
            # Whatever goes wrong here, the worker works for Dask.
            self.problem = f"{type(error).__name__}: {error}"
            if self.endpoint is not None:
                # It has joined: what tasks put there now would be taken for lost.
                endpoint, self.endpoint = self.endpoint, None
                PLANES.remove(endpoint)
                await asyncio.get_running_loop().run_in_executor(None, endpoint.close)
            logger.warning("This worker has no data plane, and its tasks cannot put or fetch: %s", self.problem)
            if isinstance(error, NoMissionController):
                return
            # A scheduler that blocks this handler does not hear of it; the worker's log says it.
            with suppress(Exception):
                await worker.scheduler.mission_control_without(worker=worker.address, why=self.problem)
            return
        if self.closing:
            # Removed meanwhile.
            await self.teardown(worker)
            return
        results.watch(self.name)
        # Goes to the scheduler with Dask's heartbeats.
        worker.metrics[self.name] = self.memory
        report = PeriodicCallback(self.report, _native.REPORT_EVERY_MS)
        worker.periodic_callbacks[self.name] = report
        report.start()

    async def start(self, worker: Worker) -> None:
        """Sets the data plane up and joins the cluster's."""
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
        # It may wait some seconds for the host's arbiter.
        make = functools.partial(_native.Endpoint, worker.ip, secret["token"], **settings)
        endpoint = await asyncio.get_running_loop().run_in_executor(None, make)
        for problem in endpoint.problems:
            logger.warning("Mission Control on this worker: %s", problem)
        briefing = await worker.scheduler.mission_control_join(worker=worker.address, **self.introduction(endpoint))
        if "rejected" in briefing:
            await asyncio.get_running_loop().run_in_executor(None, endpoint.close)
            raise RuntimeError(briefing["rejected"])
        self.join(endpoint, briefing)
        PLANES.add(secret["token"], endpoint)
        # Connections that were made before know nothing of it.
        worker.rpc.collect()
        self.undo_names = messages.name_transfers(worker)
        if worker.address.startswith("mission://") and wanted("gather-by-job"):
            lanes = Lanes(worker, endpoint)
            self.lanes = lanes if lanes.start() else None
        self.early.start()
        changed.watch(worker, self.undo)
        turns = Turns(worker, endpoint, settings["memory_limit"])
        self.turns = turns if turns.start() else None

    async def secret(self, worker: Worker) -> Any:
        """Ask the scheduler; where it has not started yet, as long as Dask waits for it, which is for ever."""
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
        self.closing = True
        for name in ("mission-control", "mission-control-taken", "mission-control-continue"):
            worker.stream_handlers[name] = ignored
        if (hashing := sys.modules.get("mission_control.hashing")) is not None:
            hashing.uninstall()
        self.undo.close()
        # In reverse: each restores what it found.
        for own in (self.turns, self.early, self.lanes):
            if own is not None:
                own.close()
        if "mission_control.interface.server" in sys.modules:
            from mission_control.interface.server import close_interface

            await asyncio.get_running_loop().run_in_executor(None, close_interface, self)
        if self.endpoint is not None:
            PLANES.remove(self.endpoint)
            self.undo_names()
            self.endpoint.leaves_session()
            self.report()
            # Waits for the data plane's threads, which may wait for the network.
            await asyncio.get_running_loop().run_in_executor(None, self.endpoint.close)
        results.unwatch(self.name)

    # --- its words --------------------------------------------------------------------------------------------------

    def on_message(self, version: int, **message: Any) -> None:
        """What the scheduler says; Dask closes a worker whose handler of messages raises."""
        try:
            self.hear(version, message)
        except Exception:
            logger.exception("Mission Control could not do what the scheduler said")

    def on_taken(self, shuffle: Any, run: int, cohort: int) -> None:
        """All outputs of a cohort of a shuffle are done."""
        if (own := self.shuffles.get((shuffle, run))) is not None:
            # Dask's stream waits for its handlers.
            self.worker.loop.add_callback(own.take, cohort)

    def on_continue(self, key: Any, run: int, streams: dict[str, tuple[str, str]]) -> None:
        """What became of the streams for which the thread of a task waits."""
        task = self.worker.state.tasks.get(key)
        if task is None:
            return
        if streams and task.state in RUNNING:
            # As the scheduler has it now: what the worker says of the task is of this run.
            task.run_id = run
        self.continued[key, run] = streams

    def say(self, kind: str, **said: Any) -> None:
        # Where the scheduler is away the data plane goes on, and later reports repeat the totals.
        with suppress(CommClosedError):
            self.worker.batched_stream.send({"op": f"mission-control-{kind}", **said})

    def note_phases(self, key: Any, seconds: dict[str, float]) -> None:
        """In any thread."""
        self.soon(lambda: self.say("phases", key=key, seconds=seconds))

    def soon(self, call: Callable[[], Any]) -> None:
        self.worker.loop.add_callback(call)

    def report(self, last_of: str | None = None) -> None:
        PLANES.sweep()
        for own in (self.turns, self.lanes):
            if own is not None:
                own.weigh()
        super().report(last_of)

    def memory(self, worker: Worker) -> dict[str, int]:
        """Bytes of objects and of what was fetched, bytes that are free and kept for the next ones, bytes on disk."""
        resources = self.resources()
        return {kind: resources[f"{kind}_bytes"] for kind in MEMORY}

    def writes(self, key: Any, stream: str, repeats: bool) -> None:
        """A task begins a stream; `repeats`: it writes the same each time it runs. Runs in its thread."""
        needs = self.needs_of(key)
        self.soon(lambda: self.say("writes", key=key, stream=stream, repeats=repeats, needs=needs))

    def wrote(self, key: Any, stream: str, again: bool) -> None:
        """A task that wrote a stream is over; `again`: it is to run again. May be called in any thread."""
        self.soon(lambda: self.say("wrote", key=key, stream=stream, again=again))

    # --- what tasks do ----------------------------------------------------------------------------------------------

    def reschedule_if_lost(self, key: Any, objects: set[str], error: Exception) -> None:
        """Where an object went with its worker its key is being recomputed: this task has to wait for that."""
        lost = set(self.endpoint.known_lost(list(objects))) if self.endpoint is not None else set()
        if lost:
            run = getattr(self.thread, "run", None)
            self.worker.loop.add_callback(self.tell_stale, key, run, lost)
            self.run_again(key, error)

    def written_again(self, key: Any, first: str, stream: str, error: Exception) -> tuple[str, str] | None:
        """Wait in the thread of a task until a lost stream that it reads is written again.

        Dask takes the task back meanwhile. If it is given to this worker again, the thread goes on.

        Args:
            first: The stream that the task's inputs name.
            stream: The run of its writer that was lost, the first or a later one.

        Returns:
            The stream that is written now, and the address of its writer's data plane; ``None``: the task has to begin
            again.
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
            # Before Dask hears that the task begins again.
            self.soon(lambda: self.say("waits", key=key, run=run, stream=None))
        return found

    def _continuation(self, key: Any, run: int, first: str, stream: str) -> tuple[str, str] | None:
        thread_is_free = self.turns is not None and self.turns.lends
        end = time.monotonic() + CONTINUES_WITHIN_S
        while time.monotonic() < end and not self.closing:
            task = self.worker.state.tasks.get(key)
            if task is None:
                return None
            # With the task, or after it.
            given = (task.annotations or {}).get(CONTINUES) if task.run_id == run else None
            for streams in (given, answer := self.continued.pop((key, run), None)):
                now = streams.get(first) if streams else None
                if now is not None and now[0] != stream:
                    return now[0], now[1]
            # Its writer may be among those that wait for this thread.
            waiting = self.worker.state.ready or self.worker.state.constrained
            if answer is not None or (not thread_is_free and waiting):
                return None
            time.sleep(CONTINUES_LOOK_S)
        return None

    def run_again(self, key: Any, why: Exception) -> None:
        """Have the task of this thread run again. Several threads may act for it: that counts once.

        Raises:
            distributed.Reschedule: Unless it has run too often.
        """
        run = getattr(self.thread, "run", None)
        with self.rescheduling:
            times, last = self.rescheduled.get(key, (0, None))
            if run is None or run != last:
                times += 1
                self.rescheduled[key] = times, run
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
        """Say which of a task's inputs, as they are here, carry lost objects; and the task, if it is a step naming one.

        Such a copy was on its way here, or made from one, when the worker of its objects left: the scheduler, that has
        had its key recomputed meanwhile, takes it for a copy of the new result.
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

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """A task is over: its objects live on only as far as its result carries them."""
        if finish in RUNNING or (start not in RUNNING and finish != "memory"):
            return
        if finish != "rescheduled" and not (finish == "memory" and self.early.writes(key)):
            # A task that has begun a stream may still find that an object of its inputs is lost.
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
                return  # it came from elsewhere
            actors, data = self.worker.state.actors, self.worker.data
            result = lambda: actors[key] if key in actors else data[key]  # noqa: E731
        self.ended(key, result)


def data_ports() -> list[int]:
    """Return the ports at which a worker may serve its data, from Dask's configuration; 0 is any that is free.

    Raises:
        ValueError: The configuration makes no sense.
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
        return max(1, _native.parse_rate(str(given)) // 8)
    except ValueError as error:
        raise ValueError(f"mission-control.send-limit: {error}") from None


def ignored(**said: Any) -> None:
    """What is sent to a plug-in that is gone: Dask closes a worker that receives an operation that it does not know."""


def certificates(worker: Worker) -> dict[str, Any]:
    """The cluster's certificates where its own channel uses them; Dask's settings hold PEM or paths of it."""
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
