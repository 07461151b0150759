"""`mission bench idle`: what workers and scheduler say to one another while nothing changes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mission_control.environment import describe

WITH, WITHOUT = "with Mission Control", "Dask alone"
INTERFACE = Path("/sys/class/net/eth0/statistics")


async def bytes_in(seconds: float, interface: Path) -> int:
    """Bytes that this host sends and receives in that time, headers included."""

    def count() -> int:
        return sum(int((interface / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    before = count()
    await asyncio.sleep(seconds)
    return count() - before


def measure(
    hosts: int = 4, seconds: float = 20, rounds: int = 3, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measures a cluster in the lab that has run a job, in turn with Mission Control and without.

    Returns:
        ``rows``: what, bytes_per_second (of a host, median), spread; ``more``: bytes that Mission Control adds for a
        host and second.
    """
    import mission_control
    from mission_control.dask.scheduler import MissionControlScheduler
    from mission_control.dask.worker import MissionControlWorker
    from mission_control.scenario import load, with_settings
    from mission_control.worlds.lab import in_lab

    samples: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    scenario = with_settings(load("sort"), [f"topology.hosts={hosts}", "control.transport=tcp"])
    with in_lab(scenario) as site, site.connect() as client:
        for number in range(rounds):
            for what in (WITH, WITHOUT):
                say(f"round {number + 1} of {rounds}: {what}")
                if what == WITH:
                    mission_control.install(client)
                    with mission_control.job(f"before-{number}", client=client):
                        made = client.map(_put, range(hosts), pure=False)
                        assert client.submit(_fetch, made, pure=False).result(timeout=60) == hosts << 20
                        del made
                else:
                    client.unregister_worker_plugin(MissionControlWorker.name)
                    client.unregister_scheduler_plugin(MissionControlScheduler.name)
                client.run(bytes_in, 5.0, INTERFACE)  # until what is left to say was said
                seen = client.run(bytes_in, seconds, INTERFACE)
                samples[what] += [entry / seconds for entry in seen.values()]
    rows = [
        {"what": what, "bytes_per_second": statistics.median(seen), "spread": [min(seen), max(seen)]}
        for what, seen in samples.items()
    ]
    more = statistics.median(samples[WITH]) - statistics.median(samples[WITHOUT])
    return {"rows": rows, "more": more, "environment": describe()}


def _put(number: int) -> Any:
    import mission_control

    return mission_control.put([bytes([number]) * (1 << 20)])


def _fetch(made: list[Any]) -> int:
    import mission_control

    return sum(map(len, mission_control.fetch(made)))
