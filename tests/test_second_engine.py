"""Mission Control's core serves an engine that is not Dask: jobs, shares, plans, loss and recomputation."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engine import Engine, Task

PARTS, BYTES = 3, 300_000


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    engine = Engine(3, str(tmp_path))
    yield engine
    engine.close()


def content(seed: int) -> list[bytes]:
    return [random.Random(f"{seed}/{part}").randbytes(BYTES) for part in range(PARTS)]


def shuffle(engine: Engine, job: str, first: int) -> tuple[list[Task], list[Task]]:
    """Run map tasks that put their objects, and reduce tasks that have not begun."""
    maps = [engine.submit(job, "map", content=content(first + seed)) for seed in range(4)]
    for task in maps:
        engine.start(task)
    engine.until(lambda: all(task.made for task in maps), "all have put")
    return maps, [engine.submit(job, "reduce", inputs=maps, part=part) for part in range(PARTS)]


def check(reduces: list[Task], first: int) -> None:
    for task in reduces:
        assert task.data == [content(first + seed)[task.part] for seed in range(4)]


def test_jobs_are_shared_planned_and_forgotten(engine):
    jobs = {"one": shuffle(engine, "one", 0), "other": shuffle(engine, "other", 10)}
    known = {job["job"]: job for job in engine.status()["jobs"]}
    for name in jobs:
        (transfer,) = known[name]["transfers"]
        assert transfer["pattern"] == "shuffle" and transfer["evidence"].startswith("task graph"), transfer
        assert [leg["transport"] for leg in known[name]["plan"]["legs"]] == ["shm", "tcp"]
    # A worker waits for both: each has half.
    waits = [{"job": job, "from": "map", "to": "reduce", "asked_bytes": 100} for job in jobs]
    engine.event("report", worker="w0", report={"records": waits})
    engine.until(lambda: [job["weight"] for job in engine.status()["jobs"]] == [0.5, 0.5], "both are weighed")
    for _, reduces in jobs.values():
        for task in reduces:
            engine.start(task)
    everything = [task for _, reduces in jobs.values() for task in reduces]
    engine.until(lambda: all(task.data for task in everything), "all have fetched")
    check(jobs["one"][1], 0)
    check(jobs["other"][1], 10)

    def served() -> bool:
        transfers = [job["transfers"][0] for job in engine.status()["jobs"]]
        return all(own["served_bytes"] == 4 * PARTS * BYTES for own in transfers)

    engine.until(served, "all of it is reported")
    for maps, reduces in jobs.values():
        engine.forget(*reduces, *maps)
    engine.until(lambda: not any(engine.controller.held().values()), "nothing is left of them")
    ended = [record for record in engine.records if record["kind"] == "job-ended"]
    assert {record["job"] for record in ended} == {"one", "other"}
    assert all(record["transfers"][0]["transport"]["chosen"] for record in ended)


def test_what_a_dead_worker_had_is_computed_again(engine):
    maps, reduces = shuffle(engine, "dies", 0)
    victim = maps[0].worker
    assert victim is not None
    engine.kill(victim)
    for task in reduces:
        engine.start(task, next(worker for worker in engine.addresses if worker != victim))
    engine.until(lambda: all(task.data for task in reduces), "all have fetched, some of it anew", 60)
    check(reduces, 0)
    assert {record["kind"] for record in engine.records} >= {"worker-left", "recomputed"}
    assert all(task.worker != victim for task in maps)
    engine.forget(*reduces, *maps)
    engine.until(lambda: not any(engine.controller.held().values()), "nothing is left of them")


def recomputed(engine: Engine) -> int:
    return sum(record["kind"] == "recomputed" for record in engine.records)


def test_a_worker_that_retires_hands_its_objects_over(engine):
    maps, reduces = shuffle(engine, "moves", 0)
    leaves = maps[0].worker
    assert leaves is not None
    engine.retire(leaves)
    for task in reduces:
        engine.start(task)
    engine.until(lambda: all(task.data for task in reduces), "all have fetched")
    check(reduces, 0)
    assert recomputed(engine) == 0
    (handed,) = [record for record in engine.records if record["kind"] == "handed-over"]
    mine = sum(task.worker == leaves for task in maps)
    assert (handed["objects"], handed["bytes"]) == (mine, mine * PARTS * BYTES)
    engine.forget(*reduces, *maps)
    engine.until(lambda: not any(engine.controller.held().values()), "nothing is left of them")


def test_an_object_with_copies_outlives_the_worker_that_put_it(engine):
    maps = [engine.submit("copies", "map", content=content(seed), copies=2) for seed in range(4)]
    for task in maps:
        engine.start(task)

    def copied() -> bool:
        bytes_of = [worker["object_bytes"] for worker in engine.status()["workers"].values()]
        return sum(bytes_of) == 2 * 4 * PARTS * BYTES

    engine.until(copied, "two workers have each")
    victim = maps[0].worker
    assert victim is not None
    engine.kill(victim)
    engine.until(lambda: victim not in engine.addresses, "it is gone")
    reduces = [engine.submit("copies", "reduce", inputs=maps, part=part) for part in range(PARTS)]
    for task in reduces:
        engine.start(task)
    engine.until(lambda: all(task.data for task in reduces), "all have fetched")
    check(reduces, 0)
    assert recomputed(engine) == 0
    engine.until(copied, "another one has what is missing")


def test_a_controller_that_begins_anew_knows_again_what_workers_hold(engine):
    maps, _ = shuffle(engine, "again", 0)
    engine.begin_anew()
    assert engine.status()["objects"] == 0
    for task in maps:
        engine.tell_again(task)
    reduces = [engine.submit("again", "reduce", inputs=maps, part=part) for part in range(PARTS)]
    for task in reduces:
        engine.start(task)
    engine.until(lambda: all(task.data for task in reduces), "all have fetched")
    check(reduces, 0)
    engine.forget(*reduces, *maps)
    engine.until(lambda: not any(engine.controller.held().values()), "nothing is left of them")
