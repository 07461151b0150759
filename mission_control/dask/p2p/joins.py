"""Find the joins of Dask's graph whose two sides have keys of unlike types ([`mission_control.dask.p2p.keys`]).

In the scheduler. Dask moves each side of a join by a shuffle of its own. The tasks that join are after the barriers of
both, and the tasks that move rows name the keys.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler
from distributed.shuffle._core import barrier_key, id_from_key
from distributed.shuffle._shuffle import DataFrameShuffleSpec

from mission_control.dask.p2p.keys import Keys, common_kinds

TRANSFER = "assign_index_merge_transfer"
"""Dask's function that places the rows of one side, and moves them."""
JOIN = "merge_unpack"
"""Dask's function that joins two outputs."""
JOIN_PARAMETERS = ("shuffle_id_left", "shuffle_id_right", "output_partition", "barrier_left", "barrier_right", "how")
PARAMETERS = ("df", "index", "name", "npartitions", "id", "input_partition", "index_merge")


def other_side(scheduler: Scheduler, shuffle_id: Any) -> Any:
    """Return the shuffle that moves the other side of a join; ``None``: it is no join."""
    barrier = scheduler.tasks.get(barrier_key(shuffle_id))
    for joins in barrier.dependents if barrier is not None else ():
        for before in joins.dependencies:
            other = id_from_key(before.key)
            if other is not None and other != shuffle_id and moves(scheduler, other) is not None:
                return other
        break  # all that join have the same sides
    return None


def unlike_keys(scheduler: Scheduler, spec: DataFrameShuffleSpec, other: DataFrameShuffleSpec) -> Keys | None:
    """Return how the keys of one side of a join are compared; ``None``: as Dask does, each by its own type."""
    one, two = keys_of(scheduler, spec), keys_of(scheduler, other)
    joined = joined_as(scheduler, spec.id)
    if one is None or two is None or joined is None or len(one[1]) != len(two[1]):
        return None
    how, is_left = joined
    if how == "outer" and one[0] != two[0]:
        # The result has both keys. A frame that is joined with it next most likely names the left one.
        how = "left"
    left, right = (one[1], two[1]) if is_left else (two[1], one[1])
    kinds = common_kinds(left, right, how)
    return Keys(one[0], kinds) if kinds is not None else None


def joined_as(scheduler: Scheduler, shuffle_id: Any) -> tuple[str, bool] | None:
    """Return the kind of a join, and whether the shuffle moves its left side.

    ``None``: the graph is not as expected.
    """
    barrier = scheduler.tasks.get(barrier_key(shuffle_id))
    for task in barrier.dependents if barrier is not None else ():
        function = getattr(task.run_spec, "func", None)
        code = getattr(function, "__code__", None)
        if getattr(function, "__name__", "") != JOIN or code is None or code.co_varnames[:6] != JOIN_PARAMETERS:
            return None
        left, right, _, _, _, how = task.run_spec.args[:6]
        return (str(how), left == shuffle_id) if shuffle_id in (left, right) else None
    return None


def keys_of(scheduler: Scheduler, spec: DataFrameShuffleSpec) -> tuple[tuple[Any, ...] | None, list[Any]] | None:
    """Return the labels (``None``: the index) and the types of the keys of one side; ``None``: they are not known."""
    moved = moves(scheduler, spec.id)
    if moved is None:
        return None
    index, is_index = moved
    if is_index:
        return None, [spec.meta.index.dtype]
    labels = index if isinstance(index, list) else [index]
    if not all(label in spec.meta.columns for label in labels):
        return None
    types = [spec.meta[label] for label in labels]
    # A label that stands for several columns is no key.
    return (tuple(labels), [own.dtype for own in types]) if all(own.ndim == 1 for own in types) else None


def moves(scheduler: Scheduler, shuffle_id: Any) -> tuple[Any, bool] | None:
    """Return the labels of the keys by which a side of a join is placed, and whether it is placed by its index.

    ``None``: it is no side of a join, or the graph is not as expected.
    """
    barrier = scheduler.tasks.get(barrier_key(shuffle_id))
    for task in barrier.dependencies if barrier is not None else ():
        spec = task.run_spec
        function = getattr(spec, "func", None)
        code = getattr(function, "__code__", None)
        if getattr(function, "__name__", "") != TRANSFER or code is None or code.co_varnames[:7] != PARAMETERS:
            return None
        arguments = spec.args
        return (arguments[1], bool(arguments[6])) if len(arguments) == len(PARAMETERS) else None
    return None
