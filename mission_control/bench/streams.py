"""`mission bench streams`: a stream beside put and fetch, between two Dask workers of one host.

Three questions: what a stream carries in a second, how long a small write takes to its reader, and what is gained where
two stages of a job run side by side.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from distributed import Client
from distributed.client import _wait

import mission_control
from mission_control.bench.interleaved import Sample, compared, cpu_of_workers
from mission_control.environment import describe
from mission_control.workers import workers_of
from mission_control.worlds.local import local_cluster

BUFFER_BYTES = 4 << 20
"""One write, and one part of the object that is fetched."""
SMALL_WRITES, SMALL_BYTES, SMALL_EVERY_S = 500, 64, 0.002
"""Of the latency: writes, bytes of each, and the pause between two."""
STAGE_BUFFERS = 64
STAGE_HASHES = 4
"""A stage of the pipeline hashes each buffer so many times."""
TRANSPORTS = ("tcp", "auto")


def measure(size: int, rounds: int, threads: int = 1, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure all three, in turn with put and fetch, with workers of so many threads.

    Returns:
        ``rows``: what, mode, transport, wall_s, cpu_s (both workers), spread of wall_s; ``ratios``: of medians;
        ``latency_ms``: p50 and p99 of each transport.
    """
    count = max(size // BUFFER_BYTES, 1)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    latency: dict[str, dict[str, float]] = {}
    workers = {"n_workers": 2, "threads_per_worker": threads, "memory_limit": f"{8 * max(size, 1 << 30)}B"}
    with (
        local_cluster(**workers, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        mission_control.install(client)
        for transport in TRANSPORTS:
            with mission_control.job(f"streams-{transport}", client=client, transport=transport):
                reads = {"fetch": fetched, "stream": streamed}
                live = {"put, then fetch": in_all(put_all, 0), "written and read": in_all(write_all, 0)}
                stages = {
                    "stages after one another": in_all(put_all, STAGE_HASHES),
                    "stages side by side": in_all(write_all, STAGE_HASHES),
                }
                # The second of each is what streams gain.
                for name, calls, many in (
                    ("read what is there", reads, count),
                    ("from the first write to the last byte", live, count),
                    ("two stages", stages, STAGE_BUFFERS),
                ):
                    modes = {mode: partial(sample, client, call, many) for mode, call in calls.items()}
                    found = compared(f"{name}, {transport}", modes, rounds, say)
                    rows += [{**row, "what": name, "transport": transport} for row in found]
                    other, better = found
                    ratio = other["wall_s"] / better["wall_s"]
                    ratios[f"{name}, {transport}: {other['mode']} / {better['mode']}"] = ratio
                say(f"latency, {transport}")
                latency[transport] = latency_of(client)
    return {"rows": rows, "ratios": ratios, "latency_ms": latency, "rounds": rounds, "environment": describe()}


Call = Callable[[Client, str, str, int], float]


def sample(client: Client, call: Call, count: int) -> Sample:
    owner, reader = workers_of(client)
    before = cpu_of_workers(client)
    wall = call(client, owner, reader, count)
    return Sample(wall, cpu_of_workers(client) - before)


# --- what is compared -----------------------------------------------------------------------------------------------


def fetched(client: Client, owner: str, reader: str, count: int) -> float:
    there = client.submit(put_all, count, 0, workers=[owner], pure=False)
    client.sync(_wait, [there])
    return in_reader(client, there, reader, count)


def streamed(client: Client, owner: str, reader: str, count: int) -> float:
    there = client.submit(write_all, count, 0, workers=[owner], pure=False)
    # On the owner itself, until the stream has ended.
    client.submit(read_all, there, 0, workers=[owner], pure=False).result()
    return in_reader(client, there, reader, count)


def in_reader(client: Client, there: Any, reader: str, count: int) -> float:
    """Seconds of the task that reads."""
    seconds, numbers = client.submit(read_all, there, 0, workers=[reader], pure=False).result()
    check(numbers, count)
    return seconds


def in_all(write: Callable[[int, int], Any], hashes: int) -> Call:
    """Return what measures a task that writes, with one that reads, from the submission of the first."""

    def measured(client: Client, owner: str, reader: str, count: int) -> float:
        began = time.perf_counter()
        there = client.submit(write, count, hashes, workers=[owner], pure=False)
        _, numbers = client.submit(read_all, there, hashes, workers=[reader], pure=False).result()
        wall = time.perf_counter() - began
        check(numbers, count)
        return wall

    return measured


def latency_of(client: Client) -> dict[str, float]:
    """Milliseconds from a small write to its reader."""
    owner, reader = workers_of(client)
    there = client.submit(write_stamps, workers=[owner], pure=False)
    took = np.array(client.submit(read_stamps, there, workers=[reader], pure=False).result()) / 1e6
    if len(took) != SMALL_WRITES:
        raise RuntimeError(f"{len(took)} of {SMALL_WRITES} small writes came")
    return {"p50": float(np.percentile(took, 50)), "p99": float(np.percentile(took, 99))}


# --- in tasks -------------------------------------------------------------------------------------------------------


def buffer(number: int) -> bytearray:
    made = bytearray([number % 251]) * BUFFER_BYTES
    made[:8] = number.to_bytes(8, "little")
    return made


def mark(buffer: Any) -> int:
    """A buffer's number, if all of it is what was written."""
    got = np.frombuffer(buffer, np.uint8)
    number = int.from_bytes(got[:8].tobytes(), "little")
    return number if len(got) == BUFFER_BYTES and (got[8:] == number % 251).all() else -1


def check(numbers: list[int], count: int) -> None:
    if numbers != list(range(count)):
        raise RuntimeError(f"what was read is not what was written: {numbers[:10]}")


def put_all(count: int, hashes: int) -> mission_control.Reference:
    made = []
    for number in range(count):
        made.append(buffer(number))
        work(made[-1], hashes)
    return mission_control.put(made)


def write_all(count: int, hashes: int) -> None:
    with mission_control.open_stream(keep=True) as out:
        for number in range(count):
            made = buffer(number)
            work(made, hashes)
            out.write(0, made)


def read_all(reference: mission_control.Reference, hashes: int) -> tuple[float, list[int]]:
    began = time.perf_counter()
    parts: Iterable[Any]
    if isinstance(reference, mission_control.StreamReference):
        parts = mission_control.stream(reference)
    else:
        parts = mission_control.fetch(reference)
    numbers = []
    for part in parts:
        work(part, hashes)
        numbers.append(mark(part))
    return time.perf_counter() - began, numbers


def work(data: Any, hashes: int) -> None:
    """The work of a stage on one buffer; Python's lock is free meanwhile."""
    for _ in range(hashes):
        hashlib.sha256(data).digest()


def write_stamps() -> None:
    with mission_control.open_stream() as out:
        for _ in range(SMALL_WRITES):
            time.sleep(SMALL_EVERY_S)
            # One clock for all processes of a machine.
            out.write(0, time.monotonic_ns().to_bytes(SMALL_BYTES, "little"))


def read_stamps(reference: mission_control.StreamReference) -> list[int]:
    return [time.monotonic_ns() - int.from_bytes(stamp, "little") for stamp in mission_control.stream(reference)]
