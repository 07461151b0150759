"""Observe and change the jobs of a cluster while they run."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from distributed import Event, wait

import mission_control
from mission_control.workers import workers_of
from tests.conftest import mission, status, until

PARTS, BYTES = 24, 4 << 20


def produce(seed: int) -> mission_control.Reference:
    return mission_control.put([np.full(BYTES, seed * PARTS + part, np.uint8) for part in range(PARTS)])


def consume(references: list[mission_control.Reference]) -> str:
    """Fetch part after part, and wait in the middle for a change."""
    digest = hashlib.sha256()
    for part in range(PARTS):
        if part == PARTS // 2:
            assert Event("changed").wait(60)
        for entry in mission_control.fetch(references, part=part):
            digest.update(entry)
    return digest.hexdigest()


@pytest.fixture
def scheduler(client) -> str:
    return client.scheduler.address


def carried(client, job: str) -> dict[str, int]:
    found = [entry for entry in status(client)["jobs"] if entry["job"] == job]
    return next(
        (transfer["transport"]["bytes"] for one in found for transfer in one["transfers"] if transfer["asked_bytes"]),
        {},
    )


def test_another_transport_takes_over_in_the_middle_of_a_job(client, scheduler):
    owner, reader = list(workers_of(client))[:2]
    with mission_control.job("moved", transport="tcp"):
        references = client.map(produce, range(2), pure=False, workers=[owner])
        wait(references)
        digest = client.submit(consume, references, pure=False, workers=[reader])
        until(lambda: sum(carried(client, "moved").values()) >= PARTS * BYTES, "half of it has moved")
        done = mission("jobs", "set", "moved", "--transport", "tls", "--scheduler", scheduler, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["plan"]["legs"][0]["transport"] == "tls"
        Event("changed").set()
        explained = mission("explain", "moved", "--scheduler", scheduler)
        assert "tls (anywhere): required by the job" in explained.stdout and "consume" in explained.stdout, (
            explained.stdout
        )
        expected = hashlib.sha256()
        for part in range(PARTS):
            for seed in range(2):
                expected.update(np.full(BYTES, seed * PARTS + part, np.uint8))
        assert digest.result() == expected.hexdigest()
        whole = PARTS * BYTES * 2
        bytes_of = until(
            lambda: (own := carried(client, "moved")) and sum(own.values()) == whole and own, "all is told"
        )
    assert set(bytes_of) == {"tcp", "tls"} and min(bytes_of.values()) >= whole / 5, bytes_of


def test_what_cannot_be_set_is_refused_and_nothing_changes(client, scheduler):
    with mission_control.job("stays", priority=2):
        client.submit(produce, 0, pure=False).result()
        for words, code, said in [
            (["stays"], 2, "give --transport NAME or --priority X"),
            (["absent", "--priority", "1"], 2, "there is no job 'absent'"),
            (["stays", "--priority", "0"], 2, "use a number above 0"),
            (["stays", "--priority", "nan"], 2, "use a number above 0"),
            (["stays", "--transport", "pigeon"], 2, "use auto"),
            (["stays", "--transport", "dctcp"], 4, "dctcp"),
        ]:
            done = mission("jobs", "set", *words, "--scheduler", scheduler)
            assert done.returncode == code and said in done.stderr, (words, done)
        assert mission("jobs", "set", "stays", "--priority", "5", "--scheduler", scheduler).returncode == 0
        listed = json.loads(mission("jobs", "--scheduler", scheduler, "--json").stdout)
        (own,) = [job for job in listed["jobs"] if job["job"] == "stays"]
        assert own["priority"] == 5 and own["demands"]["transport"] is None
        # A task that is submitted later still carries the job's original settings; they do not undo the change.
        client.submit(produce, 1, pure=False).result()
        (own,) = [job for job in status(client)["jobs"] if job["job"] == "stays"]
        assert own["priority"] == 5


def test_top_looks_as_often_as_it_is_told(scheduler):
    done = mission("top", "--scheduler", scheduler, "--every", "0.1", "--count", "2", "--json")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert "workers" in json.loads(done.stdout.splitlines()[0])
    nobody = mission("top", "--scheduler", "tcp://127.0.0.1:1")
    assert nobody.returncode == 3 and "no scheduler answers" in nobody.stderr
