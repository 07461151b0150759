"""Long flows through the receiver's port, while its synchronized reads are measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from mission_control.errors import EnvironmentFailed
from mission_control.incast.reads import ANSWER_BYTES, Reads, measure
from mission_control.lab import namespaces

BEGIN_S = 20.0
"""In which each has sent something: a connection in the slowest lab takes some round trips of 100 ms."""
LONGEST_S = 86_400.0
"""They are ended by who has begun them."""
LOOK_S = 0.05


class LongFlows:
    """One long flow from each of some senders, which never has nothing to send.

    Args:
        namespace: of the receiver.
        senders: addresses with ports.
        sent: says how many bytes the senders have sent, each.
    """

    def __init__(self, namespace: str, senders: list[str], token: bytes, sent: Sequence[Any]):
        self._over = threading.Event()
        self._sent = sent
        self._found: dict[str, Any] = {}
        self._failed: BaseException | None = None
        self.early = False
        """Whether they ended by themselves."""
        reads = Reads(fragment=ANSWER_BYTES, blocks=10**6, warm_up=0, deadline_s=LONGEST_S)
        work = partial(measure, senders, reads, token, lambda _: self._over.is_set())
        self._thread = threading.Thread(target=self._run, args=(namespace, work), name="long flows", daemon=True)

    def _run(self, namespace: str, work: Any) -> None:
        try:
            self._found = namespaces.inside(namespace, work)
        except BaseException as error:
            self._failed = error

    def begin(self) -> None:
        """Return once each of them has sent something.

        Raises:
            EnvironmentFailed: one of them has not.
        """
        before = [server.served()[0] for server in self._sent]
        self._thread.start()
        end = time.monotonic() + BEGIN_S
        while any(server.served()[0] == known for server, known in zip(self._sent, before, strict=True)):
            if time.monotonic() > end or not self._thread.is_alive():
                self.end()
                raise EnvironmentFailed(f"a long flow has not begun within {BEGIN_S:.0f} s ({self._failed})")
            time.sleep(LOOK_S)

    def end(self) -> None:
        self.early = self.early or (not self._thread.is_alive() and not self._over.is_set())
        self._over.set()
        self._thread.join()

    def brought(self) -> tuple[float | None, str | None]:
        """Return what they brought together, in Mbit/s, and why they ended too early; ``None``: they did not."""
        self.end()
        seconds = self._found.get("seconds")
        brought = self._found["bytes"] * 8 / seconds / 1e6 if seconds else None
        why = self._failed or (self._found.get("ended") if self.early else None)
        return brought, f"long flows ended too early: {why}" if why else None
