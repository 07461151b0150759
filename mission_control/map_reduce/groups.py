"""The input of a reduce task, in groups that fit into its share of its worker's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mission_control.objects import Reference

if TYPE_CHECKING:
    from distributed import Worker

MEMORY_FRACTION = 0.125
"""Fraction of a worker's memory for the parts of all its reduce tasks; more is merged to files first."""
PARTS_MAX = 128
"""Most objects of a group."""


def share_of_memory(worker: Worker) -> int:
    """Return the bytes that a reduce task may hold in memory; without a limit of the worker, from the machine's
    memory."""
    from distributed.system import MEMORY_LIMIT

    limit = worker.memory_manager.memory_limit or MEMORY_LIMIT
    return int(limit * MEMORY_FRACTION / worker.state.nthreads)


def in_groups(references: Sequence[Reference], index: int, limit: int) -> list[list[Reference]]:
    """Split objects into groups of a few whose parts have at most this size together, or of one; skip empty parts."""
    groups: list[list[Reference]] = []
    held = 0
    for reference in references:
        size = reference.sizes[index]
        if not size:
            continue
        if not groups or held + size > limit or len(groups[-1]) == PARTS_MAX:
            groups.append([])
            held = 0
        groups[-1].append(reference)
        held += size
    return groups
