"""Custom policies in Python: run in a separate thread of the scheduler, with a timeout."""

from __future__ import annotations

import copy
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
"""Timeout in seconds: weights are recomputed each second, and a policy that takes half of that delays all weights."""

Policy = Callable[[Sequence[dict[str, Any]]], Mapping[str, float] | Mapping[tuple[str, str, str], float]]
"""A function that takes the active jobs, oldest first, and returns the weight of each, above 0, in any scale: by the
job's name, or for each transfer by ``(job, from, to)``. It should be fast, and keep no state between calls that it
cannot lose.

A job is ``job`` (its name), ``user``, ``class``, ``arrival`` (its place in the order of arrival), ``priority``,
``deadline_secs`` (until the user wants it done), ``age_secs`` and ``transfers``, those that are active. Each of these
is ``from``, ``to``, ``arrival``, ``pattern``, ``evidence``, ``machines`` (hosts that send or receive),
``asked_bytes``, ``served_bytes``, ``to_receive`` and ``to_send`` (bytes that are still to come, by receiving and by
sending host), ``bytes_per_sec`` and ``age_secs``: what core's own policies see (`TransferView`)."""


def load(name: str) -> Policy:
    """Load the policy ``python:name``: an entry point of the group ``mission_control.policies``, or
    ``module:function``.

    Raises:
        ValueError: there is no such policy; the text is one line with a fix.
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


def name_of(policy: str | Policy) -> str:
    """Return the name of a policy, for core and for output.

    Raises:
        ValueError: the policy is neither a name nor a function.
    """
    if isinstance(policy, str):
        return policy
    if not callable(policy):
        raise ValueError(f"policy {policy!r}: give the name of one, or a function of the active jobs")
    return PREFIX + getattr(policy, "__qualname__", type(policy).__name__)


def runner_of(policy: str | Policy, say: Callable[[Runner, dict[str, Any]], None]) -> Runner | None:
    """Return the runner of a custom policy; ``None`` for policies of core.

    Raises:
        ValueError: there is no such policy.
    """
    if isinstance(policy, str):
        if not policy.startswith(PREFIX):
            return None
        policy = load(policy.removeprefix(PREFIX))
    return Runner(policy, say)


class Runner:
    """Runs a policy in a separate thread, so that a stalled policy blocks nothing.

    Args:
        policy: the function.
        say: called with the runner and the answer for the Mission Controller (`Weighed`), in any thread; it must pass
            them to the scheduler's thread.
    """

    def __init__(self, policy: Policy, say: Callable[[Runner, dict[str, Any]], None]):
        self.policy = policy
        self.say = say
        self._busy = False

    def ask(self, transfers: list[dict[str, Any]]) -> None:
        """Start a computation of the weights of active transfers, unless one is running."""
        if self._busy:
            return
        self._busy = True
        answered = threading.Event()
        # The watcher starts first, so that a stalled policy is detected.
        targets = {"mission-policy-watch": self._watch, "mission-policy": self._run}
        try:
            for name, target in targets.items():
                threading.Thread(target=target, args=(transfers, answered), name=name, daemon=True).start()
        except RuntimeError as error:  # no thread can be started now
            answered.set()
            self._busy = False
            logger.warning("The policy was not asked: %s", error)

    def _run(self, transfers: list[dict[str, Any]], answered: threading.Event) -> None:
        try:
            # The policy gets a copy, because the original returns with the answer.
            counts = counts_of(self.policy(jobs_of(copy.deepcopy(transfers))))
            json.dumps(counts, allow_nan=False)
            answer: dict[str, Any] = {"Ok": counts}
        except BaseException as error:  # a user's function may raise anything, even SystemExit
            answer = {"Err": f"it raised {type(error).__name__}: {error}"}
        late = answered.is_set()
        answered.set()
        self._busy = False
        if not late:
            self.say(self, {"asked": transfers, "counts": answer})

    def _watch(self, transfers: list[dict[str, Any]], answered: threading.Event) -> None:
        if not answered.wait(PATIENCE_S):
            answered.set()
            stalled = {"Err": f"it has not answered within {PATIENCE_S} s"}
            self.say(self, {"asked": transfers, "counts": stalled})


def jobs_of(transfers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the jobs for a policy, oldest first, each with its transfers."""
    jobs: dict[int, dict[str, Any]] = {}
    for transfer in transfers:
        job = jobs.setdefault(transfer["job"]["arrival"], {**transfer["job"], "transfers": []})
        facts = {name: value for name, value in transfer.items() if name not in ("job", "transfer")}
        stages = {name: transfer["transfer"][name] for name in ("from", "to")}
        job["transfers"].append({**stages, **facts})
    return [jobs[arrival] for arrival in sorted(jobs)]


def counts_of(counts: Mapping[Any, float]) -> dict[str, Any]:
    """Convert a policy's result to the form that core reads.

    Raises:
        TypeError: its keys are neither names of jobs nor transfers.
    """
    if all(isinstance(key, str) for key in counts):
        return {"jobs": {job: float(count) for job, count in counts.items()}}
    if all(isinstance(key, tuple) and [type(word) for word in key] == [str] * 3 for key in counts):
        stages = [dict(zip(("job", "from", "to"), key, strict=True)) for key in counts]
        return {"transfers": [[key, float(count)] for key, count in zip(stages, counts.values(), strict=True)]}
    raise TypeError("its keys must be all names of jobs, or all transfers as (job, from, to)")
