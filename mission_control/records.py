"""Records of events, for reports: kept as text, up to a number of bytes."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client

BYTES_MAX = 64 << 20
"""Bytes of records that are kept; beyond this the oldest are dropped. Three sorts of 64 MiB in a lab make 0.3 MB."""


class Log:
    """Records by their numbers, from 0 on; the newest are kept."""

    def __init__(self, most_bytes: int = BYTES_MAX):
        self.most_bytes = most_bytes
        self.kept: deque[str] = deque()
        self.bytes = 0
        self.next = 0

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, with its number and the time (seconds since 1970)."""
        text = json.dumps({"number": self.next, "time": time.time(), **record})
        self.next += 1
        self.kept.append(text)
        self.bytes += len(text)
        while self.bytes > self.most_bytes:
            self.bytes -= len(self.kept.popleft())

    def texts_since(self, seen: int) -> tuple[int, list[str]]:
        """Return how many records there have been, and those after the first ``seen`` that are still kept, as text."""
        first = self.next - len(self.kept)
        return self.next, list(islice(self.kept, max(0, seen - first), None))

    def since(self, seen: int) -> tuple[int, list[dict[str, Any]]]:
        """As :meth:`texts_since`, parsed."""
        count, texts = self.texts_since(seen)
        return count, [json.loads(text) for text in texts]

    def last(self, kind: str, **values: Any) -> dict[str, Any] | None:
        """Return the newest record of a kind with these values that is still kept."""
        return next(self.newest(kind, **values), None)

    def newest(self, kind: str, **values: Any) -> Iterator[dict[str, Any]]:
        """Return the records of a kind with these values that are still kept, the newest first."""
        for text in reversed(self.kept):
            # Most records are of other kinds, which their text shows without parsing.
            if f'"{kind}"' in text:
                record = json.loads(text)
                if record["kind"] == kind and all(record.get(name) == value for name, value in values.items()):
                    yield record


def records_since(client: Client, seen: int) -> tuple[int, list[dict[str, Any]]]:
    """Ask a scheduler for its records: how many there have been, and those after the first ``seen`` that it still has.

    They are parsed here: the scheduler has better things to do.
    """
    count, lines = client.sync(client.scheduler.mission_control_since, seen=seen)
    return count, [json.loads(line) for line in lines.splitlines()]
