"""`mission bench paths`: what pairs of two-homed hosts get, beside hosts that have one path alone."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

from mission_control.environment import describe
from mission_control.workers import workers_of

ONE, TWO = "one path (tcp)", "as Mission Control chooses"


def measure(
    pairs: int = 4,
    single: int = 1,
    size: int = 16 << 20,
    rate: int = 20_000_000,
    rounds: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Two-homed hosts read from one another, pair by pair and all at once; beside them a host with one path does, from
    one of them.

    Args:
        pairs: of two-homed hosts; both of a pair read from the other.
        single: hosts with one path.
        size: that each reads, in bytes.
        rate: of each link, in bits per second.

    Returns:
        ``rows``: what, seconds of a pair (median), spread, transports (bytes by transport); ``ratios``: of medians.
    """
    import mission_control
    from mission_control.scenario import load, with_settings
    from mission_control.worlds.lab import in_lab

    homed = [f"h{number}" for number in range(1, 2 * pairs + 1)]
    alone = [f"h{number}" for number in range(2 * pairs + 1, 2 * pairs + single + 1)]
    # The last one is the scheduler's.
    last = f"h{2 * pairs + single + 1}"
    ends = [(host, path) for host in homed for path in (0, 1)] + [(host, 0) for host in (*alone, last)]
    links = [f'{{a="{host}", b="s{path + 1}", path={path}, rate="{rate} bit/s"}}' for host, path in ends]
    settings = ["topology.kind=custom", f"topology.links=[{', '.join(links)}]", "topology.port.buffer=128 KiB"]
    samples: dict[str, list[float]] = {ONE: [], TWO: []}
    transports: dict[str, dict[str, int]] = {ONE: {}, TWO: {}}
    with in_lab(with_settings(load("sort"), settings)) as site, site.connect() as client:
        known = workers_of(client)
        address = {entry["id"]: worker for worker, entry in known.items()}
        for number in range(rounds):
            for what, transport in ((ONE, "tcp"), (TWO, "auto")):
                say(f"round {number + 1} of {rounds}: {what}")
                job = f"{'one' if what == ONE else 'two'}-{number}"
                with mission_control.job(job, transport=transport, client=client):
                    at = {host: {"workers": [address[host]], "pure": False} for host in (*homed, *alone)}
                    made = {host: client.submit(_put, host, size, **at[host]) for host in homed}
                    sums = dict(zip(made, (entry[1] for entry in client.gather(list(made.values()))), strict=True))
                    reads = {
                        host: (other, client.submit(_fetch, made[other], **at[host]))
                        for one, two in zip(homed[::2], homed[1::2], strict=True)
                        for host, other in ((one, two), (two, one))
                    }
                    first = homed[0]
                    reads |= {host: (first, client.submit(_fetch, made[first], **at[host])) for host in alone}
                    for host, (other, read) in reads.items():
                        seconds, checksum = read.result(timeout=300)
                        assert checksum == sums[other], f"{host} read something else than {other} put"
                        if host in homed[2:]:  # the first one sends to hosts with one path, too
                            samples[what].append(seconds)
                    status = client.sync(client.scheduler.mission_control_status)
                    for entry in next(own for own in status["jobs"] if own["job"] == job)["transfers"]:
                        for name, nbytes in ((entry.get("transport") or {}).get("bytes") or {}).items():
                            transports[what][name] = transports[what].get(name, 0) + nbytes
                    del made, reads
    rows = [
        {
            "what": what,
            "seconds": statistics.median(taken),
            "spread": [min(taken), max(taken)],
            "transports": transports[what],
        }
        for what, taken in samples.items()
    ]
    ratio = statistics.median(samples[ONE]) / statistics.median(samples[TWO])
    return {"rows": rows, "ratios": {f"{ONE} / {TWO}": ratio}, "environment": describe()}


def _put(host: str, size: int) -> tuple[Any, int]:
    import numpy as np

    import mission_control

    data = np.random.default_rng(zlib.crc32(host.encode())).bytes(size)
    return mission_control.put([data]), zlib.crc32(data)


def _fetch(made: tuple[Any, int]) -> tuple[float, int]:
    import mission_control

    began = time.perf_counter()
    (part,) = mission_control.fetch(made[0])
    return time.perf_counter() - began, zlib.crc32(part)
