"""Objects on a Dask cluster: what put and fetch do, and how long an object lives."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from distributed import get_client, wait

import mission_control
from mission_control import _native
from tests.conftest import resources, status, until


def produce(index: int, parts: int = 3, nbytes: int = 1000) -> mission_control.Reference:
    return mission_control.put([np.full(nbytes, index * 10 + part, np.uint8) for part in range(parts)])


def consume(references: Any, part: int) -> list[int]:
    return [int(np.frombuffer(entry, np.uint8)[0]) for entry in mission_control.fetch(references, part=part)]


def objects(client) -> int:
    return sum(resource["objects"] for resource in resources(client).values())


def test_every_receiver_gets_its_part_of_each_object(client):
    with mission_control.job("parts", transport="tcp"):
        references = client.map(produce, range(6), pure=False)
        got = client.gather([client.submit(consume, references, part, pure=False) for part in range(3)])
    assert got == [[index * 10 + part for index in range(6)] for part in range(3)]
    (job,) = until(lambda: seen(client, "parts"), "the job's transfer is seen")
    (transfer,) = job["transfers"]
    assert transfer["pattern"] == "shuffle"
    assert transfer["transport"]["chosen"] in ("tcp", None)


def seen(client, job: str) -> list[dict[str, Any]]:
    """Return the status of the job, once a fetch of it was reported."""
    asked = [entry for entry in status(client)["jobs"] if any(one["asked_bytes"] for one in entry["transfers"])]
    return [entry for entry in asked if entry["job"] == job]


def test_a_bug_in_the_native_half_is_an_error_that_reaches_the_client(client):
    """PyO3's own exception cannot be unpickled: the client would wait for ever."""
    with pytest.raises(RuntimeError, match="a bug of Mission Control, please report it: out of range"):
        client.submit(_native._panic, "out of range", pure=False).result(timeout=30)


def test_parts_of_any_type_and_of_no_length_are_put(client):
    def mixed() -> mission_control.Reference:
        return mission_control.put([np.empty((0, 3)), np.arange(6.0).reshape(2, 3), b"", pa.array([1, 2]).buffers()[1]])

    def look(reference: mission_control.Reference) -> list[int]:
        return [len(entry) for entry in mission_control.fetch(reference)]

    reference = client.submit(mixed, pure=False)
    assert client.submit(look, reference, pure=False).result() == [0, 48, 0, 16]


def put_masked() -> mission_control.Reference:
    return mission_control.put([np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])])


def test_a_mask_is_not_lost_without_a_word(client):
    with pytest.raises(TypeError, match=r"part 0 is a masked array.*part\.filled"):
        client.submit(put_masked, pure=False).result(60)


def test_buffers_are_used_by_numpy_and_arrow_without_a_copy(client):
    def look(reference: mission_control.Reference) -> tuple[bool, bool, bool, int]:
        fetched = mission_control.fetch(reference, packed=True)
        array = np.frombuffer(fetched[0], np.uint8)
        arrow = pa.py_buffer(fetched[0])
        whole = np.frombuffer(fetched.all, np.uint8)
        return (
            arrow.address == array.ctypes.data,
            array.flags.writeable,
            np.shares_memory(array, whole),
            array.ctypes.data % 64,
        )

    reference = client.submit(produce, 1, pure=False)
    same, writeable, shared, offset = client.submit(look, reference, pure=False).result()
    assert same and shared and not writeable and offset == 0


def test_an_object_lives_as_long_as_a_key_that_carries_it(client):
    before = objects(client)
    first = client.submit(produce, 1, pure=False)
    second = client.submit(lambda reference: {"nested": [reference]}, first, pure=False)
    wait([first, second])
    assert objects(client) == before + 1
    del first
    time.sleep(1)
    assert objects(client) == before + 1, "the second key still carries it"
    del second
    until(lambda: objects(client) == before, "freed within seconds of the last key's release")


def test_an_object_that_no_result_carries_is_freed_with_its_task(client):
    def forgetful() -> int:
        mission_control.put([b"never returned"])
        return 1

    def failing() -> None:
        mission_control.put([b"put, then failed"])
        raise ValueError("as planned")

    before = objects(client)
    kept = client.submit(forgetful, pure=False)
    assert kept.result() == 1
    failed = client.submit(failing, pure=False)
    with pytest.raises(ValueError, match="as planned"):
        failed.result()
    until(lambda: objects(client) == before, "nothing is left of them")


def test_losing_the_owners_copy_of_the_reference_does_not_lose_the_object(client):
    reference = client.submit(produce, 7, pure=False)
    wait(reference)
    (owner,) = client.who_has(reference)[reference.key]
    others = [worker for worker in resources(client) if worker != owner]
    client.replicate(reference, workers=others, n=2)

    # As Dask's active memory manager drops the copy of the worker that owns the object.
    def drop(dask_scheduler) -> None:
        task = dask_scheduler.tasks[reference.key]
        keep = [holder for holder in task.who_has if holder.address != owner]
        dask_scheduler.request_remove_replicas(owner, [reference.key], stimulus_id="test") if keep else None

    client.run_on_scheduler(drop)
    until(lambda: owner not in client.who_has(reference)[reference.key], "the owner's copy is gone")
    assert client.submit(consume, [reference], 1, pure=False, workers=others).result() == [71]


def test_put_and_fetch_outside_a_task_say_where_they_belong():
    with pytest.raises(RuntimeError, match="outside a task"):
        mission_control.put([b"x"])


def test_a_part_that_is_not_there_is_an_error(client):
    reference = client.submit(produce, 1, pure=False)
    with pytest.raises(IndexError, match="part 9 of an object of 3"):
        client.submit(consume, [reference], 9, pure=False).result()


def test_tasks_that_a_task_submits_belong_to_its_job(client):
    def parent() -> list[int]:
        inner = get_client()
        references = inner.map(produce, range(2), pure=False)
        return inner.submit(consume, references, 0, pure=False).result()

    with mission_control.job("parent", priority=3):
        future = client.submit(parent, pure=False)
    assert future.result() == [0, 10]
    (job,) = until(lambda: seen(client, "parent"), "the job's transfer is seen")
    assert job["priority"] == 3


def test_jobs_of_several_clients_are_kept_apart(cluster, client):
    from distributed import Client

    with Client(cluster, set_as_default=False) as other:
        futures = []
        for entry in (client, other):
            with mission_control.job("shared name", client=entry):
                references = entry.map(produce, range(2), pure=False)
                futures.append(entry.submit(consume, references, 0, pure=False))
        assert [future.result() for future in futures] == [[0, 10]] * 2
        named = until(lambda: two(client), "both jobs are seen")
        assert len({job["job"] for job in named}) == 2


def two(client) -> list[dict[str, Any]] | None:
    named = [job for job in status(client)["jobs"] if job["job"].startswith("shared name") and job["transfers"]]
    return named if len(named) == 2 else None


def test_encryption_over_an_engine_that_is_not_encrypted_is_refused_before_anything_runs(client):
    with pytest.raises(mission_control.JobRejected, match="TLS"), mission_control.job("secret", encrypt=True):
        client.submit(produce, 1, pure=False)


def test_opportunistic_encryption_is_had_and_proved(client):
    with mission_control.job("opportunistic", encrypt="opportunistic"):
        references = client.map(produce, range(6), pure=False)
        assert client.submit(consume, references, 2, pure=False).result() == [2, 12, 22, 32, 42, 52]

    def agreed() -> list[dict[str, Any]]:
        return [one for job in seen(client, "opportunistic") for one in job["transfers"][0]["transport"]["negotiated"]]

    (one,) = until(agreed, "an agreement is reported")
    assert one["tls"].startswith("TLSv1_3") and not one["authenticated"]


def test_the_graph_tells_the_patterns_of_dasks_own_edges(client):
    with mission_control.job("stages"):
        parts = [client.submit(np.arange, 3, key=("load", index), pure=False) for index in range(4)]
        total = client.submit(lambda entry: sum(map(len, entry)), parts, key="total", pure=False)
        assert total.result() == 12
        (job,) = [entry for entry in status(client)["jobs"] if entry["job"] == "stages"]
    assert [(transfer["from"], transfer["to"], transfer["pattern"]) for transfer in job["transfers"]] == [
        ("load", "total", "gather")
    ]
