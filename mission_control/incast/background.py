"""Long flows through the receiver's port, while its synchronized reads are measured."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from mission_control import interrupts
from mission_control.errors import EnvironmentFailed
from mission_control.incast.reads import ANSWER_BYTES, Reads, measure
from mission_control.lab import namespaces

BEGIN_S = 60.0
"""Seconds within which bytes of each flow must arrive: at a dilation of ten, a lost packet is retransmitted after 2, 4,
8 s."""
LONGEST_S = 86_400.0
"""Seconds that flows may take: long enough that only :class:`LongFlows` ends them."""
LOOK_S = 0.05


class LongFlows:
    """One long flow from each of some senders: gibibytes, each requested when the previous one has arrived.

    Args:
        namespace: of the receiver.
        addresses: of the senders, with ports.
        senders: their servers.
        rto_min_us: of their sockets.
    """

    def __init__(
        self, namespace: str, addresses: list[str], token: bytes, senders: Sequence[Any], rto_min_us: int | None
    ):
        self._over = threading.Event()
        self._senders = senders
        self._arrived_of = [0] * len(senders)
        self._ended: str | BaseException | None = None
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        reads = Reads(fragment=ANSWER_BYTES, blocks=10**6, warm_up=0, deadline_s=LONGEST_S, rto_min_us=rto_min_us)
        work = partial(measure, addresses, reads, token, lambda _: self._over.is_set())
        self._thread = threading.Thread(target=self._run, args=(namespace, work), name="long flows", daemon=True)

    def _run(self, namespace: str, work: Any) -> None:
        try:
            self._ended = namespaces.inside(namespace, work)["ended"]
        except BaseException as error:
            self._ended = error

    def begin(self) -> None:
        """Wait until bytes of each flow have arrived.

        Raises:
            EnvironmentFailed: no byte of one has arrived.
            KeyboardInterrupt: an interrupt came.
        """
        self._thread.start()
        end = time.monotonic() + BEGIN_S
        while not all(self._arrived()):
            interrupts.check()
            if time.monotonic() > end or not self._thread.is_alive():
                why = self._ended or f"nothing has arrived within {BEGIN_S:.0f} s"
                raise EnvironmentFailed(f"a long flow through the receiver's port does not begin: {why}")
            time.sleep(LOOK_S)

    def _arrived(self) -> list[int]:
        """Return the bytes of each flow that have arrived."""
        for number, sender in enumerate(self._senders):
            # The list omits a flow that has nothing under way now.
            seen = [look["acked_bytes"] for look in json.loads(sender.variables())]
            self._arrived_of[number] = max(self._arrived_of[number], *seen, 0)
        return self._arrived_of

    def look(self) -> None:
        """Record what has arrived so far; called repeatedly while the measured blocks are read."""
        self._last = (time.monotonic(), sum(self._arrived()))
        self._first = self._first or self._last

    def end(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def brought(self) -> tuple[float | None, str | None]:
        """Return their total goodput between the first and the last record, in Mbit/s, and why they ended early;
        ``None``: they did not."""
        early = None if self._thread.is_alive() else f"long flows ended too early: {self._ended}"
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return None, early
        (began, before), (ended, after) = self._first, self._last
        return (after - before) * 8 / (ended - began) / 1e6, early
