"""What a reduce task gets, in groups that fit into its share of its worker's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mission_control.objects import Reference

if TYPE_CHECKING:
    from distributed import Worker

MEMORY_FRACTION = 0.125
"""Of the worker's memory the parts of all its reduce tasks may take this; what is more is merged to files first."""
PARTS_MAX = 128
"""Of a group."""


def share_of_memory(worker: Worker) -> int:
    """Return the bytes that a reduce task may have in memory; of a worker without a limit, of its machine's."""
    from distributed.system import MEMORY_LIMIT

    limit = worker.memory_manager.memory_limit or MEMORY_LIMIT
    return int(limit * MEMORY_FRACTION / worker.state.nthreads)


def in_groups(references: Sequence[Reference], index: int, limit: int) -> list[list[Reference]]:
    """Cut objects into groups of few whose parts have so many bytes together, or are one; without empty parts."""
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
