"""Run Dask's shuffles on the data plane: the scheduler gives workers another kind of run."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Scheduler, Worker
from distributed.shuffle import _rechunk
from distributed.shuffle._core import ShuffleSpec, barrier_key, id_from_key
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.shuffle._rechunk import ArrayRechunkRun, ArrayRechunkSpec
from distributed.shuffle._shuffle import DataFrameShuffleRun, DataFrameShuffleSpec
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

from mission_control.dask.comm import is_encrypted
from mission_control.dask.labels import parsed
from mission_control.dask.seams import wanted
from mission_control.dask.seams.seam import ERRORS, Part, Seam, reason
from mission_control.jobs import ANNOTATION, UNNAMED

if TYPE_CHECKING:
    from mission_control.dask.p2p.keys import Keys
    from mission_control.dask.scheduler import MissionControlScheduler

logger = logging.getLogger(__name__)

FIELDS = {
    DataFrameShuffleSpec: ["id", "disk", "npartitions", "column", "meta", "parts_out", "drop_column"],
    ArrayRechunkSpec: ["id", "disk", "new", "old"],
}
PARAMETERS: list[tuple[Any, list[str]]] = [
    *(
        (method, names)
        for spec, run in ((DataFrameShuffleSpec, DataFrameShuffleRun), (ArrayRechunkSpec, ArrayRechunkRun))
        for method, names in (
            (spec.create_run_on_worker, ["self", "run_id", "span_id", "worker_for", "plugin"]),
            (run.add_partition, ["self", "data", "partition_id"]),
            (run.get_output_partition, ["self", "partition_id", "key", "kwargs"]),
            (run.barrier, ["self", "run_ids"]),
            (run.inputs_done, ["self"]),
            (run.receive, ["self", "data"]),
            (run.fail, ["self", "exception"]),
            (run.close, ["self"]),
            (run.heartbeat, ["self"]),
        )
    ),
    (ShuffleWorkerPlugin._get_shuffle_run, ["self", "shuffle_id", "run_id"]),
    (_rechunk.split_axes, ["old", "new"]),
    (_rechunk.convert_chunk, ["shards"]),
]
"""Methods of a run that Dask calls, and methods of Dask that our runs call."""
WANTED = ("waiting", "queued", "no-worker", "processing")
"""States of a task whose result is awaited."""


def unlike() -> str | None:
    """Return which parts of Dask's shuffles are not as Mission Control expects."""
    for spec, known in FIELDS.items():
        if [own.name for own in fields(spec)] != known:
            return f"fields of {spec.__name__}"
    for method, names in PARAMETERS:
        if list(inspect.signature(method).parameters) != names:
            return method.__qualname__
    return None


RETRIEVE = Seam(
    "ShuffleSchedulerPlugin",
    "_retrieve_spec",
    "chooses who carries a shuffle that begins",
    ("shuffle_id",),
    deliberate=(P2PConsistencyError,),
)


CREATE = Seam(
    "Scheduler.handlers",
    "shuffle_get_or_create",
    "waits a moment for workers that are joining, so that a shuffle right after a restart is carried",
    ("shuffle_id", "key", "worker"),
)


def carry_shuffles(plugin: MissionControlScheduler, scheduler: Scheduler) -> None:
    """Let the scheduler choose who carries a shuffle that begins."""
    shuffles = scheduler.plugins.get("shuffle")

    async def when_all_have_joined(create: Callable[..., Any], shuffle_id: Any, key: Any, worker: str) -> Any:
        if shuffle_id not in shuffles.active_shuffles:
            await plugin.all_joined()
        return await create(shuffle_id=shuffle_id, key=key, worker=worker)

    joining = plugin.parts.part("joining", "a shuffle that begins while a worker joins is carried by Dask")
    joining.replace(CREATE, scheduler.handlers, when_all_have_joined)
    # Below the other: a demand holds also where that is off.
    demands = plugin.parts.part("demands", "a shuffle that must be encrypted may run on Dask's own, plain connections")
    demands.replace(RETRIEVE, shuffles, refuse_plain(plugin, scheduler))
    part = plugin.parts.part("shuffles", "Dask carries its shuffles itself")
    if (other := unlike()) is not None:
        part.unknown(other)
        return
    part.replace(RETRIEVE, shuffles, ours_where_possible(plugin, scheduler, part))


def encryption(spec: Any) -> str:
    """The level of encryption that the specification of a job demands; any code may have written it."""
    # A class of the program's own may raise from any of its methods.
    demands = dict.get(spec, "demands") if isinstance(spec, dict) else None
    level = dict.get(demands, "encrypt") if isinstance(demands, dict) else None
    # Whoever wrote something else meant something.
    return level if isinstance(level, str) else "none" if level is None else "invalid"


def refuse_unencrypted(plugin: MissionControlScheduler, scheduler: Scheduler, shuffle_id: Any, why: str) -> None:
    """Check that Dask may carry a shuffle.

    Raises:
        P2PConsistencyError: Its job demands encryption, and Dask's connections have none; or, because of an error of
            ours, nobody knows whether a task that submitted it demands that.
    """
    if not plugin.encrypts or is_encrypted(scheduler, "scheduler"):
        return
    key = barrier_key(shuffle_id)
    barrier, number = scheduler.tasks.get(key), plugin.numbers.get(key)
    try:
        known = number is not None and plugin.knows(number)
        refused = plugin.controller.engine_refuses(number) if number is not None and known else None
    except ERRORS:
        known, refused = False, None
    if refused is None and barrier is not None and encryption((barrier.annotations or {}).get(ANNOTATION)) != "none":
        refused = "its job demands encryption"
    elif not known and key in plugin.parents:
        # Only what tasks submit has demands that do not stand on it.
        refused = "a task has submitted it, and whether that one's job demands encryption is not known"
    if refused is not None:
        raise P2PConsistencyError(f"shuffle {shuffle_id}: {refused}. Mission Control cannot carry it because {why}")


def refuse_plain(plugin: MissionControlScheduler, scheduler: Scheduler) -> Callable[..., ShuffleSpec]:
    def with_demands(retrieve: Callable[[Any], ShuffleSpec], shuffle_id: Any) -> ShuffleSpec:
        if (why := plugin.parts.off.get("shuffles")) is not None:
            refuse_unencrypted(plugin, scheduler, shuffle_id, why)
            spec = retrieve(shuffle_id)
            check_sides(scheduler, spec)
            return spec
        return retrieve(shuffle_id)

    return with_demands


def ours_where_possible(
    plugin: MissionControlScheduler, scheduler: Scheduler, part: Part
) -> Callable[..., ShuffleSpec]:
    def with_ours(retrieve: Callable[[Any], ShuffleSpec], shuffle_id: Any) -> ShuffleSpec:
        spec = retrieve(shuffle_id)
        try:
            plugin.open_books()
            number = plugin.number_of(barrier_key(shuffle_id))
            made, why = chosen(plugin, scheduler, spec, number)
            outputs = sum(1 for _ in spec.output_partitions)
            engine = "dask" if why else "mission"
            counted = "items" if isinstance(spec, ArrayRechunkSpec) else "rows"
            said = {"task": number, "shuffle": str(shuffle_id), "outputs": outputs, "counted": counted}
            keys = getattr(made, "keys", None)
            if number is not None:
                plugin.event(
                    "shuffle-begins", **said, engine=engine, why=why or (str(keys) if keys is not None else "")
                )
        except ERRORS as error:
            part.fail(error)
            made, why = spec, reason(error)
        if why is not None:
            refuse_unencrypted(plugin, scheduler, shuffle_id, why)
        check_sides(scheduler, made)
        return made

    return with_ours


def chosen(
    plugin: MissionControlScheduler, scheduler: Scheduler, spec: ShuffleSpec, number: int | None
) -> tuple[ShuffleSpec, str | None]:
    """Return a shuffle's description for its carrier, and why that is Dask; ``None``: it is Mission Control."""
    if (why := why_not(plugin, spec)) is not None:
        return spec, why
    if number is None:
        return spec, f"its job is not known: {plugin.parts.faults.get('registration', 'its barrier is gone')}"
    demands, why = plugin.controller.shuffle_demands(number, list(scheduler.workers))
    return (spec, why) if demands is None else (of_job(plugin, scheduler, spec, number, demands), None)


def keys_of_join(plugin: MissionControlScheduler, scheduler: Scheduler, spec: DataFrameShuffleSpec) -> Keys | None:
    """Return how the keys are compared of a side of a join that the data plane carries; ``None``: as Dask does."""
    from mission_control.dask.p2p.joins import other_side, unlike_keys

    other = other_side(scheduler, spec.id)
    if other is None:
        return None
    barrier: Any = scheduler.tasks[barrier_key(other)].run_spec
    try:
        keys = unlike_keys(scheduler, spec, barrier.spec)
    except ERRORS as error:
        # Of a type that pandas itself cannot place: only this join is placed as Dask would.
        plugin.parts.fault("keys of a join", error)
        return None
    # Both sides are placed by one rule, so the data plane has to carry both.
    return keys if keys is not None and why_not(plugin, barrier.spec) is None else None


def check_sides(scheduler: Scheduler, made: ShuffleSpec) -> None:
    """Check that the other side of a join, if it has begun, is placed by the same rule.

    Raises:
        P2PConsistencyError: It is not: a worker lost its data plane, or a part was switched off, between the two.
    """
    shuffles: Any = scheduler.plugins.get("shuffle")
    active = [own.run_spec.spec for own in shuffles.active_shuffles.values()]
    if all(getattr(own, "keys", None) is None for own in (made, *active)):
        return
    from mission_control.dask.p2p.joins import other_side

    other = shuffles.active_shuffles.get(other_side(scheduler, made.id))
    if other is None:
        return
    kinds = [keys.kinds if (keys := getattr(spec, "keys", None)) else None for spec in (made, other.run_spec.spec)]
    if kinds[0] != kinds[1]:
        raise P2PConsistencyError(
            f"shuffle {made.id}: the two sides of its join would be placed by unlike rules, because who carries them "
            "has changed between the two. Run it again, or give the keys of both sides one type"
        )


def restart_without_run(scheduler: Scheduler, released: Any) -> None:
    """If a shuffle's barrier was released and is wanted again, recompute its inputs, unless the shuffle has a run.

    Dask ends a shuffle's run when its barrier is released, for any reason. It recomputes the inputs if a worker has
    left, and if the inputs belong to several runs. But it also releases a running barrier after a late message of an
    earlier attempt, such as a reschedule (``Scheduler._reschedule`` does not check the run). Then the barrier finds its
    inputs but no run: "No active shuffle". Chaos tests found it (2026-11-27).

    Args:
        released: The key of the task that was released. Nothing happens if it is no barrier.
    """
    shuffle_id = id_from_key(released)
    if shuffle_id is None:
        return

    def restart() -> None:
        shuffles: Any = scheduler.plugins.get("shuffle")
        barrier = scheduler.tasks.get(released)
        if shuffles is None or barrier is None or barrier.state not in WANTED:
            return
        # When Dask has restarted a shuffle, its inputs are only in memory once it has a run.
        inputs = [own.key for own in barrier.dependencies if own.state == "memory"]
        if inputs and shuffle_id not in shuffles.active_shuffles:
            logger.warning("Shuffle %s has no run any more, and begins again", shuffle_id)
            stimulus = f"mission-control-no-run-{time.time()}"
            scheduler.transitions(dict.fromkeys(inputs, "released"), stimulus_id=stimulus)
            scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)

    def guarded() -> None:
        try:
            restart()
        except ERRORS:
            logger.exception("Shuffle %s could not begin again", shuffle_id)

    # Later, because Dask is in the middle of its transitions.
    scheduler.loop.add_callback(guarded)


def running(scheduler: Scheduler) -> list[str]:
    """Return the shuffles that the data plane currently carries."""
    shuffles: Any = scheduler.plugins.get("shuffle")
    active = shuffles.active_shuffles.values() if shuffles is not None else ()
    # Our classes derive from Dask's.
    return [str(own.id) for own in active if type(own.run_spec.spec) not in FIELDS]


def that_may_free(scheduler: Scheduler, shuffle: str, run: int) -> set[str]:
    """Return the workers of a run, which may free parts of done outputs; none if the parts are needed again.

    Dask fuses the task that makes an output into the task that uses it. So two results of one array take the same
    parts.
    """
    shuffles: Any = scheduler.plugins.get("shuffle")
    own = shuffles.active_shuffles.get(shuffle) if shuffles is not None else None
    barrier = scheduler.tasks.get(barrier_key(shuffle))
    if own is None or own.run_id != run or barrier is None or len(barrier.dependents) > len(own.run_spec.worker_for):
        return set()
    return own.participating_workers


def why_not(plugin: MissionControlScheduler, spec: ShuffleSpec) -> str | None:
    """Return why Dask has to carry a shuffle like this; ``None``: it need not."""
    if not wanted("p2p"):
        return "mission-control.p2p is false"
    if plugin.drains:
        return "Mission Control is being uninstalled"
    if type(spec) not in FIELDS:
        return f"no data plane carries a {type(spec).__name__}"
    if isinstance(spec, DataFrameShuffleSpec):
        from mission_control import frames

        return frames.unknown_kind(spec.meta)
    if any(np.isnan(size) for chunks in (spec.old, spec.new) for axis in chunks for size in axis):
        return "the sizes of its chunks are not known"
    return None


def of_job(plugin: MissionControlScheduler, scheduler: Scheduler, spec: Any, number: int, demands: str) -> ShuffleSpec:
    """Return the description of a shuffle that the data plane carries; `demands` are JSON."""
    job = plugin.controller.spec_of(number)
    name = parsed(job).get("job", UNNAMED) if job is not None else UNNAMED
    from mission_control.dask.p2p.run import with_job

    if isinstance(spec, DataFrameShuffleSpec):
        from mission_control.dask.p2p.frames import FrameSpec

        return with_job(FrameSpec, spec, name, demands, keys=keys_of_join(plugin, scheduler, spec))
    from mission_control.dask.p2p.arrays import ArraySpec

    return with_job(ArraySpec, spec, name, demands)


def listen(worker: Worker) -> None:
    """Add the handlers by which a worker gives and receives where the parts of output partitions are."""

    async def take_inputs(shuffle_id: Any, run_id: int, places: Any) -> bool:
        from mission_control.dask.p2p.run import take_inputs

        return await take_inputs(worker.plugins.get("shuffle"), shuffle_id, run_id, places)

    async def give_index(shuffle_id: Any, run_id: int, numbers: Any) -> Any:
        from mission_control.dask.p2p.run import give_index

        return await give_index(worker.plugins.get("shuffle"), shuffle_id, run_id, numbers)

    worker.handlers["mission_control_shuffle_inputs"] = take_inputs
    worker.handlers["mission_control_shuffle_index"] = give_index
