"""How long the objects of a task's children live: as long as the tasks that may hand them on."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any


class Holds:
    """Which tasks run on which workers, and what is held until those are done that ran at a time.

    Tasks are numbered as they begin. A hold ends on a worker with the last task there that has a lower number than it,
    so a task that begins or ends, and a hold, each cost the same however many there are.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Several where a task was stolen: its first worker may not know that yet.
        self._workers_of: defaultdict[Any, list[str]] = defaultdict(list)
        # By worker: the number of each of its tasks; and its holds, each with its own number. Both in order.
        self._tasks: defaultdict[str, dict[Any, int]] = defaultdict(dict)
        self._holds: defaultdict[str, deque[int]] = defaultdict(deque)
        # On how many workers each hold has not ended.
        self._workers_left: dict[int, int] = {}

    def begin(self, task: Any, worker: str) -> None:
        """A task is given to a worker, or to another one."""
        if worker not in self._workers_of[task]:
            self._workers_of[task].append(worker)
            self._tasks[worker][task] = next(self._numbers)

    def end(self, task: Any) -> list[int]:
        """A task is done, or was taken away; gives the holds that are over."""
        over = []
        for worker in self._workers_of.pop(task, ()):
            over += self._end_on(worker, task)
        return over

    def _end_on(self, worker: str, task: Any) -> list[int]:
        tasks, holds = self._tasks[worker], self._holds[worker]
        del tasks[task]
        oldest = next(iter(tasks.values()), math.inf)
        over = []
        while holds and holds[0] < oldest:
            hold = holds.popleft()
            self._workers_left[hold] -= 1
            if not self._workers_left[hold]:
                del self._workers_left[hold]
                over.append(hold)
        if not tasks:
            del self._tasks[worker], self._holds[worker]
        return over

    def hold(self, workers: Iterable[str]) -> int | None:
        """Until all tasks that run on these workers now are done; ``None`` if there are none."""
        busy = [worker for worker in workers if worker in self._tasks]
        if not busy:
            return None
        hold = next(self._numbers)
        for worker in busy:
            self._holds[worker].append(hold)
        self._workers_left[hold] = len(busy)
        return hold
