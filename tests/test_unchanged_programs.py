"""Programs that know nothing of Mission Control: Dask's shuffles pass through its data plane, with the right rows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed import Client, LocalCluster, wait

import mission_control
from tests.conftest import resources, status, until, what_is_left


@pytest.fixture(autouse=True)
def p2p() -> Iterator[None]:
    with dask.config.set({"dataframe.shuffle.method": "p2p", "dataframe.convert-string": False}):
        yield


def frame(rows: int, seed: int = 0) -> pd.DataFrame:
    """Columns of many types, with gaps."""
    random = np.random.default_rng(seed)
    some = random.random(rows)

    def gaps(make: Any) -> list[Any]:
        return [None if value < 0.1 else make(value) for value in some]

    def arrow(make: Any, type: pa.DataType) -> Any:
        return pd.array(gaps(make), dtype=pd.ArrowDtype(type))

    return pd.DataFrame(
        {
            "key": random.integers(0, 50, rows),
            "number": random.random(rows),
            "small": random.integers(0, 100, rows).astype("int8"),
            "truth": some < 0.5,
            "text": pd.array(gaps(lambda own: "ß" * int(9 * own)), dtype="str"),
            "plain": pd.array(gaps(lambda own: f"{own:.3}"), dtype=pd.StringDtype("python")),
            "kind": pd.Categorical([f"kind {int(own * (2 + seed))}" for own in some]),
            "time": pd.to_datetime(random.integers(0, 1 << 60, rows)).tz_localize("UTC").tz_convert("Europe/Berlin"),
            "naive": pd.to_datetime(random.integers(0, 1 << 60, rows)),
            "span": pd.to_timedelta(random.integers(0, 1 << 50, rows)),
            "masked": pd.array(gaps(lambda own: int(100 * own)), dtype="Int16"),
            "maybe": pd.array(gaps(lambda own: own < 0.5), dtype="boolean"),
            "bits": arrow(lambda own: own < 0.5, pa.bool_()),
            "price": arrow(lambda own: Decimal(int(1000 * own)) / 100, pa.decimal128(10, 2)),
            "list": arrow(lambda own: [int(9 * own)] * int(4 * own), pa.list_(pa.int64())),
            "nothing": pd.array([None] * rows, dtype=pd.ArrowDtype(pa.null())),
            "object": pd.Series([(1, "a")[int(2 * own)] for own in some], dtype=object),
        },
        index=pd.Index(random.integers(0, 1000, rows), name="row"),
    )


def same(got: pd.DataFrame, expected: pd.DataFrame) -> None:
    """The same rows in any order. Categories count by their names: each input has its own."""
    both = [own.assign(kind=own["kind"].astype("str")).sort_values("number") for own in (got, expected)]
    pd.testing.assert_frame_equal(*both)


def shuffles(client: Client) -> list[dict[str, Any]]:
    return [own for job in status(client)["jobs"] for own in job["shuffles"]]


def pieces(number: int, rows: int = 500) -> list[pd.DataFrame]:
    return [frame(rows, seed) for seed in range(number)]


def whole(parts: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([part.assign(kind=part["kind"].astype("str")) for part in parts])


def given(parts: list[pd.DataFrame]) -> dd.DataFrame:
    return dd.from_map(lambda part: part, parts, meta=parts[0].iloc[:0])


def test_every_type_of_column_arrives_as_it_was_and_the_rows_are_counted(client):
    parts = [*pieces(5), frame(0)]
    shuffled = given(parts).shuffle("key", npartitions=7).persist()
    wait(shuffled)
    (own,) = until(lambda: [own for own in shuffles(client) if own["outputs_done"] == 7], "all outputs are told")
    assert (own["engine"], own["rows_in"], own["rows_out"], own["runs"]) == ("mission", 2500, 2500, 1)
    outputs = dask.compute(*shuffled.to_delayed())
    keys = [set(output["key"]) for output in outputs]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 50, "a key is in one partition only"
    same(whole(list(outputs)), whole(parts))
    for output in outputs:
        assert dict(output.dtypes.drop("kind")) == dict(parts[0].dtypes.drop("kind"))
    transfers = [own for job in status(client)["jobs"] for own in job["transfers"] if own["from"] == "shuffle-transfer"]
    assert transfers and transfers[0]["pattern"] == "shuffle" and transfers[0]["served_bytes"] > 0
    del shuffled, outputs
    until(lambda: not what_is_left(client, "objects", "live_bytes", "spooled_bytes", "result_bytes"), "nothing is left")


def test_the_same_categories_in_another_order_keep_their_meaning(client):
    parts = [
        pd.DataFrame({"key": range(10), "kind": pd.Categorical(["a", "b"] * 5, categories=list(order))})
        for order in ("ab", "ba")
    ]
    got = given(parts).shuffle("key", npartitions=3).compute()
    assert sorted(zip(got["key"], got["kind"], strict=True)) == sorted(
        (key, kind) for part in parts for key, kind in zip(part["key"], part["kind"], strict=True)
    )


@pytest.mark.parametrize("how", ["inner", "outer", "left"])
def test_merges_bring_what_pandas_brings(client, how):
    random = np.random.default_rng(1)
    left = pd.DataFrame({"key": random.integers(0, 300, 2000), "left": random.random(2000)})
    right = pd.DataFrame({"key": random.integers(100, 400, 1000), "right": random.random(1000)})
    got = dd.from_pandas(left, npartitions=5).merge(dd.from_pandas(right, npartitions=4), on="key", how=how).compute()
    expected = left.merge(right, on="key", how=how)
    order = ["key", "left", "right"]
    got, expected = (own.sort_values(order).reset_index(drop=True) for own in (got, expected))
    pd.testing.assert_frame_equal(got, expected)
    assert {own["engine"] for own in shuffles(client)} <= {"mission"}


def test_groups_sorting_index_and_duplicates_are_as_in_pandas(client):
    with mission_control.job("groups", client=client):  # it is not over before it was looked at
        random = np.random.default_rng(2)
        plain = pd.DataFrame({"key": random.integers(0, 2000, 5000).astype(str), "number": random.random(5000)})
        lazy = dd.from_pandas(plain, npartitions=6)
        grouped = lazy.groupby("key").number.sum(split_out=4).compute().sort_index()
        pd.testing.assert_series_equal(grouped, plain.groupby("key").number.sum().sort_index(), check_index_type=False)
        ordered = lazy.sort_values("number").compute()
        pd.testing.assert_frame_equal(ordered, plain.sort_values("number"))
        indexed = lazy.set_index("number").compute()
        pd.testing.assert_frame_equal(indexed, plain.set_index("number").sort_index())
        unique = lazy.drop_duplicates(subset=["key"], split_out=3).compute()
        assert sorted(unique["key"]) == sorted(plain["key"].unique())
        done = [own for own in shuffles(client) if own["rows_in"] is not None]
        assert done and all(own["engine"] == "mission" for own in done), done


def test_only_some_outputs_are_wanted(client):
    plain = pd.DataFrame({"key": np.arange(1000) % 97, "number": np.arange(1000.0)})
    shuffled = dd.from_pandas(plain, npartitions=4).shuffle("key", npartitions=8)
    every = dask.compute(*shuffled.to_delayed())
    two = shuffled.partitions[[2, 5]].compute()
    expected = pd.concat([every[2], every[5]])
    pd.testing.assert_frame_equal(two.sort_index(), expected.sort_index())


def test_frames_of_unknown_kinds_and_a_part_that_is_turned_off_stay_with_dask(client):
    with mission_control.job("unknown", client=client):  # it is not over before it was looked at
        periods = pd.DataFrame({"key": range(100), "month": pd.period_range("2000-01", periods=100, freq="M")})
        assert len(given([periods, periods]).shuffle("key", npartitions=3).compute()) == 200
        (own,) = [own for own in shuffles(client) if own["engine"] == "dask"]
        assert own["why"] == "column 'month' is of type period[M]"
        with dask.config.set({"mission-control.p2p": False}):
            # The scheduler of this cluster has the test's own settings.
            plain = pd.DataFrame({"key": range(100)})
            assert len(dd.from_pandas(plain, npartitions=2).shuffle("key", npartitions=3).compute()) == 100
        assert any(own["why"] == "mission-control.p2p is false" for own in shuffles(client))


def test_columns_may_lie_anywhere_in_memory(client):
    """As those of a frame that came from another worker."""

    def misaligned(rows: int) -> pd.DataFrame:
        columns = {}
        for name, values in (
            ("key", np.arange(rows)),
            ("number", np.arange(rows) / 2),
            ("many", np.arange(2 * rows)[::2]),
        ):
            memory = bytearray(b"x" + values.tobytes())
            columns[name] = np.frombuffer(memory, values.dtype, offset=1)
        return pd.DataFrame(columns, copy=False)

    got = dd.from_map(misaligned, [100, 200]).shuffle("key", npartitions=3).compute()
    assert sorted(got["number"] * 2) == sorted([*range(100), *range(200)]) and (got["number"] * 2 == got["key"]).all()
    assert (got["many"] == 2 * got["key"]).all()


def test_a_row_without_a_partition_is_an_error_and_not_a_lost_row(client):
    plain = pd.DataFrame({"_partitions": [0, 1, 7], "number": range(3)})
    with pytest.raises(Exception, match="row 2 has output partition 7, but there are 2"):
        from dask.dataframe.dask_expr import new_collection
        from dask.dataframe.dask_expr._shuffle import P2PShuffle

        lazy = dd.from_pandas(plain, npartitions=1)
        new_collection(P2PShuffle(lazy.expr, "_partitions", 2, False, False)).compute()


@pytest.mark.parametrize("phase", ["shuffle-transfer", "p2pshuffle"])
def test_a_worker_that_dies_while_parts_are_added_or_joined_costs_no_row(phase):
    options = {"n_workers": 3, "threads_per_worker": 1, "memory_limit": "1GiB", "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        mission_control.install(client)
        parts = pieces(12, rows=200)

        def slow(part: pd.DataFrame) -> pd.DataFrame:
            time.sleep(0.2)
            return part

        shuffled = given(parts).map_partitions(slow, meta=parts[0].iloc[:0]).shuffle("key", npartitions=12)
        shuffled = shuffled.map_partitions(slow, meta=shuffled._meta).persist()
        until(lambda: begun(client, phase), f"{phase} has begun")
        victim = next(iter(client.run(os.getpid).values()))
        os.kill(victim, signal.SIGKILL)
        got = shuffled.compute()
        same(whole([got]), whole(parts))
        (own,) = shuffles(client)
        assert own["rows_in"] == own["rows_out"] == 2400 and own["engine"] == "mission", own


def begun(client: Client, prefix: str) -> bool:
    counts = client.run_on_scheduler(
        lambda dask_scheduler: {name: prefix.states["memory"] for name, prefix in dask_scheduler.task_prefixes.items()}
    )
    return any(count for name, count in counts.items() if name.startswith(prefix))


def test_data_larger_than_the_store_goes_to_the_disk(tmp_path):
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "400MiB", "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        mission_control.install(client)

        def make(seed: int) -> pd.DataFrame:
            random = np.random.default_rng(seed)
            return pd.DataFrame({"key": random.integers(0, 1 << 40, 500_000), "a": random.random(500_000), "b": seed})

        lazy = dd.from_map(make, list(range(40)))
        counted = lazy.shuffle("key", npartitions=40).map_partitions(
            lambda part: pd.Series([len(part), part["a"].sum()])
        )
        spooled = 0
        future = client.compute(counted)
        while not future.done():
            spooled = max(spooled, sum(own["spooled_bytes"] for own in resources(client).values()))
            time.sleep(0.2)
        got = future.result()
        assert spooled > 0 and got[0].sum() == 20_000_000
        expected = sum(make(seed)["a"].sum() for seed in range(40))
        assert got[1].sum() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", ["f8", "i2", "M8[s]", "c16", "U3"])
def test_arrays_are_rechunked_as_numpy_has_them(client, dtype):
    with mission_control.job("arrays", client=client):  # it is not over before it was looked at
        random = np.random.default_rng(3)
        plain = random.integers(0, 100, (60, 50, 4)).astype("i8").astype(dtype)
        chunked = da.from_array(plain, chunks=(7, 50, 3))
        for chunks in ((60, 4, 4), (13, 11, 2), (1, 50, 4)):
            np.testing.assert_array_equal(chunked.rechunk(chunks, method="p2p").compute(), plain)
        carried = [own for own in shuffles(client) if own["rows_in"] is not None]
        assert carried and all(own["engine"] == "mission" and own["rows_out"] <= own["rows_in"] for own in carried)


def test_arrays_that_are_not_plain_memory_are_rechunked_too(client):
    plain = np.ma.masked_less(np.arange(120).reshape(12, 10), 30)
    masked = da.from_array(plain, chunks=(5, 10)).rechunk((12, 3), method="p2p").compute()
    np.testing.assert_array_equal(masked.filled(-1), plain.filled(-1))
    objects = np.array([[{"row": row}] * 3 for row in range(8)], dtype=object)
    assert (da.from_array(objects, chunks=(3, 3)).rechunk((8, 1), method="p2p").compute() == objects).all()
    some = da.from_array(np.arange(100), chunks=7).rechunk(9, method="p2p")
    assert some[20:40].compute().tolist() == list(range(20, 40))
    empty = da.from_array(np.zeros((4, 0)), chunks=(2, 0)).rechunk((4, 0), method="p2p")
    assert empty.compute().shape == (4, 0)
