"""Weights become connections and bytes: backlogged jobs, or their transfers, at one receiver whose link is slow."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mission_control import _native
from tests.conftest import data, put, until
from tests.proxy import Limit, Proxy

RATE = 24e6
"""Bytes per second of the receiver's link: slow enough that the CPU is not the limit, also of a busy machine."""
SAMPLE_S = 0.125
CHUNK = 256 << 10
SIZE = 8 << 20


class Receiver:
    """A receiver of jobs, or of transfers (``job/from``), each with its own path over the same slow link."""

    def __init__(self, endpoint, flows: int, weights: dict[str, float]):
        self.reader: _native.Endpoint = endpoint(flows_per_host=flows)
        self.owner: _native.Endpoint = endpoint(flows_per_host=flows)
        self.name, _ = put(self.owner, data(SIZE))
        self.flows = flows
        limit = Limit(RATE)
        self.paths = {name: Proxy(self.owner.address, limit=limit) for name in weights}
        self.stop = {name: threading.Event() for name in weights}
        self.threads: list[threading.Thread] = []
        self.share(weights)

    def share(self, weights: dict[str, float]) -> None:
        level, shares = "groups", []
        for name, weight in weights.items():
            job, slash, stage = name.partition("/")
            shares.append({"job": job, "stages": [stage, "to"] if slash else None, "weight": weight})
            level = "members" if slash else "groups"
        command = {"command": "shares", "flows_per_host": self.flows, "level": level, "shares": shares}
        # Each process of a host receives them: any of them may be its arbiter.
        for process in (self.reader, self.owner):
            process.command(json.dumps(command))

    @contextmanager
    def backlogged(self) -> Iterator[None]:
        """All always have waiting chunks: the next fetch begins before the previous one has ended."""
        for name, path in self.paths.items():
            path.__enter__()
            leg = {"transport": "tcp", "reach": "anywhere", "encryption": "none"}
            leg |= {"congestion_control": None, "rto_min_us": None, "reason": "test"}
            plan = {"legs": [leg], "chunk_bytes": CHUNK, "refused": []}
            self.reader.command(json.dumps({"command": "plan", "job": name.partition("/")[0], "plan": plan}))
            self.threads += [threading.Thread(target=self._fetch, args=(name,)) for _ in range(2)]
        for thread in self.threads:
            thread.start()
        try:
            time.sleep(1)
            yield
        finally:
            for stop in self.stop.values():
                stop.set()
            for thread in self.threads:
                thread.join()
            for path in self.paths.values():
                path.__exit__()

    def _fetch(self, name: str) -> None:
        job, _, stage = name.partition("/")
        while not self.stop[name].is_set():
            self.reader.fetch(job, stage, "to", "{}", [(self.name, 0, SIZE, [self.paths[name].address])], True)

    def connections(self, job: str) -> int:
        port = self.paths[job].address.rpartition(":")[2]
        command = ["ss", "-Htn", "state", "established", "dst", f"127.0.0.1:{port}"]
        return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())

    def passed(self) -> dict[str, int]:
        return {job: path.passed for job, path in self.paths.items()}


def parts(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    moved = {job: after[job] - before[job] for job in before}
    return {job: entry / sum(moved.values()) for job, entry in moved.items()}


def test_backlogged_jobs_reach_their_caps_and_one_alone_takes_all(endpoint):
    receiver = Receiver(endpoint, 10, {"etl": 0.7, "report": 0.3})
    with receiver.backlogged():
        seen = []
        for _ in range(24):
            seen.append((receiver.connections("etl"), receiver.connections("report")))
            time.sleep(SAMPLE_S)
        assert (7, 3) in seen and max(etl for etl, _ in seen) == 7 and max(report for _, report in seen) == 3, seen
        # The plan changes: chunks under way end, then the new limits apply.
        receiver.share({"etl": 0.2, "report": 0.8})
        until(lambda: (receiver.connections("etl"), receiver.connections("report")) == (2, 8), "the new caps hold")
        receiver.stop["report"].set()
        for thread in receiver.threads[2:]:
            thread.join()
        until(lambda: receiver.connections("etl") > 2, "it takes the slots that the other leaves")
        before = receiver.passed()
        time.sleep(1)
        assert parts(before, receiver.passed())["etl"] > 0.99


@pytest.mark.parametrize("weight", [0.7, 8 / 9])
def test_with_two_slots_bytes_follow_the_weights(endpoint, weight):
    receiver = Receiver(endpoint, 2, {"etl": weight, "report": 1 - weight})
    with receiver.backlogged():
        for _ in range(2):
            before = receiver.passed()
            time.sleep(5)
            got = parts(before, receiver.passed())["etl"]
            assert abs(got - weight) < 0.05, f"{got:.3f} of the bytes for a weight of {weight:.3f}"


def test_transfers_of_one_job_have_shares_of_their_own(endpoint):
    """A broadcast and a shuffle of one job beside a shuffle of another: 2 to 1 to 1.

    Design: docs/explanation/design-control.md, "Policies weigh jobs or transfers".
    """
    wanted = {"etl/model": 0.5, "etl/map": 0.25, "report/map": 0.25}
    receiver = Receiver(endpoint, 10, wanted)
    with receiver.backlogged():
        before = receiver.passed()
        time.sleep(5)
        got = parts(before, receiver.passed())
        assert all(abs(got[name] - weight) < 0.05 for name, weight in wanted.items()), got
        # With a policy for jobs the same transfers share the job's weight.
        receiver.share({"etl": 0.5, "report": 0.5})
        time.sleep(1)
        before = receiver.passed()
        time.sleep(5)
        got = parts(before, receiver.passed())
        wanted = {"etl/model": 0.25, "etl/map": 0.25, "report/map": 0.5}
        # The five connections of etl change between its two paths, and each change costs it a moment.
        assert all(abs(got[name] - weight) < 0.08 for name, weight in wanted.items()), got
