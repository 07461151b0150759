"""A shuffle of parts whose content says where they come from; each is compared where it arrives."""

from __future__ import annotations

import time
from typing import Any

from distributed import Client

import mission_control
from mission_control.workers import workers_of


def shuffle(client: Client, each: int, size: int) -> float:
    """Have every worker fetch its parts from every worker, over TCP.

    Args:
        each: Parts of each worker for each worker.
        size: Bytes of a part; a multiple of 8.

    Returns:
        Seconds, from the first fetch until all results are known.
    """
    workers = sorted(workers_of(client))
    parts = len(workers) * each
    with mission_control.job("shuffle", transport="tcp", client=client):
        held = [
            client.submit(put, number, parts, size, workers=[own], pure=False) for number, own in enumerate(workers)
        ]
        client.gather(held)
        began = time.perf_counter()
        got = [
            client.submit(take, held, range(number * each, (number + 1) * each), size, workers=[own], pure=False)
            for number, own in enumerate(workers)
        ]
        assert sum(client.gather(got)) == len(workers) * parts * size
        return time.perf_counter() - began


def put(number: int, parts: int, size: int) -> Any:
    """In a task: put all parts of a worker."""
    return mission_control.put([content(number, part, size) for part in range(parts)])


def take(held: list[Any], parts: range, size: int) -> int:
    """In a task: fetch these parts from all workers, and return their bytes.

    Raises:
        RuntimeError: A part came with other content.
    """
    total = 0
    for part in parts:
        for number, got in enumerate(mission_control.fetch(held, part=part)):
            if bytes(got) != content(number, part, size):
                raise RuntimeError(f"part {part} of worker {number} came with other content")
            total += len(got)
    return total


def content(number: int, part: int, size: int) -> bytes:
    return (number * 1000 + part).to_bytes(8, "big") * (size // 8)
