"""The Throttle Controller beside an engine's worker: its data plane, and what is said of it to the Mission Controller.

An engine's adapter carries the words: `mission_control/dask/worker.py` is one, `tests/engine.py` another.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from mission_control import _native
from mission_control.carried import TaskObjects

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
"""At the earliest, where something that the scheduler said is missing: until then the answer may be on its way."""


class ThrottleController:
    """Of one worker process; :attr:`endpoint` is its data plane once that is up."""

    endpoint: _native.Endpoint | None = None

    # --- what an adapter does in its engine's way -------------------------------------------------------------------

    def say(self, kind: str, **said: Any) -> None:
        """Says something to the Mission Controller, in order with what the engine says: what `controller.SAID` has, or
        ``task`` (what a result carries, for `Controller.carries`)."""
        raise NotImplementedError

    def soon(self, call: Callable[[], Any]) -> None:
        """Calls it in the worker's thread; itself called in whatever thread."""
        raise NotImplementedError

    # --- the rest ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing is up yet."""
        self.closing = False
        self.objects = TaskObjects()
        self.asked_again_at = 0.0

    def introduction(self, endpoint: _native.Endpoint) -> dict[str, Any]:
        """What :meth:`MissionController.join` is told of this worker, beside how the engine calls it."""
        return {
            "host": endpoint.host,
            "address": endpoint.address,
            "environment": endpoint.environment,
            "problems": endpoint.problems,
            "protocol": _native.PROTOCOL,
        }

    def join(self, endpoint: _native.Endpoint, briefing: dict[str, Any]) -> None:
        """The Mission Controller takes this worker: its data plane is up."""
        endpoint.joined(json.dumps(briefing))
        self.endpoint = endpoint
        # Messages that arrived meanwhile were dropped.
        self._ask_again(briefing["version"])

    def hear(self, version: int, message: dict[str, Any]) -> None:
        """Does what the Mission Controller says."""
        if self.closing or self.endpoint is None:
            return
        missing_after, last_of, probed = self.endpoint.hear(version, json.dumps(message))
        if missing_after is not None and time.monotonic() - self.asked_again_at > ASK_AGAIN_S:
            self._ask_again(missing_after)
        if last_of is not None:
            self.report(last_of)
        if probed:
            threading.Thread(target=self._probe_ecn, args=(probed,), name="mission-probe", daemon=True).start()

    def report(self, last_of: str | None = None) -> None:
        """Tells what has changed, to be done every `REPORT_EVERY_MS`; and, where the scheduler asks for the last words
        on a job, that this is all."""
        assert self.endpoint is not None
        report = self.endpoint.report(sum(os.times()[:2]), last_of)
        if report is not None:
            self.say("report", report=json.loads(report))

    def ended(self, task: Any, result: Callable[[], Any] | None) -> None:
        """A task is over: frees what it put and its result does not carry, and says what the result carries.

        Args:
            result: Gives the result; ``None``: there is none.
        """
        carries, free = self.objects.ended(task, result)
        if carries:
            # Ahead of the message that the task is done: both take the same ordered stream.
            self.say("task", key=task, carries=carries)
        for name in free:
            assert self.endpoint is not None
            self.endpoint.free(name)

    def resources(self) -> dict[str, Any]:
        """What the data plane holds now."""
        assert self.endpoint is not None
        return {"time": time.time(), **json.loads(self.endpoint.resources())}

    def _ask_again(self, after: int) -> None:
        """Asks for everything that comes after a version."""
        self.asked_again_at = time.monotonic()
        self.say("again", after=after)

    def _probe_ecn(self, senders: list[str]) -> None:
        """Has others send here at once, and tells what became of their packets."""
        endpoint = self.endpoint
        if endpoint is None:
            return
        try:
            seen = json.loads(endpoint.probe_ecn(senders))
        except (OSError, RuntimeError) as error:
            # A sender that is gone, or this worker that closes: nothing was learnt, and the next round asks again.
            logger.info("ECN was not measured: %s", error)
            return
        self.soon(lambda: self.say("probed", seen=seen))
