"""A heap of Dask's tasks, one queue per job: a function chooses the job whose first task comes next.

Dask's ``priority=`` comes first, within a job and between jobs: a job is only chosen if no other has a first task of a
higher priority that its user gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distributed.collections import HeapSet


class ByJob(HeapSet):
    """As Dask's heap, but the smallest element is that of the chosen job."""

    __slots__ = ("choose", "front", "heaps", "job_of", "jobs_of")

    def __init__(self, *, key: Callable[[Any], Any], job_of: Callable[[Any], str], choose: Callable[[list[str]], str]):
        super().__init__(key=key)
        # `choose` gets jobs of equal priority in Dask's own order.
        self.job_of, self.choose = job_of, choose
        self.heaps: dict[str, HeapSet] = {}
        self.jobs_of: dict[Any, str] = {}
        # The element that `peek` returned stays first until it is removed.
        self.front: str | None = None

    def chosen(self) -> str:
        """The job whose first task comes next."""
        if len(self.heaps) == 1:
            return next(iter(self.heaps))
        first = {job: self.key(heap.peek()) for job, heap in self.heaps.items()}
        # Dask's priorities are tuples that begin with the negative of what the user gave.
        highest = min(priority[0] for priority in first.values())
        jobs = sorted((job for job in first if first[job][0] == highest), key=first.__getitem__)
        return jobs[0] if len(jobs) == 1 else self.choose(jobs)

    @classmethod
    def of(cls, plain: HeapSet, job_of: Callable[[Any], str], choose: Callable[[list[str]], str]) -> ByJob:
        own = cls(key=plain.key, job_of=job_of, choose=choose)
        for value in plain.sorted():
            own.add(value)
        return own

    def plain(self) -> HeapSet:
        """Convert to Dask's heap with the same elements."""
        own = HeapSet(key=self.key)
        for value in self:
            own.add(value)
        return own

    def __reduce__(self) -> tuple[Callable, tuple]:
        return self.plain().__reduce__()

    def add(self, value: Any) -> None:
        if value not in self._data:
            self._data.add(value)
            job = self.jobs_of[value] = self.job_of(value)
            if job not in self.heaps:
                self.heaps[job] = HeapSet(key=self.key)
            front = self.heaps[self.front].peek() if self.front is not None else None
            self.heaps[job].add(value)
            if front is not None and self.key(value)[0] < self.key(front)[0]:
                self.front = None  # its user gave it a higher priority

    def discard(self, value: Any) -> None:
        if value in self._data:
            self._data.discard(value)
            job = self.jobs_of.pop(value)
            self.heaps[job].discard(value)
            if not self.heaps[job]:
                del self.heaps[job]
            self.front = None

    def peek(self) -> Any:
        if not self._data:
            raise KeyError("peek into empty set")
        if self.front is None:
            self.front = self.chosen()
        return self.heaps[self.front].peek()

    def pop(self) -> Any:
        value = self.peek()
        self.discard(value)
        return value

    def peekright(self) -> Any:
        if not self._data:
            raise KeyError("peek into empty set")
        return next(reversed(self.heaps.values())).peekright()

    def popright(self) -> Any:
        value = self.peekright()
        self.discard(value)
        return value

    def sorted(self) -> Iterator[Any]:
        return iter(sorted(self._data, key=self.key))

    def clear(self) -> None:
        self._data.clear()
        self.heaps.clear()
        self.jobs_of.clear()
        self.front = None
