"""The pattern of a transfer is known before its first byte, from the task graph and from what tasks have put."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest
from distributed import Event, wait

import mission_control
from tests.conftest import status, until

BYTES = 100_000


def make(parts: int) -> mission_control.Reference:
    return mission_control.put([np.zeros(BYTES, np.uint8)] * parts)


def take(made: Any, part: int | None, gate: str) -> int:
    """Fetches once the gate is open."""
    Event(gate).wait(60)
    return sum(map(len, mission_control.fetch(made, part=part)))


def transfer_of(client, job: str, to: str) -> dict[str, Any] | None:
    """Return the transfer to a stage of a job, from the only stage that moves data there."""
    jobs = {entry["job"]: entry for entry in status(client)["jobs"]}
    found = [entry for entry in jobs.get(job, {"transfers": []})["transfers"] if entry["to"] == to]
    return found[0] if len(found) == 1 else None


def shown(client, job: str, to: str, pattern: str, evidence: str) -> None:
    """Wait until the transfer has this pattern, by this evidence."""
    seen: list[dict[str, Any] | None] = []

    def look() -> bool:
        own = transfer_of(client, job, to)
        seen[:] = [own]
        return own is not None and own["pattern"] == pattern and evidence in own["evidence"]

    try:
        until(look, f"{to} of {job} is a {pattern}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen}") from None


@pytest.mark.parametrize(
    ("parts", "own_parts", "pattern"), [(6, True, "shuffle"), (1, False, "broadcast"), (6, False, "broadcast")]
)
def test_the_graph_tells_and_fetches_correct_it(client, parts, own_parts, pattern):
    job = f"tells-{parts}-{own_parts}"
    gate = Event(job, client)
    with mission_control.job(job, transport="tcp", client=client):
        made = [client.submit(make, parts, key=("map-" + job, index), pure=False) for index in range(3)]
        wait(made)
        part = range(6) if own_parts else [None] * 6
        done = [
            client.submit(take, made, part[index], job, key=("reduce-" + job, index), pure=False) for index in range(6)
        ]
    before = "broadcast" if parts == 1 else "shuffle"
    shown(client, job, "reduce-tells", before, "task graph: each task takes from up to 3, each result goes to up to 6")
    assert transfer_of(client, job, "reduce-tells")["asked_bytes"] == 0
    gate.set()
    assert set(client.gather(done)) == {3 * BYTES * (1 if own_parts else parts)}
    shown(client, job, "reduce-tells", pattern, "6 tasks fetched")


def test_many_into_one_is_a_gather(client):
    gate = Event("gathers", client)
    with mission_control.job("gathers", transport="tcp", client=client):
        made = [client.submit(make, 2, key=("part", index), pure=False) for index in range(5)]
        done = client.submit(take, made, None, "gathers", key="whole", pure=False)
    shown(client, "gathers", "whole", "gather", "task graph")
    gate.set()
    assert done.result() == 5 * 2 * BYTES


def test_shuffles_of_dask_are_known(client):
    """Recognised by its barrier before the first byte, later by fetches; transfers of Dask itself, by their graph."""
    pandas = pytest.importorskip("pandas")
    frames = pytest.importorskip("dask.dataframe")
    frame = pandas.DataFrame({"key": np.arange(2000) % 50, "value": np.arange(2000.0)})
    for method in ("p2p", "tasks"):
        job = f"frames-{method}"
        with dask.config.set({"dataframe.shuffle.method": method}), mission_control.job(job, client=client):
            shuffled = frames.from_pandas(frame, npartitions=6).shuffle("key").persist()
            wait(shuffled)
            assert shuffled.compute()["value"].sum() == frame["value"].sum()
            transfers = {entry["job"]: entry["transfers"] for entry in status(client)["jobs"]}[job]
            shuffles = [entry for entry in transfers if entry["pattern"] == "shuffle"]
            assert shuffles, [(entry["from"], entry["to"], entry["pattern"]) for entry in transfers]
            evidence = shuffles[0]["evidence"]
            known = ("barrier" in evidence or "fetched" in evidence) if method == "p2p" else "in pieces" in evidence
            assert known, evidence


def test_a_job_that_is_over_leaves_nothing_of_its_graph(client):
    def graph() -> int:
        return status(client)["graph_tasks"]

    until(lambda: graph() == 0, "earlier tasks are forgotten")
    for index in range(3):
        with mission_control.job(f"over-{index}", client=client):
            assert client.submit(sum, client.map(abs, range(5), pure=False), pure=False).result() == 10
    until(lambda: graph() == 0, "these too")
    until(lambda: not [job for job in status(client)["jobs"] if job["job"].startswith("over-")], "and their jobs")
