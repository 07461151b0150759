"""Shuffles of unchanged programs while workers pause, retire or have no room: the right rows, or a named error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, Reschedule, Scheduler
from distributed.shuffle._exceptions import P2POutOfDiskError
from distributed.shuffle._shuffle import DataFrameShuffleRun

import mission_control
from mission_control.dask.p2p.frames import FrameRun
from mission_control.workers import workers_of
from tests.chaos.blows import fill_disk
from tests.conftest import resources, until, what_is_left
from tests.test_unchanged_programs import begun, shuffles, the_whole_shuffle

ROWS, INPUTS, OUTPUTS = 2000, 12, 12
PAUSE_S = 10
PHASES = ["shuffle-transfer", "slowly"]
"""Tasks of which one is done: an input was split, an output is there (`slowly` before the shuffle is part of it)."""


@contextmanager
def cluster(workers: int = 3, memory: str = "1GiB", threads: int = 1) -> Iterator[tuple[LocalCluster, Client]]:
    options = {"threads_per_worker": threads, "memory_limit": memory, "dashboard_address": ":0"}
    with LocalCluster(n_workers=workers, **options) as own, Client(own) as client:
        mission_control.install(client)
        yield own, client


def part(seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    return pd.DataFrame({"key": random.integers(0, 500, ROWS), "value": random.random(ROWS)})


def slowly(frame: pd.DataFrame) -> pd.DataFrame:
    time.sleep(0.2)
    return frame


def shuffled(seed: int = 0, slow: bool = True) -> dd.DataFrame:
    frames = dd.from_map(part, [seed * 100 + number for number in range(INPUTS)], meta=part(0).iloc[:0])
    frames = frames.map_partitions(slowly, meta=frames._meta) if slow else frames
    made = frames.shuffle("key", shuffle_method="p2p", npartitions=OUTPUTS)
    return made.map_partitions(slowly, meta=made._meta) if slow else made


def right(got: pd.DataFrame, seed: int = 0) -> None:
    expected = pd.concat([part(seed * 100 + number) for number in range(INPUTS)])
    both = [own.sort_values(["key", "value"]).reset_index(drop=True) for own in (got, expected)]
    pd.testing.assert_frame_equal(*both)


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_stands_still_for_ten_seconds_delays_a_shuffle(phase):
    with cluster() as (_, client), mission_control.job("paused", client=client):
        result = shuffled().persist()
        until(lambda: begun(client, phase), f"{phase} has begun")
        pid = next(iter(client.run(os.getpid).values()))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)
        right(result.compute())
        own = the_whole_shuffle(client)
        assert own["engine"] == "mission" and own["rows_in"] == own["rows_out"] == ROWS * INPUTS


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_retires_costs_no_row(phase):
    with cluster() as (_, client), mission_control.job("retired", client=client):
        result = shuffled().persist()
        until(lambda: begun(client, phase), f"{phase} has begun")
        client.retire_workers([next(iter(workers_of(client)))])
        right(result.compute())


@pytest.mark.parametrize("carried", [True, False])
def test_a_barrier_that_is_given_back_has_the_shuffle_begin_again(carried, tmp_path):
    """As after a late message of an earlier attempt."""
    # The scheduler runs in this process.
    settings = dask.config.set({"mission-control.p2p": carried})
    with settings, cluster() as (_, client), mission_control.job("given back", client=client):
        client.run(give_the_barrier_back_once, str(tmp_path / "once"), carried)
        right(shuffled(slow=False).compute())
        assert (tmp_path / "once").exists()
        (own,) = shuffles(client)
        assert (own["engine"], own["runs"]) == ("mission" if carried else "dask", 2)


def give_the_barrier_back_once(path: str, carried: bool) -> None:
    run = FrameRun if carried else DataFrameShuffleRun
    barrier = run.barrier

    async def once(self: Any, run_ids: Any) -> int:
        try:
            open(path, "x").close()
        except FileExistsError:
            return await barrier(self, run_ids)
        raise Reschedule

    run.barrier = once


@pytest.mark.parametrize("phase", PHASES)
def test_a_shuffle_that_is_cancelled_leaves_nothing(phase):
    with cluster() as (_, client), mission_control.job("cancelled", client=client):
        result = shuffled().persist()
        until(lambda: begun(client, phase), f"{phase} has begun")
        client.cancel(result)
        del result
        until(lambda: not any(own["objects"] for own in resources(client).values()), "objects are freed")
        right(shuffled().compute())
    # The job is over, too.


def test_five_shuffles_at_once_and_the_same_one_twice_bring_their_own_rows():
    with cluster() as (_, client):
        with mission_control.job("five", client=client):
            results = [shuffled(seed).persist() for seed in (1, 2, 3, 4, 5, 1)]
            for seed, result in zip((1, 2, 3, 4, 5, 1), results, strict=True):
                right(result.compute(), seed)
            again = shuffled(1).persist()
            del results
            right(again.compute(), 1)
            assert all(own["engine"] == "mission" for own in shuffles(client))
            del result, again
        until(
            lambda: not what_is_left(client, "objects", "live_bytes", "spooled_bytes", "result_bytes"), "all is freed"
        )


def test_a_full_disk_is_an_error_that_names_it():
    def make(seed: int) -> pd.DataFrame:
        return pd.DataFrame({"key": np.random.default_rng(seed).integers(0, 1 << 40, 500_000), "value": 1.0})

    with cluster(2, "600MiB") as (_, client), mission_control.job("full", client=client):
        client.run(fill_disk, 1 << 20)
        frames = dd.from_map(make, list(range(60)))
        with pytest.raises(P2POutOfDiskError):
            frames.shuffle("key", shuffle_method="p2p", npartitions=60).map_partitions(len).compute()
        client.run(fill_disk, -1)
        assert (
            sum(frames.shuffle("key", npartitions=30, shuffle_method="p2p").map_partitions(len).compute()) == 30_000_000
        )


def test_half_of_the_rows_with_one_key_need_no_more_memory_than_they_have():
    def make(seed: int) -> pd.DataFrame:
        random = np.random.default_rng(seed)
        keys = random.integers(0, 1 << 40, 200_000)
        keys[::2] = 7
        return pd.DataFrame({"key": keys, "value": random.random(200_000)})

    with cluster(2, "600MiB") as (_, client), mission_control.job("skewed", client=client):
        made = dd.from_map(make, list(range(20))).shuffle("key", shuffle_method="p2p", npartitions=20)
        sizes = client.compute(made.map_partitions(len)).result()
        assert sum(sizes) == 4_000_000 and max(sizes) >= 2_000_000


LARGE, PARTS = 1_000_000, 16


def large(seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    return pd.DataFrame({"key": random.integers(0, 1 << 40, LARGE), "value": random.random(LARGE)})


def total(frame: pd.DataFrame) -> pd.DataFrame:
    time.sleep(0.2)
    return pd.DataFrame({"rows": [len(frame)], "sum": [frame["value"].sum()]})


def right_sums(got: pd.DataFrame) -> None:
    assert len(got) == PARTS and got["rows"].sum() == LARGE * PARTS
    assert got["sum"].sum() == pytest.approx(sum(large(seed)["value"].sum() for seed in range(PARTS)))


def test_parts_that_were_taken_are_freed_while_others_are_joined():
    with cluster(2, "2GiB") as (_, client), mission_control.job("freed", client=client):
        made = dd.from_map(large, list(range(PARTS))).shuffle("key", shuffle_method="p2p", npartitions=PARTS)
        result = client.compute(made.map_partitions(total, meta={"rows": int, "sum": float}))
        seen = []
        while not result.done():
            live = sum(own["live_bytes"] for own in resources(client).values())
            (own,) = shuffles(client) or ({"outputs_done": 0},)
            seen.append((own["outputs_done"], live))
            time.sleep(0.05)
        right_sums(result.result())
        most = max(live for _, live in seen)
        assert most >= LARGE * PARTS * 16
        later = [live for done, live in seen if PARTS // 2 + 2 <= done < PARTS]
        assert later and min(later) < 0.6 * most, seen


def join_the_last_when(exists: str) -> None:
    plain = FrameRun.join

    def join(self: FrameRun, partition: int, *rest: Any) -> Any:
        if partition == PARTS - 1:
            until(lambda: os.path.exists(exists), f"{exists} is there", 120)
        return plain(self, partition, *rest)

    FrameRun.join = join


def lose_an_output(dask_scheduler: Scheduler) -> None:
    """Lose the first output on an idle worker, if there is one."""
    (barrier,) = (task for key, task in dask_scheduler.tasks.items() if str(key).startswith("shuffle-barrier"))
    idle = {worker for worker in dask_scheduler.workers.values() if not worker.processing}
    joined = [task.key for task in barrier.dependents if task.state == "memory" and task.who_has <= idle]
    dask_scheduler.plugins["mission-control"].free(sorted(joined)[:1])


@pytest.mark.parametrize("all_are_joined", [False, True])
def test_an_output_that_is_needed_again_after_its_parts_were_freed_starts_the_shuffle_again(all_are_joined, tmp_path):
    go = tmp_path / "go"
    if all_are_joined:
        go.touch()
    joined = PARTS if all_are_joined else PARTS - 1
    with cluster(2, "2GiB", threads=2) as (_, client), mission_control.job("again", client=client):
        client.run(join_the_last_when, str(go))
        made = dd.from_map(large, list(range(PARTS))).shuffle("key", shuffle_method="p2p", npartitions=PARTS)
        result = made.persist()

        def begins_again() -> bool:
            (own,) = until(lambda: shuffles(client), "the shuffle begins")
            if own["runs"] == 1 and own["outputs_done"] == joined:
                # While its parts still exist, the output is joined again from them.
                client.run_on_scheduler(lose_an_output)
            return own["runs"] == 2

        until(begins_again, "the shuffle begins again", 120)
        go.touch()
        right_sums(client.compute(result.map_partitions(total, meta={"rows": int, "sum": float})).result())
        # Outputs that were not lost were not joined again.
        outputs = 1 if all_are_joined else PARTS
        until(lambda: shuffles(client)[0]["outputs_done"] >= outputs, "outputs are reported")
        (own,) = shuffles(client)
        assert own["runs"] == 2 and own["rows_in"] == LARGE * PARTS
        assert own["outputs_done"] == outputs
        assert all_are_joined or own["rows_out"] == own["rows_in"]
