"""`mission bench idle`: what workers and scheduler say to one another while nothing changes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mission_control.environment import describe

WITH, WITHOUT = "with Mission Control", "Dask alone"


async def bytes_in(seconds: float) -> int:
    """Bytes that this host sends and receives in that time, headers included."""

    def count() -> int:
        # Of the network namespace of this thread; /sys would show another one.
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        values = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
        return int(values[0]) + int(values[8])

    before = count()
    await asyncio.sleep(seconds)
    return count() - before


def measure(
    hosts: int = 4, seconds: float = 20, rounds: int = 3, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measures clusters in the lab that have run a job, in turn with Mission Control and without.

    Returns:
        ``rows``: what, bytes_per_second (of a host, median), spread; ``more``: bytes that Mission Control adds for a
        host and second.
    """
    from mission_control.scenario import load, with_settings
    from mission_control.worlds.lab import in_lab

    samples: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    scenario = with_settings(load("sort"), [f"topology.hosts={hosts}", "control.transport=tcp"])
    for number in range(rounds):
        for what in (WITH, WITHOUT):
            say(f"round {number + 1} of {rounds}: {what}")
            with in_lab(scenario, plain=what == WITHOUT) as site, site.connect() as client:
                if what == WITH:
                    made = client.map(_put, range(hosts), pure=False)
                    assert client.submit(_fetch, made, pure=False).result(timeout=60) == hosts << 20
                    del made
                else:
                    assert client.submit(sum, client.map(int, range(hosts))).result(timeout=60) is not None
                client.run(bytes_in, 5.0)  # until what is left to say was said
                samples[what] += [seen / seconds for seen in client.run(bytes_in, seconds).values()]
    rows: list[dict[str, Any]] = [
        {"what": what, "bytes_per_second": statistics.median(seen), "spread": [min(seen), max(seen)]}
        for what, seen in samples.items()
    ]
    more = rows[0]["bytes_per_second"] - rows[1]["bytes_per_second"]
    return {"rows": rows, "more": more, "environment": describe()}


def _put(number: int) -> Any:
    import mission_control

    return mission_control.put([bytes([number]) * (1 << 20)])


def _fetch(made: list[Any]) -> int:
    import mission_control

    return sum(map(len, mission_control.fetch(made)))
