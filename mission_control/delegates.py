"""A task delegates its result to another call, and is done (CIEL's tail spawn: paper 001, 2.2 and table 4.2)."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from mission_control.carried import described
from mission_control.objects import Reference, check_has_result, data_plane

if TYPE_CHECKING:
    from distributed import Actor, Future

STEP_BYTES_MAX = 64 << 20
"""Largest pickled call of a step: it goes through the scheduler, together with all messages of workers. Dask warns of
graphs above 10 MB; a reference has a few hundred bytes."""

Described = tuple[str, str, int, int, int]
"""An object, as :func:`~mission_control.carried.described` gives it."""


class Delegation:
    """The result of :func:`delegate`: the task returns it, alone."""

    __slots__ = ("also", "args", "function", "kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.also: Sequence[Reference] = ()
        """References that must live as long as those among its arguments."""

    def __repr__(self) -> str:
        return f"<Delegation to {name_of(self.function)}>"

    def __reduce__(self) -> Any:
        raise TypeError(_alone(name_of(self.function)))


class Step:
    """A delegation as it travels.

    Args:
        call: Function and arguments, pickled.
        inputs: Keys of the futures among them; the results take their places.
        objects: The objects that the arguments name.
    """

    def __init__(self, call: bytes, inputs: Sequence[Any], objects: Sequence[Described]):
        self.call, self.inputs, self.objects = call, inputs, objects

    @classmethod
    def of(cls, delegation: Delegation) -> Step:
        """Pickle a delegation.

        Raises:
            TypeError: Something in it cannot be pickled.
            ValueError: It is too large for the scheduler.
        """
        file, name = io.BytesIO(), name_of(delegation.function)
        pickler = _Pickler(file)
        try:
            pickler.dump((delegation.function, delegation.args, delegation.kwargs))
        except Exception as error:
            raise TypeError(
                f"delegate({name}, ..): the function and its arguments are sent to a worker, and cannot be: {error}"
            ) from error
        call = file.getvalue()
        if len(call) > STEP_BYTES_MAX:
            raise ValueError(
                f"delegate({name}, ..): its arguments have {len(call) >> 20} MiB, and they pass the scheduler: "
                "put them (mission_control.put), and delegate with the reference"
            )
        references = {**pickler.references, **{own.object: own for own in delegation.also}}
        return cls(call, list(pickler.futures), described(references.values()))


class _Pickler(cloudpickle.Pickler):
    """A pickler that records futures and references. A future is pickled as the key of its result."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self.futures: dict[Any, Future | Actor] = {}
        self.references: dict[str, Reference] = {}

    def persistent_id(self, obj: Any) -> Any:
        from distributed import Actor, Future

        # An actor also lives as long as a task waits for its task.
        if isinstance(obj, Future | Actor):
            self.futures[obj.key] = obj
            return obj.key
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Reference):
            self.references[obj.object] = obj
            return NotImplemented
        return super().reducer_override(obj)


class _Unpickler(cloudpickle.pickle.Unpickler):
    def __init__(self, call: bytes, values: dict[Any, Any]):
        super().__init__(io.BytesIO(call))
        self.values = values

    def persistent_load(self, key: Any) -> Any:
        return self.values[key]


def run_step(call: bytes, inputs: Sequence[Any], objects: Sequence[Described], *values: Any) -> Any:
    """Run a step; Dask calls this instead of the task's function.

    Args:
        call, inputs, objects: Of the :class:`Step`. `objects` is not used here, but can be read from the task.
        values: The results of the inputs, in their order.
    """
    function, args, kwargs = _Unpickler(call, dict(zip(inputs, values, strict=True))).load()
    return function(*args, **kwargs)


def objects_of(run_spec: Any) -> Sequence[Described]:
    """Return the objects that a task's arguments name, if it is a step."""
    return run_spec.args[2] if getattr(run_spec, "func", None) is run_step else ()


def delegate(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Delegation:
    """Delegate the result of this task to another call: ``return mission_control.delegate(function, *arguments)``.

    The task is done, and its thread is free; its result is that of `function`, and dependent tasks wait for it. The
    call runs under the task's key as soon as its inputs are available, on a worker that Dask chooses. It may delegate
    again, any number of times: a chain grows neither stack nor memory.

    If a worker is lost, the call that ran there runs again. If it needs a lost object, or the result is lost later, the
    task restarts with its own function.

    Args:
        function: A plain function.
        args, kwargs: For the function. They go through the scheduler, at most 64 MiB: put large values, and pass their
            references. Futures among them, at any depth, are replaced by their results; the call waits for these.

    Raises:
        RuntimeError: This is no task, or the method of an actor, or the task has opened a stream, or Mission Control is
            not on its worker.
        TypeError: `function` cannot be called, or is a coroutine function.
    """
    if not callable(function):
        raise TypeError(f"delegate({function!r}, ..): the first argument is a function; the others are its arguments")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"delegate({name_of(function)}, ..): give a plain def, not async")
    _, plugin, _ = data_plane("delegate")
    if plugin.no_delegates is not None:
        raise RuntimeError(f"tasks cannot delegate on this cluster: {plugin.no_delegates}")
    check_has_result("delegate", plugin)
    if not hasattr(plugin.thread, "run"):
        raise RuntimeError("this task began before Mission Control was installed here: run it again")
    plugin.thread.delegated = name_of(function)
    return Delegation(function, args, kwargs)


def check_returned(result: Any, delegated: str | None) -> None:
    """Check that a task has returned its delegation.

    Args:
        delegated: Name of the function to which it last delegated, if it has.

    Raises:
        RuntimeError: It has not; the value that it returned would become its result.
    """
    if delegated is not None and type(result) is not Delegation:
        raise RuntimeError(_alone(delegated))


def _alone(name: str) -> str:
    return (
        f"delegate({name}, ..) was not what the task returned: return it alone, in a function that is the whole task "
        "(submit, map, delayed; Dask's bags, arrays and data frames go on with what such a function returns)"
    )


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
