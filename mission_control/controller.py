"""The Mission Controller beside an engine's scheduler: core hears what happens there, and what core says is done.

Everything is decided and remembered in `crates/core` (`control`). An engine's adapter numbers its tasks, says what
becomes of them, and does what only it can: `mission_control/dask/scheduler.py` is one, `tests/engine.py` another.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from mission_control import _native
from mission_control.policies import Policy, Runner, name_of, runner_of
from mission_control.records import Log

logger = logging.getLogger(__name__)

SAID = {
    "report": ("worker", "report"),
    "again": ("worker", "after"),
    "probed": ("worker", "seen"),
    "leave": ("job", "client"),
}
"""Events that workers and clients say as core hears them, and what each has: nothing else passes."""


class MissionController:
    """Of one cluster; all of it in the thread of the engine's scheduler."""

    # --- what an adapter does in its engine's way -------------------------------------------------------------------

    def tell(self, worker: str, version: int, message: dict[str, Any]) -> None:
        """Sends a message to a worker, after those before it; :meth:`ThrottleController.hear` takes it there."""
        raise NotImplementedError

    def recompute(self, tasks: Sequence[int]) -> None:
        """The results of these tasks are invalid, and all copies: computes again what is still needed of them."""
        raise NotImplementedError

    def soon(self, call: Callable[[], Any]) -> None:
        """Calls it in the scheduler's thread, when that is done with what it is at; called in whatever thread."""
        raise NotImplementedError

    def name_of_task(self, task: int) -> str:
        """As the engine calls it, for records."""
        raise NotImplementedError

    # --- the rest ---------------------------------------------------------------------------------------------------

    def begin(self, policy: str | Policy, flows_per_host: int | str, environment: dict[str, Any]) -> None:
        """Knows of nothing yet.

        Args:
            environment: What hosts can do before any has said so (`Environment`).

        Raises:
            ValueError: There is no such policy, or the budget is wrong; one line that names the mend.
        """
        self.runner = runner_of(policy, self._weighed)
        self.controller = _native.Controller(name_of(policy), flows_per_host, json.dumps(environment))
        self.began = time.monotonic()
        self.log = Log()

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def event(self, kind: str, **values: Any) -> dict[str, Any]:
        """Lets core decide, and carries its commands out; gives those that answer whoever asked, by kind.

        Raises:
            ValueError: The event makes no sense; one line.
        """
        return self.carry_out(self.controller.handle(self.now(), json.dumps({"event": kind, **values})))

    def said(self, kind: str, /, **said: Any) -> None:
        """What a worker or a client says as core hears it."""
        self.event(kind, **{field: said[field] for field in SAID[kind]})

    def carry_out(self, commands: str | None) -> dict[str, Any]:
        """Does what core says (JSON)."""
        answers = {}
        for command in json.loads(commands) if commands is not None else ():
            kind = command.pop("command")
            if kind == "tell":
                self.tell(**command)
            elif kind == "record":
                self._record(command["record"])
            elif kind == "recompute":
                self.recompute(command["tasks"])
            elif kind == "soon":
                self.soon(lambda: self.event("flush"))
            elif kind == "weigh":
                if self.runner is not None:
                    self.runner.ask(command["transfers"])
            else:
                answers[kind] = command
        return answers

    def join(self, **introduction: Any) -> dict[str, Any]:
        """A worker's data plane is up; gives all that it must know (:meth:`ThrottleController.join`), or why it may not
        join (``rejected``)."""
        said = self.event("join", **{**introduction, "environment": json.loads(introduction["environment"])})
        return {"rejected": said["rejected"]["why"]} if "rejected" in said else said["briefing"]

    def admit(self, spec: dict[str, Any], client: str) -> dict[str, Any]:
        """Whether a job may run (``refused``), and the name under which it does; it arrives now, and stays at least
        until left."""
        return self.event("admit", spec=spec, client=client)["admitted"]

    def change(self, job: str, transport: str | None, priority: float | None) -> dict[str, Any]:
        """Another transport or priority for a job that runs; its workers hear of it at once."""
        change: dict[str, Any] = {"priority": priority}
        if transport is not None:
            if transport not in ("auto", *_native.transports()):
                known = ", ".join(_native.transports())
                return {"error": f"there is no transport {transport!r}: use auto, {known}", "refused": None}
            change["transport"] = None if transport == "auto" else transport
        return self.event("change", job=job, change=change)["changed"]

    def set_policy(self, policy: str | Policy) -> str | None:
        """Another policy; gives what is wrong with it, if anything is: the last one stays then."""
        before = self.runner
        try:
            self.runner = runner_of(policy, self._weighed)
            self.event("policy", policy=name_of(policy))
        except ValueError as error:
            self.runner = before
            return str(error)
        return None

    def status(self, most: int | None = None) -> dict[str, Any]:
        """All that can be shown of the cluster now; of the transfers at most so many, those that moved last."""
        return {"time": time.time(), **json.loads(self.controller.status(most))}

    def _weighed(self, runner: Runner, answer: dict[str, Any]) -> None:
        """A policy's answer, in whatever thread, unless another one is in force by now."""
        self.soon(lambda: self.event("weighed", **answer) if runner is self.runner else None)

    def _record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "policy-error":
            logger.warning(record["why"])
        elif record["kind"] == "not-handed-over":
            size = _native.format_bytes(record["bytes"])
            logger.warning(
                "worker %s leaves with %d objects (%s) that nobody else has, so their tasks run again: %s",
                *(record["worker"], record["objects"], size, record["why"]),
            )
        if "task" in record:
            record["key"] = self.name_of_task(record.pop("task"))
        self.log.add(record)
