"""If one sender's link is the bottleneck, it sends ranges by the weights of their jobs. Needs root."""

from __future__ import annotations

import json
import time
import zlib

import numpy as np
from distributed import Client

import mission_control
from mission_control.scenario import load, with_settings
from mission_control.workers import workers_of
from mission_control.worlds.lab import in_lab
from tests.conftest import status
from tests.lab import NEEDS_LAB

pytestmark = NEEDS_LAB

PARTS, PART_BYTES = 160, 128 << 10
WHOLE = PARTS * PART_BYTES


def served(client: Client) -> dict[str, int]:
    """Bytes that each job has received."""
    return {job["job"]: sum(own["served_bytes"] for own in job["transfers"]) for job in status(client)["jobs"]}


def test_two_receivers_of_two_jobs_get_what_their_jobs_weigh():
    """Each receiver has all its slots for one job: only the sender can distinguish the jobs."""
    parts, size = PARTS, PART_BYTES

    # Here, so that workers need not import this file, which checks the kernel.
    def make(seed: int) -> tuple[mission_control.Reference, int]:
        data = np.random.default_rng(seed).bytes(parts * size)
        return mission_control.put([data[at : at + size] for at in range(0, len(data), size)]), zlib.crc32(data)

    def read(made: tuple[mission_control.Reference, int]) -> bool:
        reference, checksum = made
        seen = 0
        for part in mission_control.fetch(reference):
            seen = zlib.crc32(part, seen)
        return seen == checksum

    settings = ["topology.hosts=3", "topology.link_rate=50Mbit/s", "control.policy=priority", "control.transport=tcp"]
    seen: list[dict[str, int]] = []
    with in_lab(with_settings(load("sort"), settings)) as site, site.connect() as light, site.connect() as heavy:
        sender, *receivers = sorted(workers_of(light))
        made, reads = [], []
        for name, client, priority in (("light", light, 1), ("heavy", heavy, 3)):
            with mission_control.job(name, client=client, priority=priority):
                made.append(client.submit(make, priority, workers=[sender], pure=False))
                made[-1].result(timeout=60)
        for name, client, priority in (("light", light, 1), ("heavy", heavy, 3)):
            with mission_control.job(name, client=client, priority=priority):
                reads.append(client.submit(read, made[len(reads)], workers=[receivers[len(reads)]], pure=False))
        until = time.monotonic() + 60
        while not all(own.done() for own in reads) and time.monotonic() < until:
            seen.append(served(light))
            time.sleep(0.1)
        assert all(own.result(timeout=60) for own in reads)
    # While both still receive bytes.
    both = [entry for entry in seen if entry.get("heavy", 0) > WHOLE / 4 and entry["heavy"] < WHOLE * 0.95]
    moved = {job: both[-1][job] - both[0][job] for job in ("light", "heavy")}
    share = moved["heavy"] / sum(moved.values())
    assert abs(share - 0.75) < 0.08, json.dumps(seen)
