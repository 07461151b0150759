"""Policies of the user's own, in Python: run apart from the scheduler's loop, within a time."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

logger = logging.getLogger(__name__)

ENTRY_POINTS = "mission_control.policies"
PREFIX = "python:"
PATIENCE_S = 0.5
"""Weights are recomputed each second: a policy that takes half of that holds back those of everybody."""

Policy = Callable[[Sequence[dict[str, Any]]], Mapping[str, float]]
"""Given the active jobs, oldest first (``job``, ``arrival``, ``priority``, ``machines``, ``broadcasts``): how much each
counts, by name, above 0, of any scale. It should be quick, and keep nothing between calls that it cannot lose."""


def load(name: str) -> Policy:
    """The policy that ``python:name`` names: an entry point of the group ``mission_control.policies``, or
    ``module:function``.

    Raises:
        ValueError: there is none; one line that names the mend.
    """
    found = {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINTS)}
    if name in found:
        return found[name].load()
    module, _, function = name.partition(":")
    try:
        policy = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(sorted(found)) or "none is installed"
        raise ValueError(
            f"there is no policy {PREFIX}{name}: use module:function that the scheduler can import, or an entry point "
            f"of {ENTRY_POINTS} ({known}): {error}"
        ) from None
    if not callable(policy):
        raise ValueError(f"{PREFIX}{name} is no function")
    return policy


class Runner:
    """Runs a policy in a thread of its own, so that one that stalls holds nobody up.

    Args:
        policy: the function.
        say: is given the event for the Mission Controller, in whatever thread; it must hand it to its own.
    """

    def __init__(self, policy: Policy, say: Callable[[dict[str, Any]], None]):
        self.policy = policy
        self.say = say
        self._busy = False

    def ask(self, jobs: list[dict[str, Any]]) -> None:
        """Has the weights computed; while an earlier question is unanswered nothing more is asked."""
        if self._busy:
            return
        self._busy = True
        answered = threading.Event()
        # Its watcher first: a policy that nobody watches could stall unseen.
        targets = {"mission-policy-watch": self._watch, "mission-policy": self._run}
        try:
            for name, target in targets.items():
                threading.Thread(target=target, args=(jobs, answered), name=name, daemon=True).start()
        except RuntimeError as error:  # no thread can be had now
            answered.set()
            self._busy = False
            logger.warning("The policy was not asked: %s", error)

    def _run(self, jobs: list[dict[str, Any]], answered: threading.Event) -> None:
        try:
            counts = {str(job): float(count) for job, count in self.policy([dict(job) for job in jobs]).items()}
            json.dumps(counts, allow_nan=False)
            answer: dict[str, Any] = {"Ok": counts}
        except BaseException as error:  # whatever a stranger's function raises, SystemExit too
            answer = {"Err": f"it raised {type(error).__name__}: {error}"}
        late = answered.is_set()
        answered.set()
        self._busy = False
        if not late:
            self.say({"event": "weighed", "asked": jobs, "counts": answer})

    def _watch(self, jobs: list[dict[str, Any]], answered: threading.Event) -> None:
        if not answered.wait(PATIENCE_S):
            answered.set()
            stalled = {"Err": f"it has not answered within {PATIENCE_S} s"}
            self.say({"event": "weighed", "asked": jobs, "counts": stalled})
