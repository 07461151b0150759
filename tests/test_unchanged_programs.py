"""Programs without Mission Control in their code: Dask's shuffles use its data plane, with the right rows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
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
from distributed import Client, LocalCluster, Security, wait
from distributed.shuffle._exceptions import P2PConsistencyError

import mission_control
from tests.conftest import mission, resources, status, until, what_is_left
from tests.fork_server import new_interpreters


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
    """Compare rows in any order. Categories are compared by name, because each input has its own."""
    both = [own.assign(kind=own["kind"].astype("str")).sort_values("number") for own in (got, expected)]
    pd.testing.assert_frame_equal(*both)


def shuffles(client: Client, name: str | None = None) -> list[dict[str, Any]]:
    """Return the records of shuffles of a job, or of all."""
    return [own for job in status(client)["jobs"] if name in (None, job["job"]) for own in job["shuffles"]]


def the_whole_shuffle(client: Client) -> dict[str, Any]:
    """Return the record of the only shuffle, once workers have reported all its outputs: reports come after results."""

    def whole_ones() -> list[dict[str, Any]]:
        return [own for own in shuffles(client) if own["outputs_done"] == own["outputs"]]

    (own,) = until(whole_ones, "all outputs are reported", instead=lambda: shuffles(client))
    return own


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
    own = the_whole_shuffle(client)
    assert (own["engine"], own["rows_in"], own["rows_out"], own["runs"]) == ("mission", 2500, 2500, 1)
    assert own["outputs"] == 7
    outputs = dask.compute(*shuffled.to_delayed())
    keys = [set(output["key"]) for output in outputs]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 50, "a key is in one partition only"
    same(whole(list(outputs)), whole(parts))
    for output in outputs:
        assert dict(output.dtypes.drop("kind")) == dict(parts[0].dtypes.drop("kind"))

    def served() -> list[dict[str, Any]]:
        all_of_them = [own for job in status(client)["jobs"] for own in job["transfers"]]
        return [own for own in all_of_them if own["from"] == "shuffle-transfer" and own["served_bytes"] > 0]

    # Workers report periodically.
    assert until(served, "bytes are reported")[0]["pattern"] == "shuffle"
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
    with mission_control.job(f"merge-{how}", client=client):  # it must not end before it was checked
        lazy = dd.from_pandas(left, npartitions=5).merge(
            dd.from_pandas(right, npartitions=4), on="key", how=how, shuffle_method="p2p"
        )
        merged = lazy.persist()
        got = merged.compute()

        def both() -> list[tuple[str, int, int]]:
            counts = [(one["engine"], one["rows_in"], one["rows_out"]) for one in shuffles(client, f"merge-{how}")]
            return counts if all(rows_in == rows_out for _, rows_in, rows_out in counts) else []

        # One task joins an output of each shuffle.
        assert sorted(until(both, "all rows are out")) == [("mission", 1000, 1000), ("mission", 2000, 2000)]
    expected = left.merge(right, on="key", how=how)
    order = ["key", "left", "right"]
    got, expected = (own.sort_values(order).reset_index(drop=True) for own in (got, expected))
    pd.testing.assert_frame_equal(got, expected)


def test_groups_sorting_index_and_duplicates_are_as_in_pandas(client):
    with mission_control.job("groups", client=client):  # it must not end before it was checked
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


def test_python_objects_come_back_as_they_were(client):
    stamp = pd.Timestamp("2026-01-01T00:00:00.000000001")
    zones = [pd.Timestamp("2026-01-01", tz=zone) for zone in ("UTC", "Europe/Paris")]
    values = {
        "large": [2**60 + 1, None] * 4,
        "huge": [2**70, 1] * 4,
        "time": [stamp, None] * 4,
        "zones": zones * 4,
        "gaps": ["a", None, float("nan"), "b"] * 2,
        "number": [1, float("nan")] * 4,
        "not": [float("nan")] * 8,
        "none": [None] * 8,
        "truth": [True, None] * 4,
        "bytes": [b"\0", b""] * 4,
        "day": [stamp.date(), None] * 4,
        "list": [[1], []] * 4,
    }
    part = pd.DataFrame({"key": range(8), **{name: pd.Series(own, dtype=object) for name, own in values.items()}})
    got = given([part]).shuffle("key", npartitions=3).compute().set_index("key").sort_index()
    for name, own in values.items():
        assert got[name].dtype == object
        for one, other in zip(got[name], own, strict=True):
            same_gap = one is other or (one != one and other != other)
            assert same_gap or (type(one) is type(other) and one == other), (name, one, other)
            assert getattr(one, "tz", None) == getattr(other, "tz", None)


def test_gaps_among_texts_that_are_python_objects_stay_none(client):
    parts = [pd.DataFrame({"key": [0, 1, 2, 3], "text": pd.Series(["a", None, "b", None], dtype=object)})] * 4
    whole = dd.from_map(lambda own: own, parts, meta=parts[0].iloc[:0]).shuffle("key", npartitions=3).compute()
    assert sorted(map(str, whole["text"])) == ["None"] * 8 + ["a"] * 4 + ["b"] * 4


def test_a_partition_without_any_value_in_a_column_does_not_change_its_type(client):
    full = pd.DataFrame(
        {
            "key": range(10),
            "time": pd.date_range("2026-01-01", periods=10),
            "text": pd.array(["x"] * 10, dtype="str"),
            "kind": pd.Categorical(["a", "b"] * 5),
            "masked": pd.array([1] * 10, dtype="Int64"),
            "number": [1] * 10,
        }
    )
    empty = pd.DataFrame({"key": range(10), **{name: [None] * 10 for name in full.columns[1:]}}, dtype=object)
    empty["key"] = range(10)
    frame = dd.from_map(lambda part: part, [full, empty], meta=full.iloc[:0], enforce_metadata=False)
    with mission_control.job("gaps", client=client):
        got = dask.compute(*frame.shuffle("key", npartitions=4).to_delayed(), scheduler=client)
    for output in filter(len, got):
        expected = full.dtypes.to_dict() | {"number": np.dtype("float64")}
        assert output.dtypes.to_dict() == expected, output.dtypes
    assert sum(map(len, got)) == 20 and sum(output["time"].isna().sum() for output in got) == 10


def test_categories_whose_orders_differ_have_no_order(client):
    kinds = [pd.CategoricalDtype(order, ordered=True) for order in (["low", "high"], ["high", "low", "most"])]
    parts = [pd.DataFrame({"key": range(6), "kind": pd.Series(["low", "high"] * 3, dtype=kind)}) for kind in kinds]
    got = given(parts).shuffle("key", npartitions=2).compute()
    assert isinstance(got["kind"].dtype, pd.CategoricalDtype) and not got["kind"].dtype.ordered
    assert sorted(got["kind"]) == ["high"] * 6 + ["low"] * 6


class Text(str):
    """A text of a derived type."""


def test_objects_of_derived_types_come_back_as_they_were(client):
    """Texts that no encoding can represent."""
    made = [Text("a"), np.int32(7), np.str_("b"), True, "c", "\udc80d", 1 << 70, b"e"]
    kinds: dict[str, Any] = {f"only {number}": [value] * 16 for number, value in enumerate(made)}
    given = pd.DataFrame({"key": range(16), **{name: pd.Series(own, dtype=object) for name, own in kinds.items()}})
    got = dd.from_pandas(given, npartitions=4).shuffle("key").compute().sort_values("key")
    for name, values in kinds.items():
        assert [(type(own), own) for own in got[name]] == [(type(own), own) for own in values], name


def test_a_shuffle_is_explained_after_its_job_is_over(client):
    with mission_control.job("over", client=client):
        given(pieces(4)).shuffle("key", npartitions=3).compute()
    until(lambda: not any(job["job"] == "over" for job in status(client)["jobs"]), "the job is over")
    said = mission("explain", "over", "--scheduler", client.scheduler.address)
    assert "it was over at" in said.stdout and "2,000 rows in, 2,000 out" in said.stdout, said
    assert json.loads(mission("explain", "over", "--json", "--scheduler", client.scheduler.address).stdout)["ended"]
    never = mission("explain", "never", "--scheduler", client.scheduler.address)
    assert never.returncode == 2 and "there is no job 'never' now" in never.stderr
    # Whoever does not know the name finds it.
    assert re.search(r"ended and still on record: (.*, )?over\b", never.stderr)
    jobs = mission("jobs", "--json", "--scheduler", client.scheduler.address)
    assert "over" in json.loads(jobs.stdout)["ended"]


def test_only_some_outputs_are_wanted(client):
    plain = pd.DataFrame({"key": np.arange(1000) % 97, "number": np.arange(1000.0)})
    shuffled = dd.from_pandas(plain, npartitions=4).shuffle("key", npartitions=8)
    every = dask.compute(*shuffled.to_delayed())
    two = shuffled.partitions[[2, 5]].compute()
    expected = pd.concat([every[2], every[5]])
    pd.testing.assert_frame_equal(two.sort_index(), expected.sort_index())


def test_frames_of_unknown_kinds_and_a_part_that_is_turned_off_stay_with_dask(client):
    with mission_control.job("unknown", client=client):  # it must not end before it was checked
        periods = pd.DataFrame({"key": range(100), "month": pd.period_range("2000-01", periods=100, freq="M")})
        assert len(given([periods, periods]).shuffle("key", npartitions=3).compute()) == 200
        (own,) = [own for own in shuffles(client) if own["engine"] == "dask"]
        assert own["why"] == "column 'month' is of type period[M]"
        with dask.config.set({"mission-control.p2p": False}):
            # The scheduler of this cluster uses the test's settings.
            plain = pd.DataFrame({"key": range(100)})
            assert len(dd.from_pandas(plain, npartitions=2).shuffle("key", npartitions=3).compute()) == 100
        assert any(own["why"] == "mission-control.p2p is false" for own in shuffles(client))


def test_dask_carries_nothing_in_the_clear_that_is_to_be_encrypted(client):
    periods = pd.DataFrame({"key": range(100), "month": pd.period_range("2000-01", periods=100, freq="M")})
    with mission_control.job("secret periods", encrypt="opportunistic", client=client):
        lazy = given([periods, periods]).shuffle("key", npartitions=3)
        words = r"job secret periods demands encryption.*because column 'month' is of type period\[M\]"
        with pytest.raises(P2PConsistencyError, match=words):
            lazy.compute()


def test_columns_may_lie_anywhere_in_memory(client):
    """Rows as in a frame from another worker."""

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
        own = the_whole_shuffle(client)
        assert own["rows_in"] == own["rows_out"] == 2400 and own["engine"] == "mission", own


def begun(client: Client, prefix: str) -> bool:
    counts = client.run_on_scheduler(
        lambda dask_scheduler: {name: prefix.states["memory"] for name, prefix in dask_scheduler.task_prefixes.items()}
    )
    return any(count for name, count in counts.items() if name.startswith(prefix))


def test_data_larger_than_the_store_goes_to_the_disk(tmp_path):
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "400MiB", "dashboard_address": ":0"}
    with new_interpreters(), LocalCluster(**options) as cluster, Client(cluster) as client:
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
    with mission_control.job("arrays", client=client):  # it must not end before it was checked
        random = np.random.default_rng(3)
        plain = random.integers(0, 100, (60, 50, 4)).astype("i8").astype(dtype)
        chunked = da.from_array(plain, chunks=(7, 50, 3))
        for chunks in ((60, 4, 4), (13, 11, 2), (1, 50, 4)):
            np.testing.assert_array_equal(chunked.rechunk(chunks, method="p2p").compute(), plain)
        carried = [own for own in shuffles(client) if own["rows_in"] is not None]
        assert carried and all(own["engine"] == "mission" and own["rows_out"] <= own["rows_in"] for own in carried)


def test_two_results_of_one_rechunked_array_take_the_same_parts_in_one_run(client):
    with mission_control.job("twice", client=client):
        array = da.random.default_rng(1).random((8000, 2000), chunks=(1000, 2000)).persist()
        with dask.config.set({"array.rechunk.method": "p2p"}):
            turned = array.rechunk((8000, 50))
        first, second = (turned + 1).persist(), (turned * 2).persist()
        expected = array.compute()
        np.testing.assert_array_equal(first.compute(), expected + 1)
        np.testing.assert_array_equal(second.compute(), expected * 2)
        assert [own["runs"] for own in shuffles(client)] == [1]


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


def test_chunks_of_different_kinds_are_rechunked_as_dask_does(client):
    plain, masked = da.ones(6, chunks=3), da.ma.masked_equal(da.arange(6, chunks=3), 2)
    integers = da.from_delayed(dask.delayed(np.arange)(6, dtype="int32"), (6,), "float64").rechunk(3)
    for parts in ([plain, masked], [plain, integers]):
        with mission_control.job("kinds", client=client):
            x = da.concatenate(parts)
            got = client.compute(x.rechunk(4, method="p2p")).result()
            expected = client.compute(x).result()
        assert type(got) is type(expected) and np.ma.allequal(got, expected)
        assert np.array_equal(np.ma.getmaskarray(got), np.ma.getmaskarray(expected))


def test_arrays_whose_chunks_are_of_unknown_sizes_stay_with_dask(client):
    x = da.arange(40, chunks=10).reshape(10, 4)
    x = x[x[:, 0] % 8 == 0]
    with mission_control.job("unknown", client=client):
        got = client.compute(x.rechunk({1: 1}, method="p2p")).result()
        assert np.array_equal(got, [[n, n + 1, n + 2, n + 3] for n in range(0, 40, 8)])
        unknown = [own for own in shuffles(client) if "not known" in own["why"]]
    assert unknown and all(own["engine"] == "dask" for own in unknown)


def test_a_worker_without_a_data_plane_that_comes_later_leaves_the_shuffle_to_dask(tmp_path):
    waits = tmp_path / "waits"

    def slowly(part: pd.DataFrame) -> pd.DataFrame:
        time.sleep(1)
        until(lambda: not waits.exists(), "a third worker has come", 120)
        return part

    options = {"threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": "1GiB"}
    with LocalCluster(n_workers=2, **options) as cluster, Client(cluster) as client:
        mission_control.install(client)
        parts = [pd.DataFrame({"key": np.arange(1000) + 1000 * n}) for n in range(16)]
        with mission_control.job("later", client=client):
            frames = dd.from_map(slowly, parts, meta=parts[0].iloc[:0])
            result = frames.shuffle("key", npartitions=8).persist()
            until(lambda: [own for own in shuffles(client) if own["engine"] == "mission"], "the shuffle begins")
            waits.touch()
            command = [
                sys.executable,
                "-m",
                "dask",
                "worker",
                cluster.scheduler_address,
                "--no-nanny",
                "--nthreads",
                "4",
            ]
            environment = os.environ | {"MISSION_LINK_RATE": "nonsense"}
            with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as other:
                try:
                    client.wait_for_workers(3, timeout=120)
                    waits.unlink()
                    wait(result, timeout=120)
                    assert sorted(result.compute()["key"]) == list(range(16_000))
                    (own,) = shuffles(client)
                    assert own["engine"] == "dask" and "MISSION_LINK_RATE" in own["why"] and own["runs"] == 2, own
                finally:
                    other.terminate()


def test_where_dask_speaks_tls_its_shuffles_are_encrypted_without_being_asked():
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": "1GiB"}
    with LocalCluster(security=Security.temporary(), **options) as cluster, Client(cluster) as client:
        assert cluster.scheduler_address.startswith("tls://")
        mission_control.install(client)
        parts = pieces(6)
        with mission_control.job("secret", client=client):
            result = dd.from_map(lambda own: own, parts, meta=parts[0].iloc[:0]).shuffle("key").persist()
            wait(result)
            (own,) = shuffles(client)
            assert own["engine"] == "mission", own
            (job,) = until(
                lambda: [job for job in status(client)["jobs"] if any(carried_by(job).values())], "bytes are reported"
            )
        assert {name for name, carried in carried_by(job).items() if carried} == {"tls"}
        same(result.compute(), pd.concat(parts))


def carried_by(job: dict[str, Any]) -> dict[str, int]:
    """Bytes of a job's transfers, by transport."""
    carried: dict[str, int] = {}
    for transfer in job["transfers"]:
        for name, amount in transfer["transport"]["bytes"].items():
            carried[name] = carried.get(name, 0) + amount
    return carried


def test_mission_control_can_be_removed_while_shuffles_run():
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": "1GiB"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:

        def names(own: Any) -> set[str]:
            heard = {name for name, handler in own.stream_handlers.items() if handler.__name__ != "ignored"}
            found = {*own.plugins, *own.handlers, *heard, *own.periodic_callbacks}
            # The handlers for a shuffle's inputs: without a plug-in the worker refuses them.
            stay = {"mission_control_shuffle_inputs", "mission_control_shuffle_index"}
            return {str(name) for name in found if "mission" in str(name)} - stay

        def of_worker(dask_worker: Any) -> set[str]:
            from distributed import worker

            left = names(dask_worker) | {name for name in dask_worker.metrics if "mission" in name}
            return left | {"results"} if hasattr(worker._run_task, "_mission_control") else left

        def pages() -> int:
            url = cluster.scheduler.http_server.port
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{url}/mission-control") as page:
                    return page.status
            except urllib.error.HTTPError as error:
                return error.code

        before = set(vars(cluster.scheduler))
        update_graph = cluster.scheduler.stream_handlers["update-graph"]
        mission_control.install(client)
        assert pages() == 200 and any(client.run(of_worker).values())
        with mission_control.job("kept", client=client):
            kept = client.submit(lambda: mission_control.put([b"data"]), pure=False)
            wait(kept)
            with pytest.raises(RuntimeError, match="1 objects that tasks put are in use"):
                mission_control.uninstall(client)
        del kept
        until(lambda: not any(own["objects"] for own in resources(client).values()), "it is released")
        with mission_control.job("secret", encrypt="opportunistic", client=client):
            secret = client.submit(lambda: 1, pure=False)
            wait(secret)
            with pytest.raises(
                RuntimeError, match="job secret demands encryption, which the engine's own connections lack"
            ):
                mission_control.uninstall(client)
        del secret
        until(lambda: not status(client)["jobs"], "its job is over")

        def slowly(part: pd.DataFrame) -> pd.DataFrame:
            time.sleep(0.5)
            return part

        parts = [pd.DataFrame({"key": np.arange(1000) + 1000 * n}) for n in range(8)]
        with mission_control.job("removed", client=client):
            shuffled = dd.from_map(slowly, parts, meta=parts[0].iloc[:0]).shuffle("key", npartitions=5).persist()
            until(lambda: shuffles(client), "it begins")
        mission_control.uninstall(client)
        assert sorted(shuffled.compute()["key"]) == list(range(8000))
        assert not any(client.run(of_worker).values()), client.run(of_worker)
        assert not names(cluster.scheduler) and pages() == 404
        assert cluster.scheduler.stream_handlers["update-graph"] is update_graph
        assert set(vars(cluster.scheduler)) == before
        again = dd.from_map(lambda part: part, parts, meta=parts[0].iloc[:0]).shuffle("key", npartitions=4)
        assert sorted(again.compute()["key"]) == list(range(8000)), "Dask goes on alone"
        mission_control.uninstall(client)
        mission_control.install(client)
        with mission_control.job("again", client=client):  # it must not end before it was checked
            assert sorted(given(parts).shuffle("key", npartitions=3).compute()["key"]) == list(range(8000))
            assert [own["engine"] for own in shuffles(client)] == ["mission"]
