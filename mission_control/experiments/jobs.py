"""A few concurrent jobs, each in its own thread, with its own client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mission_control
from mission_control.experiments import observed
from mission_control.experiments.running import Running
from mission_control.scenario import Scenario
from mission_control.workers import workers_of
from mission_control.worlds.site import Site


class Jobs(Running):
    """The jobs of a point of :class:`mission_control.workloads.settings.JobSettings`."""

    def __init__(self, scenario: Scenario, site: Site, data: Path):
        super().__init__(scenario, site, data)
        workload: Any = scenario.workload
        many = workload.jobs > 1
        self.names = [f"{workload.kind}-{number + 1}" if many else workload.kind for number in range(workload.jobs)]
        self.clients = [site.connect() for _ in self.names]
        workers = len(workers_of(self.clients[0]))
        self.made = [workload.of_job(at).make(at, data / name, workers) for at, name in enumerate(self.names)]
        """The workload's jobs; some may have failed."""
        self.steps: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.started: float | None = None
        self.ended: float | None = None
        self._barrier = threading.Barrier(workload.jobs, action=self._start)

    def work(self) -> list[Callable[[], None]]:
        return [partial(self._one, number) for number in range(len(self.names))]

    def release(self) -> None:
        self._barrier.abort()

    def in_words(self) -> str:
        return "; ".join(f"{job}: {step}" for job, step in list(self.steps.items()))

    def found(self, records: list[dict[str, Any]], status: dict[str, Any]) -> dict[str, Any]:
        if not self._stop.is_set() and not self.errors and self.refusal is None:
            self.errors |= {name: "its thread ended without a result" for name in set(self.names) - set(self.seconds)}
        # In the scenario's order, whichever was admitted first: measures are of the first job.
        admitted = {name: self.admitted[name] for name in self.names if name in self.admitted}
        return {
            "jobs": observed.jobs_of(records, status, admitted, self.seconds),
            "seconds": self.ended - self.started if self.ended and self.started else None,
        }

    def _start(self) -> None:
        self.site.begin()
        self.started = time.time()

    def _one(self, number: int) -> None:
        name, work, client = self.names[number], self.made[number], self.clients[number]

        def say(text: str) -> None:
            self.steps[name] = text

        control = self.scenario.control
        demands: dict[str, Any] = {"encrypt": control.encrypt, "transport": control.transport}
        demands["priority"] = control.priorities[number] if control.priorities else 1.0
        try:
            # The cluster refuses a job before anything moves, including its input.
            with mission_control.job(name, client=client, **demands):
                pass
            work.prepare(client, say)
            self._barrier.wait()
            with mission_control.job(name, client=client, **demands) as admitted:
                self.admitted[name] = admitted
                began = time.time()
                work.run(client, say)
                self.ended = time.time()
                self.seconds[name] = self.ended - began
            checks = work.check(client, say)
            prefix = f"{name}: " if len(self.names) > 1 else ""
            self.checks.update({prefix + check: held for check, held in checks.items()})
            say("done")
        except mission_control.JobRejected as refusal:
            self.refusal = refusal
            self._barrier.abort()
        except threading.BrokenBarrierError:
            pass  # another job failed and records that
        except BaseException as error:  # CancelledError of a closed client is no subclass of Exception
            if not self._stop.is_set():
                self._barrier.abort()
                self.errors[name] = f"{type(error).__name__}: {error}"
                say(f"failed: {error}")
