"""Objects on the data plane, for tasks: put parts in one, fetch them in another."""

from __future__ import annotations

import copyreg
import json
import operator
import os
import random
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, overload

from mission_control import _native
from mission_control.jobs import UNDEMANDING, UNNAMED, spec_in

if TYPE_CHECKING:
    import numpy as np
    from distributed import Worker
    from typing_extensions import Buffer

    from mission_control.dask.worker import MissionControlWorker


class Reference:
    """Names an object of n parts; small, and picklable.

    The object lives as long as a result on the scheduler carries a reference to it, and is freed when the last such
    result is released. It lies on the worker that put it (:attr:`worker`), and maybe on others: a retiring worker hands
    its objects over first. If the last worker that has it is lost, it is recomputed with that result.
    """

    __slots__ = ("__weakref__", "_sizes", "address", "copies", "job", "kept", "object", "stage", "worker")
    _live: ClassVar[dict[int, str]] = {}
    """The job of each reference in this process, by identity: equal references are counted separately."""
    on_made: ClassVar[dict[int, Callable[[], None]]] = {}
    """Called when a reference was made in this process, by the identity of who listens."""

    def __init__(
        self,
        object: str,
        worker: str,
        address: str,
        job: str,
        stage: str,
        sizes: Sequence[int] | bytes,
        copies: int = 1,
        kept: bool = False,
    ):
        self.copies = copies
        self.kept = kept
        """Whether workers that fetched parts of it keep them while they have memory."""
        self.object = object
        self.worker = worker
        self.address = address
        self.job = job
        self.stage = stage
        self._sizes = sizes if isinstance(sizes, bytes) else array("Q", sizes).tobytes()
        Reference._live[id(self)] = job
        for call in list(Reference.on_made.values()):
            call()

    def __del__(self) -> None:
        Reference._live.pop(id(self), None)

    @property
    def sizes(self) -> array[int]:
        """Bytes of each part."""
        return array("Q", self._sizes)

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._sizes) // 8

    def __reduce__(self) -> tuple[Any, ...]:
        where = (self.object, self.worker, self.address, self.job, self.stage)
        return Reference, (*where, self._sizes, self.copies, self.kept)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.object == self.object

    def __hash__(self) -> int:
        return hash(self.object)

    def __sizeof__(self) -> int:
        return 200 + len(self._sizes)

    def __dask_tokenize__(self) -> str:
        return self.object

    def __repr__(self) -> str:
        size = _native.format_bytes(sum(self.sizes))
        return f"<Reference to {len(self)} parts of {self.stage}, {size}, put on {self.worker}>"


class Fetched(Sequence["_native.Part"]):
    """The fetched parts, in the order of the references: read-only buffers.

    ``numpy.frombuffer(fetched[0], dtype)`` and ``pyarrow.py_buffer(fetched[0])`` use a part without a copy. Parts from
    this host are not copied: they lie where they were put, in read-only memory. The memory is freed with the last
    buffer that uses it.
    """

    def __init__(self, parts: list[_native.Part], all: _native.Part | None, tally: dict[str, int]):
        self._parts = parts
        self._all = all
        self.tally = tally
        """Statistics: bytes from other workers, refetches, resumed ranges, busy answers, most concurrent flows."""

    @property
    def all(self) -> _native.Part:
        """All parts as one buffer, without gaps.

        Raises:
            ValueError: they were not fetched with ``packed=True``.
        """
        if self._all is None:
            raise ValueError("the parts are not in one piece: fetch them with packed=True")
        return self._all

    @overload
    def __getitem__(self, index: int) -> _native.Part: ...
    @overload
    def __getitem__(self, index: slice) -> list[_native.Part]: ...
    def __getitem__(self, index: int | slice) -> _native.Part | list[_native.Part]:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[_native.Part]:
        return iter(self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse_pickling(self)


def _refuse_pickling(fetched: object) -> tuple[Any, ...]:
    """Raise the TypeError that a task gets if its result carries what it fetched."""
    raise TypeError(
        f"{type(fetched).__name__} cannot be pickled: a fetched part is memory of this worker. "
        "Return bytes(part) or numpy.array(numpy.frombuffer(part, dtype)), or put the result and return its reference."
    )


copyreg.pickle(_native.Part, _refuse_pickling)


def allocate(nbytes: int, *, scratch: bool = False) -> _native.Segment:
    """Allocate writable memory of the data plane, which is put without a copy: ``put(segment, sizes=...)``.

    Args:
        scratch: memory for temporary data of the task, which is not put.
    """
    worker, _, endpoint = data_plane("allocate")
    if scratch:
        return endpoint.allocate(nbytes)
    task = current_task(worker)
    return endpoint.allocate(nbytes, (task.job, json.dumps(task.demands)))


def put(
    parts: Iterable[Buffer] | _native.Segment,
    *,
    sizes: Sequence[int] | None = None,
    copies: int = 1,
    keep: bool = False,
) -> Reference:
    """Put an object of n parts into this worker's store; return a reference for the task to return.

    Args:
        parts: buffers of any kind, which are copied; an array with gaps is stored without them, in C order; or a
            segment from :func:`allocate`, which is kept without a copy and must not be written to any more.
        sizes: of a segment: bytes of each part, one after another; by default it is one part.
        copies: number of workers that should have the object, on different hosts if possible. The others get it once
            the task is done. If one of them is lost, nothing is recomputed, and another worker gets it.

    Raises:
        ValueError: ``copies`` is below 1.
        RuntimeError: called outside a task, or without Mission Control on this cluster.
        TypeError: a part is no buffer, or holds Python objects, or is a masked array.
        OSError: no memory, or the spool disk is full; nothing was kept.
    """
    try:
        copies = operator.index(copies)
    except TypeError:
        raise TypeError(f"put(copies={copies!r}): give the number of workers, as in copies=2") from None
    if copies < 1:
        raise ValueError(f"put(copies={copies}): at least this worker has the object, so give 1 or more")
    worker, plugin, endpoint = data_plane("put")
    task = current_task(worker)
    check_has_result("put", plugin)
    demands = json.dumps(task.demands)
    if isinstance(parts, _native.Segment):
        sizes = [len(parts)] if sizes is None else sizes
        name = endpoint.adopt(parts, sizes, demands)
    else:
        name, sizes = endpoint.put(_buffers(parts), task.job, demands)
    plugin.objects.put(task.key, name)
    return Reference(name, worker.address, endpoint.address, task.job, task.stage, sizes, copies, keep)


def keep(reference: Reference) -> Reference:
    """Return a reference to the same object for repeated use, such as in each iteration of a loop.

    A worker that fetches parts of it by this reference keeps them: until the object is freed, the job ends, or the
    worker needs the memory. Tasks whose inputs carry it run where it is, if they can. (CIEL's "sweethearts": paper 001,
    4.2.1.)
    Parts below 64 KiB are fetched each time; so is what is fetched with ``packed=True`` together with others.

    Raises:
        TypeError: It is no reference to an object, but to a stream, say.
    """
    if not isinstance(reference, Reference) or reference.copies == 0:
        raise TypeError(f"keep takes a reference that put gave, not {reference!r}")
    own = reference
    return Reference(own.object, own.worker, own.address, own.job, own.stage, own._sizes, own.copies, True)


def _buffers(parts: Iterable[Buffer]) -> list[Buffer]:
    """Return each part as a C-contiguous buffer; copy those that are not contiguous.

    Raises:
        TypeError: a part is no buffer, or holds Python objects.
    """
    if isinstance(parts, bytes | bytearray | memoryview | _native.Part) or not isinstance(parts, Iterable):
        raise TypeError(f"put takes a list of buffers, not {type(parts).__name__}: write put([data])")
    return [part if type(part) is bytes else contiguous(part, number) for number, part in enumerate(parts)]


def contiguous(part: Any, number: int) -> Buffer:
    """Return a part as a C-contiguous buffer; copy it if it is not contiguous.

    Raises:
        TypeError: It is no buffer, or holds Python objects.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(part, numpy.ndarray):
        return _contiguous_array(part, number)
    try:
        view = memoryview(part)
    except TypeError:
        raise TypeError(
            f"part {number} is no buffer but {type(part).__name__}: "
            "write numpy.asarray(part) for numbers, or pickle.dumps(part) for any object"
        ) from None
    except ValueError:
        return part  # a format that memoryview does not know
    if view.format == "O":
        raise _holds_objects(part, number)
    return part if view.c_contiguous else view.tobytes()


def _contiguous_array(part: np.ndarray, number: int) -> Buffer:
    import numpy as np

    if part.dtype.hasobject:
        raise _holds_objects(part, number)
    if isinstance(part, np.ma.MaskedArray):
        raise TypeError(
            f"part {number} is a masked array, whose mask would be lost: "
            "put part.filled(...), or two parts, numpy.asarray(part) and numpy.ma.getmaskarray(part)"
        )
    # Cast to bytes: Python's buffers have no format for datetime64 and timedelta64.
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data if part.nbytes else b""


def _holds_objects(part: Any, number: int) -> TypeError:
    return TypeError(
        f"part {number} holds Python objects, not data (its type is {getattr(part, 'dtype', 'object')}): "
        "convert it with part.astype(...), or put pickle.dumps(part)"
    )


def fetch(references: Reference | Iterable[Reference], part: int | None = None, *, packed: bool = False) -> Fetched:
    """Fetch part ``part`` of each object, or all parts of each; block until they have arrived.

    Args:
        references: of the objects, or of one.
        part: number of the part, from 0; ``None``: all parts.
        packed: all parts in one piece of memory without gaps, ``.all``, even if a copy is needed; otherwise parts begin
            at multiples of 64 bytes, as Arrow requires, or lie where they were put.

    Raises:
        TransferError: by cause (``Lost``, ``Unreachable``, ``Damaged``, ``Denied``).
        IndexError: an object has no such part.
        distributed.Reschedule: an object was lost with its worker; the task runs again once it is recomputed.
    """
    worker, plugin, endpoint = data_plane("fetch")
    task = current_task(worker)
    if part is not None:
        try:
            part = int(operator.index(part))  # also integers of numpy: the number goes to the scheduler as JSON
        except TypeError:
            raise TypeError(f"part {part!r} is no number of a part: give an int, or None for all parts") from None
    wanted: list[tuple[str, int, int, list[str]]] = []
    references = [references] if isinstance(references, Reference) else list(references)
    for reference in references:
        if not isinstance(reference, Reference):
            raise TypeError(f"fetch takes references that put gave, not {type(reference).__name__}")
        if reference.copies == 0:
            raise TypeError(f"{reference!r} is no object: read it with mission_control.stream(reference, part)")
        sizes = reference.sizes
        if part is not None and not 0 <= part < len(sizes):
            raise IndexError(f"part {part} of an object of {len(sizes)} parts: they are numbered from 0")
        numbers = range(len(sizes)) if part is None else (part,)
        wanted.extend((reference.object, number, sizes[number], [reference.address]) for number in numbers)
    whole = len(wanted) == sum(map(len, references))
    stage = references[0].stage if references else "nothing"
    try:
        asks = (str(task.key), len(references[0]) if references else 0)
        given = (task.job, stage, task.stage, json.dumps(task.demands), wanted, packed, whole, *asks)
        with plugin.turns.thread_released() if plugin.turns is not None else nullcontext():
            stays = [own.object for own in references if own.kept]
            parts, all, tally = endpoint.fetch(*given, keep=stays)
    except _native.Lost as error:
        plugin.reschedule_if_lost(task.key, {reference.object for reference in references}, error)
        kept = "it lives as long as a result that carries its reference: keep the future of the task that put it"
        raise _native.Lost(f"{error}; {kept}") from None
    return Fetched(parts, all, json.loads(tally))


class Task:
    """The task in this thread, as Mission Control sees it."""

    __slots__ = ("demands", "job", "key", "run", "stage")

    def __init__(self, key: Any, annotations: dict[str, Any] | None, run: int | None = None):
        from dask.utils import key_split

        spec = spec_in(annotations)
        self.key = key
        self.stage = key_split(key)
        self.run = run if run is not None else random.getrandbits(63)
        """Number of this run of the task."""
        self.job: str = spec.get("job", UNNAMED)
        self.demands: dict[str, Any] = spec.get("demands") or UNDEMANDING


def current_task(worker: Worker) -> Task:
    """Return the task that runs in this thread."""
    early = getattr(worker.plugins.get("mission-control"), "early", None)
    if early is not None and (done := early.task()) is not None:
        # The worker may have forgotten the task, because its result is known already.
        return done
    key = worker.get_current_task()
    state = worker.state.tasks.get(key)
    if state is None and _in_actor():
        return _task_of_actor(worker, str(key))
    return Task(key, state.annotations, state.run_id) if state else Task(key, None)


def _in_actor() -> bool:
    """Whether this thread runs a method of an actor; the task that makes the actor is a plain task."""
    from distributed.utils import thread_state

    return getattr(thread_state, "actor", False)


def _task_of_actor(worker: Worker, method: str) -> Task:
    """Return the task of a method: its job and demands are those of the task that made the actor.

    Dask names the class and the method, as in ``Keeper.fetch``, but not which actor it is.

    Raises:
        RuntimeError: actors of this class on this worker belong to different jobs.
    """
    from dask.utils import key_split

    name = method.rpartition(".")[0]
    tasks = [worker.state.tasks.get(key) for key in worker.state.actors if key_split(key) == name]
    made = [Task(method, state.annotations) for state in tasks if state is not None]
    if len({(task.job, json.dumps(task.demands, sort_keys=True)) for task in made}) > 1:
        raise RuntimeError(
            f"{method}: actors {name} of several jobs are on this worker, so the job of this one is unknown: "
            "give each job its own class, or fetch in a task and pass the result to the actor"
        )
    return made[0] if made else Task(method, None)


def check_has_result(what: str, plugin: MissionControlWorker) -> None:
    """Check that this thread's task will have a result, which can carry a reference.

    Raises:
        RuntimeError: The task has a result already, or is the method of an actor.
    """
    if _in_actor():
        raise RuntimeError(
            f"mission_control.{what} in a method of an actor: no task's result would keep what it makes, or free it. "
            f"Instead, {what} it in a task and pass the result to the actor, or in the actor's __init__"
        )
    if plugin.early.is_done:
        raise RuntimeError(
            f"mission_control.{what} in a task that has opened a stream: its result is known already, and no other "
            "would keep what it makes, or free it. Write the data to the stream"
        )


INSTALL_WAIT_S = 10
"""Seconds to wait for the plug-in: a task may start on a new worker before the plug-in."""


def data_plane(what: str) -> tuple[Worker, MissionControlWorker, _native.Endpoint]:
    """Return the worker of the task in this thread, its plug-in and its data plane; waits for it on a new worker.

    Raises:
        RuntimeError: This is no task's thread, or there is no data plane.
    """
    from distributed import get_worker

    try:
        worker = get_worker()
        worker.get_current_task()
    except (ValueError, AttributeError, KeyError):
        raise RuntimeError(_where_to_call(what)) from None
    deadline = time.monotonic() + INSTALL_WAIT_S
    while (plugin := worker.plugins.get("mission-control")) is None or plugin.endpoint is None:
        if plugin is not None and plugin.problem is not None:
            raise RuntimeError(f"this worker has no data plane: {plugin.problem}")
        if time.monotonic() > deadline:
            raise RuntimeError(
                "Mission Control is not on this worker: call mission_control.install(client), or start the worker with "
                "--preload mission_control.dask"
            )
        time.sleep(0.02)
    if plugin.process != os.getpid():
        raise RuntimeError(
            f"mission_control.{what} was called in a process that a task forked: it shares the worker's memory, but "
            "has no data plane. Call it in the task itself, and pass bytes to and from the other process"
        )
    return worker, plugin, plugin.endpoint


def _where_to_call(what: str) -> str:
    """Return why the caller is no task in a thread of Dask, and what to do."""
    import asyncio

    what = f"mission_control.{what}"
    if asyncio._get_running_loop() is not None:
        return f"{what} would block the event loop of this process: call it in a task that is a plain def, not async"
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        return (
            f"{what} was called in thread {thread.name}, which runs no task: "
            "call it in the task's own thread, in a function given to client.submit"
        )
    return f"{what} was called outside a task: call it in a function given to client.submit"


def references_in(value: Any) -> set[Reference]:
    """Return all references in a task's result, at any depth.

    The garbage collector knows what an object holds, even in unknown classes, except the items of NumPy's object
    arrays, of which pandas columns are made. Usually there is no live reference in this process, and the search is
    skipped.
    """
    import gc
    import types

    import numpy as np

    if not Reference._live:
        return set()
    opaque = (type, types.ModuleType, types.FrameType, str, bytes, int, float, bytearray)
    found: set[Reference] = set()
    # Keep seen objects alive, so that no other object gets the same id.
    seen: dict[int, Any] = {}
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Reference):
            found.add(item)
            continue
        if isinstance(item, opaque) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, types.FunctionType):
            # A function's globals belong to its module, not to its value.
            pending.extend(cell.cell_contents for cell in item.__closure__ or () if _filled(cell))
            pending.extend(item.__defaults__ or ())
            continue
        if isinstance(item, np.ndarray) and item.dtype.hasobject:
            pending.extend(item.ravel().tolist())
        pending.extend(gc.get_referents(item))
    return found


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
