"""The Throttle Controller beside an engine's worker: its data plane, and its messages to the Mission Controller.

An engine's adapter derives from the class here and implements how messages travel. `mission_control/dask/worker.py` and
`tests/engine.py` are adapters.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from mission_control import _native
from mission_control.carried import TaskObjects

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
"""Shortest time between two requests for missing messages: the answer to the first may be on its way."""


MEMORY = ("live", "kept", "spooled")
"""Kinds of memory of a data plane: in use; free and kept for reuse; on disk. In bytes."""


class ThrottleController(ABC):
    """The controller of one worker process. :attr:`endpoint` is its data plane, once it has joined."""

    endpoint: _native.Endpoint | None = None

    # --- what an adapter implements ---------------------------------------------------------------------------------

    @abstractmethod
    def say(self, kind: str, **said: Any) -> None:
        """Send to the Mission Controller, in order with the engine's own messages: an event of `controller.SAID`, or
        ``task`` (the objects that a result carries, for `Controller.carries`), ``writes`` or ``wrote`` (a task and its
        stream, for the methods of these names), or ``delegate`` (a task's next step, for `Controller.delegates`)."""

    @abstractmethod
    def soon(self, call: Callable[[], Any]) -> None:
        """Call it in the worker's thread. May be called in any thread."""

    def contend(self, contended: bool) -> None:
        """Share the worker's threads by the weights of jobs from now on, or no more: two jobs or more were named.

        By default nothing: an engine without threads of its own needs none.
        """
        return

    # --- the rest ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start without a data plane."""
        self.closing = False
        self.objects = TaskObjects()
        self.asked_again_at = 0.0
        self.missing_after: int | None = None
        """The version after which messages are missing, if some are and they were not requested yet."""

    def introduction(self, endpoint: _native.Endpoint) -> dict[str, Any]:
        """Return what :meth:`MissionController.join` takes, except the worker's name."""
        return {
            "host": endpoint.host,
            "address": endpoint.address,
            "environment": endpoint.environment,
            "problems": endpoint.problems,
            "protocol": _native.PROTOCOL,
        }

    def join(self, endpoint: _native.Endpoint, briefing: dict[str, Any]) -> None:
        """Use the data plane: the Mission Controller has let this worker join."""
        contended = endpoint.joined(json.dumps(briefing))
        self.endpoint = endpoint
        self.contend(contended)
        # Messages that arrived before were dropped.
        self._ask_again(briefing["version"])

    def hear(self, version: int, message: dict[str, Any]) -> None:
        """Carry out a message of the Mission Controller."""
        if self.closing or self.endpoint is None:
            return
        missing_after, last_of, probed, contended = self.endpoint.hear(version, json.dumps(message))
        if contended is not None:
            self.contend(contended)
        self.missing_after = missing_after
        self._ask_if_missing()
        if last_of is not None:
            self.report(last_of)
        if probed:
            threading.Thread(target=self._probe_ecn, args=(probed,), name="mission-probe", daemon=True).start()

    def report(self, last_of: str | None = None) -> None:
        """Send what has changed. An adapter calls it whenever the descriptor of `Endpoint.news` is readable.

        Args:
            last_of: A job that has ended; this report is the last that names it.
        """
        assert self.endpoint is not None
        self._ask_if_missing()
        report = self.endpoint.report(sum(os.times()[:2]), last_of)
        if report is not None:
            self.say("report", report=json.loads(report))

    def ended(self, task: Any, result: Callable[[], Any] | None) -> None:
        """End a task: free the objects that it put and its result does not carry, and report those that it carries.

        Args:
            result: Returns the result; ``None``: there is none.
        """
        carries, free = self.objects.ended(task, result)
        if carries:
            # Ahead of the message that the task is done: both take the same ordered stream.
            self.say("task", key=task, carries=carries)
        for name in free:
            assert self.endpoint is not None
            self.endpoint.free(name)

    def resources(self) -> dict[str, Any]:
        """Return what the data plane holds: bytes, objects, connections."""
        assert self.endpoint is not None
        return {"time": time.time(), **json.loads(self.endpoint.resources())}

    def _ask_if_missing(self) -> None:
        """Request missing messages, but not more often than each :data:`ASK_AGAIN_S`."""
        if self.missing_after is not None and time.monotonic() - self.asked_again_at > ASK_AGAIN_S:
            self._ask_again(self.missing_after)
            self.missing_after = None

    def _ask_again(self, after: int) -> None:
        """Request all messages after a version."""
        self.asked_again_at = time.monotonic()
        self.say("again", after=after)

    def _probe_ecn(self, senders: list[str]) -> None:
        """Let other workers send to this worker at the same time, and report whether their packets were marked or
        dropped."""
        endpoint = self.endpoint
        if endpoint is None:
            return
        try:
            seen = json.loads(endpoint.probe_ecn(senders))
        except (OSError, RuntimeError) as error:
            # A sender is gone, or this worker closes: there is no result, and the next round probes again.
            logger.info("ECN was not measured: %s", error)
            return
        self.soon(lambda: self.say("probed", seen=seen))
