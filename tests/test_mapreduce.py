"""MapReduce: each pair of each map task is reduced once, with the others of its key."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import operator
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mission_control
from mission_control.map_reduce import items_of, pairs
from mission_control.map_reduce.keys import hash_of
from tests.conftest import mission, until, what_is_left


def words_of(seed: int) -> Iterator[tuple[str, int]]:
    chance = random.Random(seed)
    for _ in range(20_000):
        # Half of the words are the same.
        yield ("the" if chance.random() < 0.5 else f"word {chance.randrange(3000)}"), 1


def count(word: str, counts: Iterable[int]) -> Iterator[tuple[str, int]]:
    yield word, sum(counts)


def expected_counts(seeds: Iterable[int]) -> Counter[str]:
    return Counter(word for seed in seeds for word, _ in words_of(seed))


def all_items(reference: mission_control.Reference) -> list[Any]:
    return list(items_of(reference))


def items(client: Any, made: list[Any]) -> list[list[Any]]:
    """Return the items of each reduce task."""
    outputs = client.gather(made)
    found = client.gather([client.submit(all_items, own.value, pure=False) for own in outputs])
    assert [len(own) for own in found] == [own.items for own in outputs]
    return found


@pytest.mark.parametrize("combine", (None, operator.add))
@pytest.mark.parametrize("partition", ("hash", "range"))
def test_words_are_counted(client, combine, partition):
    given = {"map": words_of, "reduce": count, "combine": combine, "partition": partition, "reducers": 5}
    made = mission_control.mapreduce(range(6), **given, client=client)
    found = items(client, made)
    everything = list(itertools.chain.from_iterable(found))
    assert dict(everything) == expected_counts(range(6)) and len(dict(everything)) == len(everything)
    if partition == "range":
        assert [word for word, _ in everything] == sorted(word for word, _ in everything)
    phases = made[0].result()
    assert phases.map_s > 0 and phases.reduce_s > 0
    del made, phases
    until(lambda: not what_is_left(client, "objects", "live_bytes"), "nothing is left")


class Named(str):
    """A text whose representation is another one."""

    def __str__(self) -> str:
        return "other"


KEYS: list[Any] = ["a", "ä", "\udc80", b"a", 1, -1, -2, 0, 1 << 70, 0.5, None, (1, "a"), (1, ("b", None)), "", b"", ()]


def test_equal_keys_have_equal_numbers_in_every_process(client):
    here = [hash_of(key) for key in KEYS]
    assert len(set(here)) == len(KEYS)
    assert all(own == here for own in client.run(lambda keys: [hash_of(key) for key in keys], KEYS).values())
    assert hash_of(1) == hash_of(1.0) == hash_of(True) == hash_of(np.int64(1)) == hash_of(np.float32(1))
    assert hash_of(np.bool_(True)) == hash_of(True) == hash_of(Decimal(1))
    assert hash_of("a") == hash_of(Named("a")) == hash_of(np.str_("a")) != hash_of(b"a")
    with pytest.raises(TypeError, match="frozenset"):
        hash_of(frozenset())


def pairs_of_all(seed: int) -> Iterator[tuple[Any, Any]]:
    for key in KEYS:
        yield key, (seed, key)


def gathered(key: Any, values: Iterable[Any]) -> Iterator[Any]:
    yield key, sorted(seed for seed, own in values if own == key)


def test_keys_of_all_kinds_meet_their_own_values(client):
    made = mission_control.mapreduce(range(4), map=pairs_of_all, reduce=gathered, reducers=3, client=client)
    found = dict(itertools.chain.from_iterable(items(client, made)))
    assert found == {key: [0, 1, 2, 3] for key in KEYS}
    # Different keys with the same number.
    same = [(7, key, value) for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", 5))]
    groups = pairs.Groups(iter([*same, (8, "d", 6)]))
    assert [(key, list(values)) for key, values in groups] == [("a", [1, 3]), ("b", [2, 5]), ("c", [4]), ("d", [6])]
    # A reducer that reads some of its values, or none.
    groups = pairs.Groups(iter([*same, (8, "d", 6)]))
    assert [(key, next(values)) for key, values in groups] == [("a", 1), ("b", 2), ("c", 4), ("d", 6)]


def dated(seed: int) -> Iterator[tuple[datetime.date, int]]:
    if seed:
        yield datetime.date(2026, 1, seed), seed


def by_day(day: datetime.date, reducers: int) -> int:
    return day.day % reducers


def test_keys_of_other_kinds_go_where_a_function_says(client):
    """Some map tasks return no pairs, and some reduce tasks get none."""
    given = {"map": dated, "reduce": count, "partition": by_day, "reducers": 5}
    found = items(client, mission_control.mapreduce([0, 1, 2, 1], **given, client=client))
    assert found == [[], [(datetime.date(2026, 1, 1), 2)], [(datetime.date(2026, 1, 2), 2)], [], []]


SCRIPT = """
from typing import NamedTuple
from distributed import Client, LocalCluster
import mission_control
from mission_control.map_reduce import items_of

class Hit(NamedTuple):
    page: str
    count: int

def hits(page):
    for word in page.split():
        yield word, Hit(page, 1)

def reduced(word, hits):
    yield Hit(word, sum(hit.count for hit in hits))

def everything(outputs):
    return [item for output in outputs for item in items_of(output.value)]

if __name__ == "__main__":
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        outputs = mission_control.mapreduce(["a b a", "b"], map=hits, reduce=reduced, reducers=2)
        print(sorted(map(tuple, client.submit(everything, outputs).result())))
"""


def test_values_of_classes_of_a_script(tmp_path):
    """Workers cannot import classes of a script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[('a', 2), ('b', 2)]", done.stderr


def records(seed: int) -> Iterator[tuple[bytes, bytes]]:
    chance = random.Random(seed)
    for _ in range(3000):
        yield chance.randbytes(4), chance.randbytes(300)


def lines(key: bytes, values: Iterable[bytes]) -> Iterator[bytes]:
    for value in values:
        yield b"%s %s\n" % (key.hex().encode(), value.hex().encode())


def less_memory(dask_worker: Any, less: bool) -> None:
    from mission_control.map_reduce import groups, pairs

    # A fraction of 2 GiB, the memory of a worker.
    groups.MEMORY_FRACTION = 1e-4 if less else 0.125
    groups.PARTS_MAX = 2 if less else 128
    pairs.TABLE_BYTES = 100_000 if less else 64 << 20
    pairs.BLOCK_BYTES = 10_000 if less else 1 << 20


@pytest.mark.parametrize("less", (False, True))
def test_files_are_sorted_also_with_little_memory(client, tmp_path, less):
    client.run(less_memory, less=less)
    try:
        given = {"map": records, "reduce": lines, "partition": "range", "reducers": 3, "outputs": tmp_path / "out"}
        outputs = client.gather(mission_control.mapreduce(range(4), **given, client=client))
    finally:
        client.run(less_memory, less=False)
    paths = [own.value for own in outputs]
    assert paths == sorted(str(own) for own in (tmp_path / "out").glob("part-*"))
    found = b"".join(Path(path).read_bytes() for path in paths).splitlines()
    pairs_there = sorted(pair for seed in range(4) for pair in records(seed))
    assert [own.split()[0] for own in found] == [key.hex().encode() for key, _ in pairs_there]
    assert sorted(found) == sorted(b"%s %s" % (key.hex().encode(), own.hex().encode()) for key, own in pairs_there)
    sizes = [own.items for own in outputs]
    assert max(sizes) < 1.5 * min(sizes), "the sample cuts evenly"


def lines_of(word: str, counts: Iterable[int]) -> Iterator[str]:
    yield f"{word} {sum(counts)}\n"


def test_without_a_reducer_combined_keys_are_one_item(client):
    made = mission_control.mapreduce(range(4), map=words_of, combine=operator.add, reducers=3, client=client)
    found = list(itertools.chain.from_iterable(items(client, made)))
    assert len(found) == len(dict(found)) and dict(found) == expected_counts(range(4))


def from_no_python_code(seed: int) -> Iterator[tuple[str, int]]:
    """Its iterator has no Python code of its own."""
    return zip(itertools.islice(itertools.cycle([f"w{n}" for n in range(100)]), 200_000), itertools.repeat(1))


def test_pairs_of_an_iterator_in_c(client):
    made = mission_control.mapreduce([1, 2], map=from_no_python_code, reduce=count, combine=operator.add, client=client)
    found = list(itertools.chain.from_iterable(items(client, made)))
    assert dict(found) == {f"w{n}": 4000 for n in range(100)}


class Large:
    """A value whose size Dask cannot see."""

    def __init__(self, size: int):
        self.content = [bytes(size)]


def test_values_are_weighed_with_what_they_hold():
    assert pairs.weight_of(("key", Large(50_000))) > 50_000


def fails(seed: int) -> Iterator[tuple[str, int]]:
    yield "a", 1
    raise ValueError("as planned")


def not_equal(seed: int) -> Iterator[tuple[float, int]]:
    yield 1.0, 1
    yield float("nan"), 1


def test_what_is_wrong_says_so(client, tmp_path):
    mapreduce = mission_control.mapreduce
    used = tmp_path / "used"
    used.mkdir()
    (used / "part-00000").touch()
    for given, says in (
        ({"inputs": []}, "at least one"),
        ({"reducers": 0}, "at least one"),
        ({"partition": "by name"}, "give 'hash', 'range'"),
        ({"outputs": used}, "files of another job"),
    ):
        with pytest.raises(ValueError, match=says):
            mapreduce(**{"inputs": [1], "map": words_of, "reduce": count, "client": client, **given})
    for given, kind, says in (
        ({"map": fails}, ValueError, "as planned"),
        ({"partition": lambda key, reducers: reducers}, ValueError, "partition gave 2"),
        ({"outputs": tmp_path / "new"}, TypeError, "cannot go to a file"),
        ({"map": not_equal}, ValueError, "not equal to itself"),
        ({"map": not_equal, "partition": "range"}, ValueError, "not equal to itself"),
        ({"map": lambda seed: {"ab": 1}}, TypeError, "map gave dict"),
        ({"map": lambda seed: None}, TypeError, "map gave NoneType"),
        ({"map": lambda seed: ("ab", 1)}, TypeError, "map gave tuple"),
        ({"map": lambda seed: ["ab", "cd"]}, TypeError, "which is no pair"),
        ({"map": lambda seed: [(("shop", math.nan), 1)]}, ValueError, "not equal to itself"),
        ({"partition": lambda key, reducers: None}, TypeError, "partition gave None"),
        ({"reduce": lambda key, values: sum(values)}, TypeError, "reduce gave int"),
        ({"reduce": lambda key, values: {key: 1}}, TypeError, "reduce gave dict"),
        ({"reduce": lambda key, values: (key, sum(values))}, TypeError, "yield each item"),
    ):
        given = {"inputs": [1], "map": words_of, "reduce": count, "reducers": 2, "client": client, **given}
        with pytest.raises(kind, match=says):
            client.gather(mapreduce(**given))
    assert [own.name for own in (tmp_path / "new").iterdir()] == [".job"]
    # The other job may still run.
    other = mapreduce([1], map=words_of, reduce=lines_of, outputs=tmp_path / "new", client=client)
    with pytest.raises(ValueError, match="files of another job"):
        client.gather(other)
    with pytest.raises(TypeError, match="give a list"):
        mapreduce("file", map=words_of, reduce=count, client=client)


def test_wordcount_counts_what_was_written(tmp_path):
    done = mission("run", "wordcount", "--size", "4MiB", "--workers", "2", "--json", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] and result["checks"] == {"each word once": True, "counts": True}
    (job,) = result["jobs"]
    assert set(job["phases"]) == {"map_s", "shuffle_s", "reduce_s"} and job["phases"]["map_s"] > 0


def mixed_pairs(seed: int) -> Iterator[tuple[Any, Any]]:
    """Values that are added up natively, and values that are not: other types, derived types, sums that are too
    large."""
    chance = random.Random(seed)
    keys = ["a", "ä", "\udc80", b"a", "", b"", Named("a"), 1, True, None, ("a", 1), 0.5]
    for _ in range(3000):
        key = chance.choice(keys)
        yield key, chance.choice([1, -1, 0, 2**62, -(2**62), 2**70, True, 0.5]) if key != 0.5 else chance.random()


def listed_pairs(seed: int) -> list[list[Any]]:
    """Pairs of other types than tuple."""
    return [["a", 1], ["b", 2], ["a", 3]]


def test_what_is_added_up_natively_and_what_is_not_come_together(client):
    made = mission_control.mapreduce(range(4), map=mixed_pairs, combine=operator.add, reducers=3, client=client)
    found: list[tuple[Any, Any]] = list(itertools.chain.from_iterable(items(client, made)))
    expected: dict[Any, list[Any]] = {}
    for seed in range(4):
        for key, value in mixed_pairs(seed):
            expected.setdefault(key, []).append(value)
    sums: dict[Any, Any] = {}
    for key, value in found:
        sums[key] = sums.get(key, 0) + value
    assert sums.keys() == expected.keys()
    assert all(sums[key] == pytest.approx(sum(values), rel=1e-12) for key, values in expected.items())
    # Sums of integers alone are not rounded.
    whole = [("a", 2**62)] * 5 + [("b", 7), ("a", -(2**62))]
    made = mission_control.mapreduce([0], map=lambda _: whole, reduce=count, combine=operator.add, client=client)
    assert sorted(itertools.chain.from_iterable(items(client, made))) == [("a", 2**64), ("b", 7)]
    made = mission_control.mapreduce([0], map=listed_pairs, reduce=count, combine=operator.add, client=client)
    assert sorted(itertools.chain.from_iterable(items(client, made))) == [("a", 4), ("b", 2)]


@pytest.mark.parametrize(("keys", "others"), ((5, 512), (1 << 19, 3)))
def test_sums_are_flushed_again_and_again(client, keys, others):
    def few(limits: tuple[int, int]) -> None:
        pairs.SUMS, pairs.WEIGHED = limits

    client.run(few, (keys, others))
    try:
        given = {"map": words_of, "reduce": count, "combine": operator.add, "reducers": 2, "client": client}
        short = mission_control.mapreduce([0], **{**given, "map": lambda seed: itertools.islice(words_of(seed), 300)})
        found = dict(itertools.chain.from_iterable(items(client, short)))
        assert found == Counter(word for word, _ in itertools.islice(words_of(0), 300))
    finally:
        client.run(few, (1 << 19, 512))
