"""`mission bench messages`: results of one Dask worker that a task on another needs, through tcp:// and mission://.

The bytes are Dask's own: no program calls Mission Control. Clusters of two workers, one for each protocol, run side by
side and are measured in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from distributed import Client, Security
from distributed.client import _wait

import mission_control
from mission_control import _native
from mission_control.bench.interleaved import cpu_of_workers
from mission_control.environment import describe
from mission_control.workers import workers_of
from mission_control.worlds.local import local_cluster

SIZES = (64 << 10, 1 << 20, 64 << 20)
SAMPLE_BYTES = 256 << 20
"""Moved in each sample, in so many objects as that makes."""
SAMPLE_OBJECTS = 512
"""At most: what a task costs is not what is measured."""
ECHOES = 300
"""Round trips of a small message in each sample."""


def measure(rounds: int, threads: int = 1, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure both, in plain and encrypted, objects of each size and round trips, with workers of so many threads.

    Returns:
        ``rows``: what, mode, wall_s, mib_per_s (none for round trips), cpu_s_per_gib (both workers), spread of wall_s;
        ``ratios``: tcp:// to mission://, of medians.
    """
    rows, ratios = [], {}
    for encrypted in (False, True):
        modes = {"tls://" if encrypted else "tcp://": None, "mission://": None}
        with ExitStack() as stack:
            clients = {mode: stack.enter_context(cluster(mode, encrypted, threads, stack)) for mode in modes}
            for size in SIZES:
                count = min(SAMPLE_OBJECTS, SAMPLE_BYTES // size)
                what = f"{_native.format_bytes(size)} objects{', encrypted' if encrypted else ''}"
                of_size = compared(clients, rounds, what, partial(gather, size=size, count=count), say)
                for row, samples in of_size:
                    row["mib_per_s"] = size * count / 2**20 / row["wall_s"]
                    row["cpu_s_per_gib"] = statistics.median(cpu for _, cpu in samples) / (size * count / 2**30)
                rows += [row for row, _ in of_size]
            what = f"round trip{', encrypted' if encrypted else ''}"
            rows += [row for row, _ in compared(clients, rounds, what, echo, say)]
    medians = {(row["what"], row["mode"] == "mission://"): row["wall_s"] for row in rows}
    for what in dict.fromkeys(row["what"] for row in rows):
        ratios[what] = medians[what, False] / medians[what, True]
    return {"rows": rows, "ratios": ratios, "rounds": rounds, "environment": describe()}


def cluster(mode: str, encrypted: bool, threads: int, stack: ExitStack) -> Client:
    own = local_cluster(
        n_workers=2,
        threads_per_worker=threads,
        protocol=mode,
        security=Security.temporary() if encrypted else None,
        memory_limit="4GiB",
        dashboard_address=":0",
    )
    client = Client(stack.enter_context(own), set_as_default=False)
    mission_control.install(client)
    return client


Samples = list[tuple[float, float]]


def compared(
    clients: dict[str, Client],
    rounds: int,
    what: str,
    sample: Callable[[Client], tuple[float, float]],
    say: Callable[[str], None],
) -> list[tuple[dict[str, Any], Samples]]:
    """Wall and CPU seconds of each, in turn; the first round warms up."""
    samples: dict[str, Samples] = {mode: [] for mode in clients}
    for number in range(rounds + 1):
        say(f"{what}: {f'round {number} of {rounds}' if number else 'warm-up'}")
        for mode, client in clients.items():
            taken = sample(client)
            if number:
                samples[mode].append(taken)
    walls = {mode: [wall for wall, _ in own] for mode, own in samples.items()}
    return [
        (
            {
                "what": what,
                "mode": mode,
                "wall_s": statistics.median(walls[mode]),
                "mib_per_s": None,
                "cpu_s_per_gib": None,
                "spread": [min(walls[mode]), max(walls[mode])],
            },
            samples[mode],
        )
        for mode in clients
    ]


def gather(client: Client, size: int, count: int) -> tuple[float, float]:
    """From the submission of a task on one worker that needs objects of the other until its result is known."""
    owner, reader = workers_of(client)
    objects = client.map(make, range(count), size=size, workers=[owner], pure=False)
    client.sync(_wait, objects)
    cpu, began = cpu_of_workers(client), time.perf_counter()
    client.submit(len, objects, workers=[reader], pure=False).result()
    wall = time.perf_counter() - began
    cpu = cpu_of_workers(client) - cpu
    # They are there now.
    got = client.submit(look, objects, workers=[reader], pure=False).result()
    if got != [number % 251 for number in range(count)]:
        raise RuntimeError(f"objects of {size} bytes came with other content")
    return wall, cpu


def make(number: int, size: int) -> np.ndarray:
    return np.full(size, number % 251, np.uint8)


def look(arrays: list[np.ndarray]) -> list[int]:
    """Its value, if all of an array has one."""
    return [int(array[0]) if array.min() == array.max() else -1 for array in arrays]


def echo(client: Client) -> tuple[float, float]:
    """Small requests from one worker to the other, one after another; seconds of one."""
    _, reader = workers_of(client)
    owner = next(iter(workers_of(client)))
    cpu = cpu_of_workers(client)
    wall = client.run(ask, reader, ECHOES, workers=[owner])[owner]
    return wall / ECHOES, cpu_of_workers(client) - cpu


async def ask(address: str, count: int, dask_worker: Any) -> float:
    """In a worker."""
    began = time.perf_counter()
    async with dask_worker.rpc(address) as other:
        for number in range(count):
            assert await other.echo(data=number) == number
    return time.perf_counter() - began
