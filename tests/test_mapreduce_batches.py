"""MapReduce over tables of Arrow: each row of each map task is reduced once, with the others of its key."""

from __future__ import annotations

import datetime
import itertools
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mission_control
from mission_control.map_reduce import items_of
from tests.conftest import held_by_scheduler, mission, until, what_is_left

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")

ROWS = 5_000


def rows_of(seed: int) -> Any:
    """Half of the rows have the same key."""
    random = np.random.default_rng(seed)
    keys = np.where(random.random(ROWS) < 0.5, "the", np.array([f"word {n}" for n in random.integers(0, 3000, ROWS)]))
    return pa.table({"word": keys.tolist(), "count": random.integers(0, 100, ROWS), "seed": np.full(ROWS, seed)})


def tables_of(seed: int) -> Iterator[Any]:
    whole = rows_of(seed)
    yield from whole.slice(0, 2000).to_batches()
    yield whole.slice(2000)


def summed(table: Any) -> Any:
    made = table.group_by("word", use_threads=False).aggregate([("count", "sum"), ("seed", "min")])
    return made.rename_columns(["word", "count", "seed"])


def all_items(output: Any) -> list[Any]:
    return list(items_of(output.value))


def tables(client: Any, made: list[Any]) -> list[Any]:
    """Return the tables of all reduce tasks as one."""
    outputs = client.gather(made)
    found = [
        pa.concat_tables(own) for own in client.gather([client.submit(all_items, own, pure=False) for own in made])
    ]
    assert [len(own) for own in found] == [own.items for own in outputs]
    return found


def rows(table: Any) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def everything(made: list[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.chain.from_iterable(map(rows, made)))


@pytest.mark.parametrize("partition", ("hash", "range"))
def test_rows_come_out_in_order_and_no_key_in_two_tasks(client, partition):
    made = mission_control.mapreduce(range(6), map=tables_of, partition=partition, reducers=5, client=client)
    found = tables(client, made)
    assert sorted(everything(found)) == sorted(everything([rows_of(seed) for seed in range(6)]))
    keys = [table.column(0).to_pylist() for table in found]
    assert all(own == sorted(own) for own in keys)
    assert sum(len(set(own)) for own in keys) == len(set(itertools.chain.from_iterable(keys)))
    if partition == "range":
        assert list(itertools.chain.from_iterable(keys)) == sorted(itertools.chain.from_iterable(keys))
    del made, found
    until(lambda: not what_is_left(client, "objects", "live_bytes"), "nothing is left")


def less_memory(dask_worker: Any, less: bool) -> None:
    from mission_control.map_reduce import batches, groups

    # A fraction of 2 GiB, the memory of a worker.
    groups.MEMORY_FRACTION = 1e-5 if less else 0.125
    groups.PARTS_MAX = 2 if less else 128
    batches.TABLE_BYTES = 30_000 if less else 64 << 20
    batches.BLOCK_BYTES = 3_000 if less else 1 << 20


@pytest.mark.parametrize("less", (False, True))
def test_rows_of_a_key_are_combined_to_one(client, less):
    client.run(less_memory, less=less)
    try:
        made = mission_control.mapreduce(range(6), map=tables_of, combine=summed, reducers=3, client=client)
        found = everything(tables(client, made))
    finally:
        client.run(less_memory, less=False)
    assert sorted(found) == sorted(rows(summed(pa.concat_tables([rows_of(seed) for seed in range(6)]))))


def median(table: Any) -> Any:
    made = table.group_by("word", use_threads=False).aggregate([("count", "list"), ("count", "count")])
    values = [float(np.median(own)) for own in made.column("count_list").to_pylist()]
    return pa.table({"word": made.column("word"), "median": values, "rows": made.column("count_count")})


def other_keys(seed: int) -> Any:
    """No key has many rows."""
    chance = np.random.default_rng(seed)
    return pa.table(
        {"word": [f"word {n}" for n in chance.integers(0, 3000, ROWS)], "count": chance.integers(0, 9, ROWS)}
    )


@pytest.mark.parametrize("less", (False, True))
def test_a_reducer_has_all_rows_of_its_keys(client, less):
    client.run(less_memory, less=less)
    try:
        made = mission_control.mapreduce(range(6), map=other_keys, reduce=median, reducers=3, client=client)
        found = everything(tables(client, made))
    finally:
        client.run(less_memory, less=False)
    assert sorted(found) == sorted(rows(median(pa.concat_tables([other_keys(seed) for seed in range(6)]))))


def test_a_key_that_is_too_much_says_so_and_passes_without_a_reducer(client):
    client.run(less_memory, less=True)
    try:
        given = {"map": tables_of, "reducers": 2, "client": client}
        with pytest.raises(ValueError, match=r"key 'the' have more than .*give combine"):
            client.gather(mission_control.mapreduce(range(6), reduce=median, **given))
        found = tables(client, mission_control.mapreduce(range(6), **given))
    finally:
        client.run(less_memory, less=False)
    assert sorted(everything(found)) == sorted(everything([rows_of(seed) for seed in range(6)]))
    assert all(own.column(0).to_pylist() == sorted(own.column(0).to_pylist()) for own in found)


TIMES = [datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=n) for n in range(40)]
KEYS: dict[str, Any] = {
    "text": pa.array([*(f"text {n}" for n in range(40)), "", "ä", None]),
    "large text": pa.array([*(f"text {n}" for n in range(40)), None], pa.large_string()),
    "bytes": pa.array([b"", b"\0", b"\xff\0", *(b"%d" % n for n in range(40)), None], pa.binary()),
    "fixed": pa.array([b"%03d" % n for n in range(40)], pa.binary(3)),
    "fixed with a gap": pa.array([*(b"%03d" % n for n in range(40)), None], pa.binary(3)),
    "integer": pa.array([*range(-20, 20), -(2**63), 2**63 - 1, None]),
    "small": pa.array([*range(0, 40), 255], pa.uint8()),
    "float": pa.array([*(n / 4 for n in range(-20, 20)), float("inf"), float("-inf"), None]),
    "single": pa.array([n / 4 for n in range(40)], pa.float32()),
    "truth": pa.array([True, False, None]),
    "time": pa.array([*TIMES, None], pa.timestamp("us", tz="UTC")),
    "nanoseconds": pa.array([2**60 + n for n in range(40)], pa.int64()).cast(pa.timestamp("ns")),
    "date": pa.array([*(time.date() for time in TIMES), None], pa.date32()),
    "span": pa.array([datetime.timedelta(seconds=n) for n in range(40)], pa.duration("ms")),
    "named": pa.array([*(f"text {n % 9}" for n in range(40)), None]).dictionary_encode(),
}


def numbered(given: tuple[str, int]) -> Any:
    keys = KEYS[given[0]]
    return pa.table({"key": keys, "seed": np.full(len(keys), given[1])})


def shuffled_keys(given: tuple[str, int]) -> Any:
    table = numbered(given)
    return table.take(np.random.default_rng(given[1]).permutation(len(table)))


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_all_types_meet(client, kind):
    """By hash, and in order; in memory, and by files."""
    inputs = [(kind, seed) for seed in range(4)]
    expected = sorted(everything([numbered(own) for own in inputs]), key=repr)
    for partition, less in itertools.product(("hash", "range"), (False, True)):
        client.run(less_memory, less=less)
        try:
            given = {"map": shuffled_keys, "partition": partition, "reducers": 3, "client": client}
            found = tables(client, mission_control.mapreduce(inputs, **given))
        finally:
            client.run(less_memory, less=False)
        assert sorted(everything(found), key=repr) == expected
        keys = [own.column(0).to_pylist() for own in found]
        assert sum(len(set(own)) for own in keys) == len(set(itertools.chain.from_iterable(keys)))
        flat = list(itertools.chain.from_iterable(keys)) if partition == "range" else None
        for own in [*keys, *([flat] if flat else [])]:
            assert own == sorted(own, key=lambda key: (key is None, key if key is not None else 0))


def by_length(keys: Any, reducers: int) -> Any:
    return pc.min_element_wise(pc.binary_length(keys), reducers - 1)


def decimals(seed: int) -> Any:
    values = [Decimal(n).scaleb(-2) for n in range(-50, 50)]
    random.Random(seed).shuffle(values)
    return pa.table({"key": pa.array([*values, None], pa.decimal128(9, 2)), "seed": [seed] * 101})


def test_other_partitions_and_types(client):
    words = pa.table({"word": ["a", "bb", "ccc", "dddd", "e"]})
    found = tables(
        client, mission_control.mapreduce([0], map=lambda _: words, partition=by_length, reducers=3, client=client)
    )
    assert [own.column(0).to_pylist() for own in found] == [[], ["a", "e"], ["bb", "ccc", "dddd"]]
    made = mission_control.mapreduce(range(3), map=decimals, partition="range", reducers=3, client=client)
    keys = list(itertools.chain.from_iterable(own.column(0).to_pylist() for own in tables(client, made)))
    expected = [key for key in sorted(Decimal(n).scaleb(-2) for n in range(-50, 50)) for _ in range(3)]
    assert keys == [*expected, None, None, None]
    # Some map tasks return nothing.
    made = mission_control.mapreduce([0, 1, 0], map=lambda seed: [rows_of(1)] * seed, reducers=2, client=client)
    assert sorted(everything(tables(client, made))) == sorted(rows(rows_of(1)))


def as_lines(table: Any) -> Iterator[str]:
    for word, number, _ in rows(table):
        yield f"{word} {number}\n"


def test_files_have_tables_or_what_a_reducer_gives(client, tmp_path):
    given = {"map": tables_of, "reducers": 2, "client": client}
    outputs = client.gather(mission_control.mapreduce(range(3), outputs=tmp_path / "tables", **given))
    read = [pa.ipc.open_file(own.value).read_all() for own in outputs]
    expected = sorted(everything([rows_of(seed) for seed in range(3)]))
    assert sorted(everything(read)) == expected and [len(own) for own in read] == [own.items for own in outputs]
    outputs = client.gather(mission_control.mapreduce(range(3), outputs=tmp_path / "texts", reduce=as_lines, **given))
    lines = "".join(Path(own.value).read_text() for own in outputs).splitlines()
    assert sorted(lines) == sorted(f"{word} {number}" for word, number, _ in expected)


def words_of_text(text: str) -> Iterator[Any]:
    """Empty columns have no type."""
    yield pa.table({"word": text.split(), "count": [1] * len(text.split())})


def counted(table: Any) -> Any:
    return table.group_by("word").aggregate([("count", "sum")]).rename_columns(["word", "count"])


def required(seed: int) -> Any:
    fields = [pa.field("word", pa.string(), nullable=bool(seed)), pa.field("count", pa.int64(), nullable=False)]
    return pa.table({"word": ["a", "b"], "count": [seed, 1]}, schema=pa.schema(fields))


def without_nothing(table: Any) -> Any:
    made = counted(table)
    return made.filter(pc.not_equal(made["count"], 0))


@pytest.mark.parametrize("texts", (["", "the cat", ""], ["the cat", ""], ["", ""]))
@pytest.mark.parametrize("partition", ("hash", "range"))
def test_tables_without_rows_say_nothing(client, texts, partition):
    given = {"map": words_of_text, "combine": counted, "partition": partition, "reducers": 2, "client": client}
    expected = [("cat", 1), ("the", 1)] if any(texts) else []
    assert sorted(everything(tables(client, mission_control.mapreduce(texts, **given)))) == expected
    reduced = mission_control.mapreduce(texts, reduce=counted, **given)
    found = itertools.chain.from_iterable(client.gather([client.submit(all_items, own, pure=False) for own in reduced]))
    assert sorted(everything(list(found))) == expected


def test_columns_that_may_have_gaps_or_not_are_the_same(client):
    made = mission_control.mapreduce([0, 5], map=required, combine=counted, reducers=2, client=client)
    assert sorted(everything(tables(client, made))) == [("a", 5), ("b", 2)]


def test_combining_may_leave_nothing(client):
    def signed(seed: int) -> Any:
        return pa.table({"word": ["a", "b"], "count": [1 if seed else -1, 1]})

    made = mission_control.mapreduce(
        [0, 1], map=signed, combine=without_nothing, reduce=counted, reducers=3, client=client
    )
    found = itertools.chain.from_iterable(client.gather([client.submit(all_items, own, pure=False) for own in made]))
    assert everything(list(found)) == [("b", 2)]


def around_the_clock(seed: int) -> Any:
    """An hour that occurs twice in the zone."""
    start = int(datetime.datetime(2024, 11, 3, 5, tzinfo=datetime.UTC).timestamp())
    seconds = np.random.default_rng(seed).integers(start, start + 7200, 20_000)
    return pa.table({"at": pa.array(seconds, pa.timestamp("s", "America/New_York"))})


def test_times_of_a_zone_are_in_their_order_when_clocks_are_set_back(client):
    made = mission_control.mapreduce(range(3), map=around_the_clock, partition="range", reducers=4, client=client)
    found = tables(client, made)
    at = [own.column(0).cast(pa.int64()).to_pylist() for own in found]
    assert list(itertools.chain.from_iterable(at)) == sorted(itertools.chain.from_iterable(at))
    assert sum(map(len, at)) == 60_000 and sum(len(set(own)) for own in at) == len(set(itertools.chain(*at)))


def zeros(seed: int) -> Any:
    return pa.table({"word": [-0.0 if seed else 0.0], "count": [1]})


def test_both_zeros_are_one_key(client):
    made = mission_control.mapreduce([0, 1], map=zeros, combine=counted, reducers=2, client=client)
    assert everything(tables(client, made)) == [(0.0, 2)]


def in_pieces(seed: int) -> Iterator[Any]:
    """An empty table first, then rows in order."""
    yield pa.table({"key": pa.array([], pa.int64())})
    for start in range(0, 8000, 1000):
        yield pa.table({"key": np.arange(start, start + 1000)})


def test_a_sample_is_of_several_tables(client):
    made = mission_control.mapreduce([0, 1], map=in_pieces, partition="range", reducers=4, client=client)
    sizes = [len(own) for own in tables(client, made)]
    assert sum(sizes) == 16_000 and max(sizes) < 6000


def test_what_is_wrong_says_so(client):
    def mixed(seed: int) -> Iterator[Any]:
        yield rows_of(seed)
        yield "word", 1

    def other(seed: int) -> Any:
        return rows_of(seed).drop_columns(["seed"]) if seed else rows_of(seed)

    nan = pa.table({"key": [1.0, float("nan")]})
    for given, kind, says in (
        ({"map": mixed}, TypeError, "and then tuple"),
        ({"map": other}, ValueError, r"word: string, count: int64.*give the same columns"),
        ({"map": lambda seed: rows_of(0) if seed else [("a", 1)]}, TypeError, "pairs for others"),
        ({"map": lambda _: nan}, ValueError, "not equal to itself"),
        ({"map": lambda _: pa.table({"key": [[1, 2]]})}, TypeError, r"'key' is of type list.*nested"),
        ({"map": lambda _: pa.table({})}, ValueError, "without columns"),
        ({"map": decimals}, TypeError, "keys are of type decimal"),
        ({"map": rows_of, "partition": lambda keys, reducers: [reducers] * len(keys)}, ValueError, "reduce tasks are"),
        ({"map": rows_of, "partition": lambda keys, reducers: [0]}, ValueError, "1 numbers"),
        ({"map": rows_of, "combine": lambda table: table.select([0])}, ValueError, "combine gave a table of word"),
        ({"map": rows_of, "combine": lambda table: None}, TypeError, "combine gave NoneType"),
        ({"map": rows_of, "reduce": lambda table: table.to_pydict()}, TypeError, "reduce gave dict"),
        ({"map": rows_of, "reduce": lambda table: table.column(0)}, TypeError, "reduce gave ChunkedArray"),
        ({"map": rows_of, "reduce": lambda table: table.to_pandas()}, TypeError, "reduce gave DataFrame"),
    ):
        with pytest.raises(kind, match=says):
            client.gather(mission_control.mapreduce([0, 1], reducers=2, client=client, **given))
    # Dask's clients keep failed futures.
    until(lambda: not held_by_scheduler(client)["objects"], "no objects are left")


@pytest.mark.parametrize("words", (("sort", "--size", "4MiB"), ("kmeans", "--points", "20000", "--k", "5")))
@pytest.mark.parametrize("engine", (pytest.param("python", marks=pytest.mark.long), "mapreduce"))
def test_workloads_on_the_library(tmp_path, words, engine):
    folder = tmp_path / "run"
    done = mission("run", *words, "--engine", engine, "--workers", "2", "--json", "--results", str(folder))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] and all(result["checks"].values())
    (job,) = result["jobs"]
    assert set(job["phases"]) == {"map_s", "shuffle_s", "reduce_s"} and job["phases"]["map_s"] > 0
    (run,) = folder.iterdir()
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    of_tasks = [record for record in records if record["kind"] == "phases"]
    assert {record["job"] for record in of_tasks} == {words[0]} and len({record["key"] for record in of_tasks}) > 2
    assert "Map, shuffle and reduce" in (run / "report.html").read_text()
