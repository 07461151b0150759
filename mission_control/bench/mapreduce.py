"""`mission bench mapreduce`: word count beside Dask's bag, and the sort on the library beside that by hand."""

from __future__ import annotations

import itertools
import operator
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distributed import Client

import mission_control
from mission_control.bench.interleaved import Sample, compared, cpu_of_workers
from mission_control.environment import describe
from mission_control.map_reduce import items_of
from mission_control.scenario import PrerequisiteMissing, validate
from mission_control.workloads.sort import Sort, SortSettings
from mission_control.workloads.wordcount import WordCount, WordCountSettings, count, words
from mission_control.worlds.local import local

if TYPE_CHECKING:
    import pyarrow as pa

FREQUENCIES, FOLDBY, PAIRS = "pairs: Dask's bag, frequencies", "pairs: Dask's bag, foldby", "pairs: mapreduce"
LISTS, TABLES = "lists of words: Dask's bag, frequencies", "lists of words: mapreduce, as tables of Arrow"
"""Each by one and the same map function in Python: of pairs, or of lists of words."""
BY_HAND, LIBRARY = "by hand", "mapreduce"
BLOCK_BYTES = 64 << 10
"""Of text: its words, as objects of Python, fit into a core's cache."""

COMPARED = {
    "word count": [(FREQUENCIES, PAIRS), (FOLDBY, PAIRS), (LISTS, TABLES), (FREQUENCIES, TABLES)],
    "sort": [(LIBRARY, BY_HAND)],
}

Counts = Callable[[Client, list[Path], int], Iterable[tuple[bytes, int]]]


def measure(
    nbytes: int, workers: int, rounds: int, data: Path, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure all modes in turn on one cluster; the first round warms up.

    Returns:
        ``rows``: what, mode, wall_s, cpu_s (of the workers), spread of wall_s; ``ratios``: of medians.

    Raises:
        PrerequisiteMissing: Dask's bag, or pyarrow is not there.
    """
    try:
        import dask.bag  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise PrerequisiteMissing(f"{error.name} is needed: pip install '.[bench]' in the checkout") from None
    scenario = validate({"workload": {"size": f"{nbytes} B"}, "topology": {"hosts": workers}})
    data.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-mapreduce-", dir=data)).absolute()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    try:
        with local(scenario) as site, site.connect() as client:
            for what, prepare in (("word count", word_counts), ("sort", sorts)):
                modes = prepare(client, nbytes, workers, folder, say)
                found = compared(what, modes, rounds, say)
                rows += found
                medians = {row["mode"]: row["wall_s"] for row in found}
                ratios |= {f"{what}, {one} / {other}": medians[one] / medians[other] for one, other in COMPARED[what]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"rows": rows, "ratios": ratios, "rounds": rounds, "environment": describe()}


def sample(client: Client, run: Callable[[], Any], check: Callable[[Any], None]) -> Sample:
    before, began = cpu_of_workers(client), time.perf_counter()
    with mission_control.job("bench", client=client):
        made = run()
    wall = time.perf_counter() - began
    cpu = cpu_of_workers(client) - before
    check(made)
    return Sample(wall, cpu)


# --- word count -----------------------------------------------------------------------------------------------------


def word_counts(
    client: Client, nbytes: int, workers: int, folder: Path, say: Callable[[str], None]
) -> Mapping[str, Callable[[], Sample]]:
    settings = WordCountSettings(size=f"{nbytes} B")
    settings.check_room(folder.absolute())
    work = WordCount(settings, 0, folder / "text", workers)
    work.prepare(client, say)
    ways: dict[str, Counts] = {
        FREQUENCIES: frequencies,
        FOLDBY: foldby,
        PAIRS: of_pairs,
        LISTS: of_lists,
        TABLES: of_tables,
    }

    def check(found: Iterable[tuple[bytes, int]]) -> None:
        if Counter(dict(found)) != work.expected:
            raise RuntimeError("words are not counted right")

    return {
        mode: partial(sample, client, partial(way, client, work.inputs, workers), check) for mode, way in ways.items()
    }


def frequencies(client: Client, paths: list[Path], workers: int) -> Iterable[tuple[bytes, int]]:
    import dask.bag

    pairs = dask.bag.from_sequence(paths, npartitions=len(paths)).map(words).flatten()
    return client.compute(pairs.pluck(0).frequencies()).result()


def foldby(client: Client, paths: list[Path], workers: int) -> Iterable[tuple[bytes, int]]:
    import dask.bag

    pairs = dask.bag.from_sequence(paths, npartitions=len(paths)).map(words).flatten()
    return client.compute(pairs.foldby(operator.itemgetter(0), add_pair, 0, operator.add, 0)).result()


def add_pair(total: int, pair: tuple[bytes, int]) -> int:
    return total + pair[1]


def of_pairs(client: Client, paths: list[Path], workers: int) -> Iterable[tuple[bytes, int]]:
    given: dict[str, Any] = {"map": words, "reduce": count, "combine": operator.add, "client": client}
    made = mission_control.mapreduce(paths, reducers=workers, name="wordcount", **given)
    return itertools.chain.from_iterable(client.gather([client.submit(pairs_in, own, pure=False) for own in made]))


def pairs_in(output: mission_control.map_reduce.Output) -> list[tuple[bytes, int]]:
    assert isinstance(output.value, mission_control.Reference)
    return list(items_of(output.value))


def lists_of_words(path: Path) -> Iterator[list[bytes]]:
    """The map function."""
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield (block + file.readline()).split()


def of_lists(client: Client, paths: list[Path], workers: int) -> Iterable[tuple[bytes, int]]:
    import dask.bag

    found = dask.bag.from_sequence(paths, npartitions=len(paths)).map(lists_of_words).flatten().flatten()
    return client.compute(found.frequencies()).result()


def of_tables(client: Client, paths: list[Path], workers: int) -> Iterable[tuple[bytes, int]]:
    given: dict[str, Any] = {"map": tables_of_words, "combine": summed, "client": client}
    made = mission_control.mapreduce(paths, reducers=workers, name="wordcount", **given)
    return itertools.chain.from_iterable(client.gather([client.submit(rows_in, own, pure=False) for own in made]))


def tables_of_words(path: Path) -> Iterator[pa.Table]:
    import numpy as np
    import pyarrow as pa

    for found in lists_of_words(path):
        yield pa.table({"word": pa.array(found, pa.binary()), "count": np.ones(len(found), np.int64)})


def summed(table: pa.Table) -> pa.Table:
    return table.group_by("word", use_threads=False).aggregate([("count", "sum")]).rename_columns(["word", "count"])


def rows_in(output: mission_control.map_reduce.Output) -> list[tuple[bytes, int]]:
    assert isinstance(output.value, mission_control.Reference)
    tables = list(items_of(output.value))
    return [pair for table in tables for pair in zip(*(column.to_pylist() for column in table.columns), strict=True)]


# --- sort -------------------------------------------------------------------------------------------------------------


def sorts(
    client: Client, nbytes: int, workers: int, folder: Path, say: Callable[[str], None]
) -> Mapping[str, Callable[[], Sample]]:
    settings = SortSettings(size=f"{nbytes} B")
    settings.check_room(folder.absolute())
    work = Sort(settings, 0, folder / "records", workers)
    work.prepare(client, say)

    def check(_: None) -> None:
        checks = work.check(client, lambda _: None)
        if not all(checks.values()):
            raise RuntimeError(f"records are not sorted right: {checks}")
        for path in work.outputs:
            path.unlink()
        # The library gives a folder of outputs to one job alone. The sort by hand writes to the last one's.
        shutil.rmtree(work.sorted, ignore_errors=True)
        work.sorted.mkdir()

    def run(engine: Literal["python", "mapreduce"]) -> None:
        work.engine = engine
        work.run(client, lambda _: None)

    engines: dict[str, Literal["python", "mapreduce"]] = {BY_HAND: "python", LIBRARY: "mapreduce"}
    return {mode: partial(sample, client, partial(run, engine), check) for mode, engine in engines.items()}
