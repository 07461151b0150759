"""Custom policies: they compute weights, and errors name them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from distributed import Event, wait

import mission_control
from mission_control.workers import workers_of
from tests.conftest import status, until

PARTS, BYTES = 12, 1 << 20


def by_name(jobs: list[dict[str, Any]]) -> dict[str, float]:
    """Jobs whose name begins with x count three times the others."""
    return {job["job"]: 3.0 if job["job"].startswith("x") else 1.0 for job in jobs}


def by_transfer(jobs: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """The same for each transfer."""
    return {
        (job["job"], transfer["from"], transfer["to"]): 3.0 if job["job"].startswith("x") else 1.0
        for job in jobs
        for transfer in job["transfers"]
        if transfer["asked_bytes"] > 0
    }


def mixes(jobs: list[dict[str, Any]]) -> dict[Any, float]:
    return {"x": 1.0, ("y", "a", "b"): 1.0}


def raises(jobs: list[dict[str, Any]]) -> dict[str, float]:
    raise KeyError("no such tenant")


def stalls(jobs: list[dict[str, Any]]) -> dict[str, float]:
    time.sleep(3)
    return {}


def nonsense(jobs: list[dict[str, Any]]) -> dict[str, float]:
    return {job["job"]: -1.0 for job in jobs}


def put() -> mission_control.Reference:
    return mission_control.put([np.zeros(BYTES, np.uint8) for _ in range(PARTS)])


def fetch_slowly(reference: mission_control.Reference, ended: str) -> None:
    """Move bytes until the test has seen all that it wants to see."""
    is_ended = Event(ended)
    while not is_ended.is_set():
        for part in range(PARTS):
            mission_control.fetch(reference, part=part)
            time.sleep(0.2)


def weights(client) -> dict[str, float]:
    return {job["job"]: round(job["weight"], 2) for job in status(client)["jobs"] if job["weight"] is not None}


def test_weights_come_from_the_function_and_stay_when_it_fails(client):
    owner, *others = workers_of(client)
    mission_control.install(client, policy=by_name)
    ended = Event("the test of policies has ended", client)
    try:
        done = []
        for name, reader in zip(("x", "y"), others, strict=True):
            with mission_control.job(name, transport="tcp"):
                reference = client.submit(put, pure=False, workers=[owner])
                wait(reference)
                own = {"pure": False, "workers": [reader]}
                done.append([client.submit(fetch_slowly, reference, ended.name, **own) for _ in range(2)])
        decided = {"x": 0.75, "y": 0.25}
        until(lambda: weights(client) == decided, "the function decides")
        mission_control.install(client, policy=by_transfer)
        until(lambda: status(client)["policy"].endswith("by_transfer"), "another kind of policy")
        time.sleep(2)
        # It knows no transfer that is between two fetches: such a one counts like the mean of the others for a moment.
        until(lambda: weights(client) == decided, "the function of transfers decides", instead=lambda: status(client))
        assert status(client)["policy_error"] is None
        mission_control.install(client, policy=by_name)
        until(lambda: status(client)["policy"].endswith("by_name"), "names count again")
        until(lambda: weights(client) == decided, "the function decides again", instead=lambda: status(client))
        for bad, said in [
            (mixes, "must be all names"),
            (raises, "no such tenant"),
            (stalls, "has not answered"),
            (nonsense, "above 0"),
        ]:
            mission_control.install(client, policy=bad)
            error = until(lambda: status(client)["policy_error"], f"{bad.__name__} is named")
            assert bad.__name__ in error and said in error
            assert all(weight in (0.75, 0.25, 1.0) for weight in weights(client).values()), "the last weights stay"
        ended.set()
        client.gather(done)
    finally:
        ended.set()
        mission_control.install(client, policy="performance-centric")
    assert status(client)["policy_error"] is None


def test_a_policy_that_is_not_there_is_refused(client):
    with pytest.raises(ValueError, match="there is no policy python:nowhere:at_all"):
        mission_control.install(client, policy="python:nowhere:at_all")
    assert status(client)["policy"] == "performance-centric"
