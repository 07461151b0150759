"""The Mission Controller beside an engine's scheduler: passes events to core, and carries out core's commands.

Core (`crates/core`, `control`) decides and remembers everything. An engine's adapter derives from the class here. It
numbers the engine's tasks, reports what becomes of them, and implements four methods. Adapters are
`mission_control/dask/scheduler.py` and `tests/engine.py`.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mission_control import _native
from mission_control.policies import Policy, Runner, name_of, runner_of
from mission_control.printable import printable
from mission_control.records import Log
from mission_control.service.membership import Membership, Service

logger = logging.getLogger(__name__)

SAID = {
    "report": ("worker", "report"),
    "again": ("worker", "after"),
    "probed": ("worker", "seen"),
    "leave": ("job", "client"),
    "shuffle-in": ("shuffle", "run", "rows", "unwanted", "cohorts"),
    "shuffle-out": ("shuffle", "run", "output", "rows"),
}
"""Events that workers and clients send, with their fields. Other fields are dropped."""


LOGGED_MAX = 500
"""Characters of a text that another process wrote."""


class MissionController(ABC):
    """The controller of one cluster. All methods run in the thread of the engine's scheduler, except where noted."""

    # --- what an adapter implements ---------------------------------------------------------------------------------

    @abstractmethod
    def tell(self, worker: str, version: int, message: dict[str, Any]) -> None:
        """Send a message to a worker, in order. The worker passes it to :meth:`ThrottleController.hear`."""

    @abstractmethod
    def recompute(self, tasks: Sequence[int]) -> None:
        """Drop the results of these tasks, with all copies, and compute again what is still needed.

        A task that has delegated, and waits, begins again with its first step.
        """

    @abstractmethod
    def soon(self, call: Callable[[], Any]) -> None:
        """Call it in the scheduler's thread, after the current event. May be called in any thread."""

    @abstractmethod
    def name_of_task(self, task: int) -> str:
        """Return the engine's name of a task, for records."""

    def taken(self, shuffle: str, run: int, cohort: int) -> None:
        """Notify the workers of a shuffle that nobody needs the parts of this cohort any more.

        By default parts are freed when the run ends. That is enough for an engine without its own shuffles.
        """
        return

    def contend(self, contended: bool) -> None:
        """Share the scheduler's queue by the weights of jobs from now on, or no more: two jobs or more were named.

        By default nothing: an engine without such a queue needs none.
        """
        return

    def drain(self, workers: Sequence[str]) -> None:
        """Retire these workers once they have no task: an operator drains their hosts.

        By default they stay, with a log message.
        """
        logger.warning("an operator wants the hosts of these workers empty; retire them: %s", ", ".join(workers))

    # --- the rest ---------------------------------------------------------------------------------------------------

    def begin(self, policy: str | Policy, flows_per_host: int | str, environment: dict[str, Any]) -> None:
        """Start with an empty cluster.

        Args:
            environment: What hosts can do, until the first one joins (`Environment`).

        Raises:
            ValueError: The policy is unknown, or the number of flows is wrong. The text names the fix.
        """
        self.runner = runner_of(policy, self._weighed)
        self.controller = _native.Controller(name_of(policy), flows_per_host, json.dumps(environment))
        self.began = time.monotonic()
        self.log = Log()
        self.membership: Membership | None = None

    def follow(self, service: Service) -> None:
        """Join a control service. Its weights apply while the connection to it works."""
        self.membership = Membership(service, self._hear_service, self.soon)
        self.event("follow", **self.membership.follow())

    def follow_no_more(self) -> None:
        """Leave the service, if this cluster is a member of one."""
        if self.membership is not None:
            self.membership.close()
            self.membership = None

    def _hear_service(self, event: str) -> None:
        try:
            self.carry_out(self.controller.handle(self.now(), f'{{"event":"service","heard":{event}}}'))
        except ValueError as error:
            logger.warning("The control service sent an invalid message: %s", one_line(str(error)))
            if self.membership is not None:
                self.membership.do({"command": "disconnect"})
                why = "it sent an invalid message; install the same version on both"
                self._hear_service(json.dumps({"event": "disconnected", "why": why}))

    def now(self) -> float:
        """Return the seconds since :meth:`begin`."""
        return time.monotonic() - self.began

    def event(self, kind: str, **values: Any) -> dict[str, Any]:
        """Pass an event to core and carry out its commands.

        Returns:
            The commands that answer the caller, by kind.

        Raises:
            ValueError: The event is invalid.
        """
        return self.carry_out(self.controller.handle(self.now(), json.dumps({"event": kind, **values})))

    def said(self, kind: str, /, **said: Any) -> None:
        """Handle an event of :data:`SAID` from a worker or a client."""
        self.event(kind, **{field: said[field] for field in SAID[kind]})

    def carry_out(self, commands: str | None) -> dict[str, Any]:
        """Carry out core's commands (JSON); return those that answer the caller, by kind."""
        answers: dict[str, Any] = {}
        if commands is None:
            return answers
        recompute: list[int] = []
        for command in json.loads(commands):
            kind = command.pop("command")
            if kind == "tell":
                self.tell(**command)
            elif kind == "record":
                self._record(command["record"])
            elif kind == "recompute":
                recompute += command["tasks"]
            elif kind == "soon":
                self.soon(lambda: self.event("flush"))
            elif kind == "service":
                if self.membership is not None:
                    self.membership.do(command["does"])
            elif kind == "drain":
                self.drain(command["workers"])
            elif kind == "taken":
                self.taken(**command)
            elif kind == "contention":
                self.contend(command["contended"])
            elif kind == "weigh":
                if self.runner is not None:
                    self.runner.ask(command["transfers"])
            else:
                answers[kind] = command
        if recompute:
            # Last: it causes events of the engine with their own commands, and messages must stay in order.
            self.recompute(recompute)
        return answers

    def join(self, **introduction: Any) -> dict[str, Any]:
        """Admit a worker.

        Args:
            introduction: :meth:`ThrottleController.introduction`, and ``worker``: its name.

        Returns:
            What :meth:`ThrottleController.join` takes; or ``rejected``: why the worker may not join.
        """
        said = self.event("join", **{**introduction, "environment": json.loads(introduction["environment"])})
        return {"rejected": said["rejected"]["why"]} if "rejected" in said else said["briefing"]

    def admit(self, spec: dict[str, Any], client: str) -> dict[str, Any]:
        """Admit a job, until its client leaves it and its last task is done.

        Returns:
            ``job``: the name under which the job runs; ``refused``: why it may not run, or ``None``.
        """
        return self.event("admit", spec=spec, client=client)["admitted"]

    def submit(self, tasks: list[Any], client: str, spec: str | None, by: int | None, span: str | None) -> None:
        """Register new tasks: ``(number, stage, kind, numbers of inputs)`` of each.

        Args:
            spec: The job as the program specified it (JSON). If it is invalid, the tasks run without it.
            by: The task that submitted them.
            span: The program's name for this part of the work.
        """
        try:
            commands = self.controller.tasks(self.now(), tasks, client, spec, by, span)
        except ValueError as error:
            text = "%d tasks of %s have no valid job: %s. Use mission_control.job(...)"
            logger.warning(text, len(tasks), one_line(client), one_line(str(error)))
            commands = self.controller.tasks(self.now(), tasks, client, None, by, span)
        self.carry_out(commands)

    def change(self, job: str, transport: str | None, priority: float | None) -> dict[str, Any]:
        """Change the transport or the priority of a running job; ``error`` and ``refused`` have the reason of a
        failure."""
        change: dict[str, Any] = {"priority": priority}
        if priority is not None:
            try:
                _native.check_priority(job, priority)
            except (ValueError, TypeError, OverflowError) as error:
                return {"error": str(error), "refused": None}
        if transport is not None:
            if transport not in ("auto", *_native.transports()):
                known = ", ".join(_native.transports())
                return {"error": f"there is no transport {transport!r}: use auto, {known}", "refused": None}
            change["transport"] = None if transport == "auto" else transport
        return self.event("change", job=job, change=change)["changed"]

    def set_policy(self, policy: str | Policy) -> str | None:
        """Replace the policy. If it is invalid, keep the old one and return the error."""
        before = self.runner
        try:
            self.runner = runner_of(policy, self._weighed)
            self.event("policy", policy=name_of(policy))
        except ValueError as error:
            self.runner = before
            return str(error)
        return None

    def status(self, most: int | None = None) -> dict[str, Any]:
        """Return the state of the cluster, with at most ``most`` transfers: those that moved last."""
        status = json.loads(self.controller.status(most))
        for chain in (own for job in status["jobs"] for own in job["chains"]):
            chain["key"] = self.name_of_task(chain.pop("task"))
        return {"time": time.time(), **status}

    def _weighed(self, runner: Runner, answer: dict[str, Any]) -> None:
        """Apply a policy's answer, unless the policy was replaced meanwhile. Runs in any thread."""
        self.soon(lambda: self.event("weighed", **answer) if runner is self.runner else None)

    def _record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "policy-error":
            logger.warning(one_line(record["why"]))
        elif record["kind"] == "alone":
            logger.warning("This cluster uses its own weights: %s", one_line(record["why"]))
        elif record["kind"] == "not-handed-over":
            size = _native.format_bytes(record["bytes"])
            logger.warning(
                "worker %s leaves with %d objects (%s) that nobody else has, so their tasks run again: %s",
                *(record["worker"], record["objects"], size, one_line(record["why"])),
            )
        if "task" in record:
            record["key"] = self.name_of_task(record.pop("task"))
        self.log.add(record)


def one_line(text: str) -> str:
    """Return the start of a text that another process wrote, fit for a log."""
    return printable(text[:LOGGED_MAX])
