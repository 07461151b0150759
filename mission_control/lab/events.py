"""Watches a run in a lab, and executes the events of its scenario."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mission_control.errors import BadInput
from mission_control.lab import namespaces
from mission_control.lab.lab import Lab
from mission_control.lab.watch import Watch

if TYPE_CHECKING:
    from mission_control.scenario import Event, Topology


def dilated(topology: Topology) -> list[Event]:
    """Return the events with dilated rates."""
    slow = topology.dilation
    return [event.model_copy(update={"rate": event.rate // slow}) if event.rate else event for event in topology.events]


class Watching:
    """Samples a run in a lab, and executes its events meanwhile."""

    def __init__(self, built: Lab, events: Sequence[Event]):
        self.built, self.events = built, sorted(events, key=lambda event: event.after)
        self.watch = Watch(built)
        self.missed: list[str] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self.missed = []
        self.watch = Watch(self.built)
        self.watch.start()
        self._over.clear()
        # One thread executes all events: each reads a port's settings and writes them again.
        self._thread = threading.Thread(target=self._happen, args=(time.monotonic(),), name="lab-events", daemon=True)
        self._thread.start()

    def _happen(self, began: float) -> None:
        for event in self.events:
            if self._over.wait(max(0.0, began + event.after / 1e3 - time.monotonic())):
                return
            try:
                self.change(event)
            except (namespaces.Failed, OSError, BadInput) as error:
                self.missed.append(f"{event.do} {event.host} did not happen: {error}")

    def change(self, event: Event) -> None:
        if event.do == "cut":
            self.built.cut(event.host, event.path)
        elif event.do == "restore":
            self.built.restore(event.host, event.path)
        elif event.do == "die":
            self.built.kill(event.host)
        elif event.do == "rate":
            self.built.slow(event.host, event.rate or 0, event.path)
        elif event.do == "buffer":
            self.built.resize(event.buffer or 0)
        else:
            self.built.mark(event.ecn_threshold or 0)

    def stop_and_summarize(self) -> dict[str, Any]:
        self.end()
        result = self.watch.stop_and_summarize()
        because = [*result["invalid_because"], *self.missed]
        return {**result, "valid": not because, "invalid_because": because}

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()  # an event that has begun completes
        self._thread = None
        self.watch.stop()
