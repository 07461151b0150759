"""What the scheduler's plug-in knows of the jobs that tasks belong to."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class Jobs:
    """Which task belongs to which job; a job ends with its last task, once no client submits for it any more."""

    def __init__(self) -> None:
        self.of: dict[Any, str] = {}
        # By task: the specification that it was submitted with; its job may have changed since.
        self.submitted: dict[Any, dict[str, Any]] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        self._tasks: defaultdict[str, int] = defaultdict(int)
        self._owners: dict[str, str] = {}
        self._holds: defaultdict[str, list[str]] = defaultdict(list)

    def name(self, wanted: str, client: str) -> str:
        """The name as wanted, unless a job of another client bears it."""
        if self._owners.setdefault(wanted, client) == client:
            return wanted
        return f"{wanted}@{client.rpartition('-')[2][:8]}"

    def release_name(self, job: str) -> None:
        """A job under this name was rejected: unless one runs under it, another client may use the name."""
        if job not in self.specs:
            self._owners.pop(job, None)

    def add(self, key: Any, spec: dict[str, Any]) -> None:
        job = spec["job"]
        self.of[key] = job
        self.submitted[key] = spec
        self._tasks[job] += 1

    def remove(self, key: Any) -> str | None:
        """The job that ends with this task, if one does."""
        self.submitted.pop(key, None)
        job = self.of.pop(key, None)
        if job is None:
            return None
        self._tasks[job] -= 1
        return job if self._over(job) else None

    def hold(self, job: str, client: str) -> None:
        """A client is going to submit for this job."""
        self._holds[job].append(client)

    def leave(self, job: str, client: str) -> bool:
        """The client submits no more; whether the job is over with that."""
        if client in self._holds[job]:
            self._holds[job].remove(client)
        return self._over(job)

    def leave_all(self, client: str) -> list[str]:
        """The jobs that are over because this client is gone."""
        held = [job for job, clients in self._holds.items() if client in clients]
        for job in held:
            self._holds[job] = [entry for entry in self._holds[job] if entry != client]
        return [job for job in held if self._over(job)]

    def _over(self, job: str) -> bool:
        if self._tasks[job] or self._holds[job] or job not in self.specs:
            return False
        del self._tasks[job], self._holds[job], self.specs[job]
        self._owners.pop(job, None)
        return True
