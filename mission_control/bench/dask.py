"""`mission bench dask`: shuffles of unchanged Dask programs, by Dask and by Mission Control, in turn.

Each mode has a cluster of its own, as its users have: what Dask's shuffles leave in the heaps of workers made ours a
fifth slower where they shared one. All hold the same inputs.

Each sample is three runs, one right after the other, unless the data is larger than memory. The first finds cold
memory: the kernel clears pages for it, since other modes ran meanwhile. The last finds what was used just before, as in
a program with several shuffles; the one between them still clears half of its pages (2026-11-25).

Dask carries a shuffle on disk, which is what `shuffle` and `merge` of data frames always ask for, or in memory, which
is had here by changing the shuffle's description on the scheduler.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask

import mission_control
from mission_control.bench.sort import timed
from mission_control.environment import describe
from mission_control.scenario import PrerequisiteMissing
from mission_control.worlds.local import local_cluster

if TYPE_CHECKING:
    import dask.array as da
    import dask.dataframe as dd
    import numpy as np
    import pandas as pd
    from distributed import Client, LocalCluster

DISK, MEMORY, OURS = "Dask, on disk", "Dask, in memory", "Mission Control"
WORKERS = 4
"""Processes with one thread each."""
IN_A_ROW = 3
"""Runs of a mode, one right after the other."""
PARTITION_BYTES = 16 << 20
WORKER_MEMORY_MIN = 400 << 20
"""Python with pandas, pyarrow and Dask takes 250 MiB before any data."""
MEMORY_FACTOR = 4
"""How much larger than the memory of all workers the data of `larger-than-memory` is."""
LARGER_WORKER_MEMORY_MIN = 768 << 20
"""With 400 MiB, Dask's own shuffle stands still: its workers pause at 0.8 of that, and what they use is not data that
could be spilled."""
LARGER_BYTES_MIN = LARGER_WORKER_MEMORY_MIN * WORKERS * MEMORY_FACTOR
BLOCK_ROWS = 1 << 14
"""Rows whose words lie in a core's cache."""
FACTOR = 0x9E3779B97F4A7C15
"""An odd number, so that multiplying loses nothing: 2^64 divided by the golden ratio (Knuth, volume 3, section 6.4)."""
GONE_WITHIN_S = 60.0
REPORTED_WITHIN_S = 2.0
"""Workers report what they moved four times a second (`REPORT_EVERY` of core)."""


@dataclass(frozen=True)
class Case:
    """What is measured."""

    name: str
    what: str
    inputs: Callable[[int], list[Any]]
    """Collections of so many bytes together."""
    operate: Callable[..., Any]
    """What a program does with them."""
    modes: tuple[str, ...] = (DISK, MEMORY, OURS)
    in_memory: bool = True
    """Inputs and result are held by the workers. Else inputs are made and the result is forgotten as it goes."""


def numbers(seed: int, rows: int, keys: int) -> pd.DataFrame:
    """32 bytes a row."""
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(seed)
    values = {name: random.random(rows) for name in "abc"}
    return pd.DataFrame({"key": random.integers(0, keys, rows), **values})


def texts(seed: int, rows: int, keys: int) -> pd.DataFrame:
    """About 44 bytes a row, of which 28 are a text and its offset."""
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(seed)
    values = np.char.add("customer-", np.char.zfill(random.integers(0, keys, rows).astype(str), 15))
    text = pd.array(values, dtype="string[pyarrow]")
    return pd.DataFrame({"key": random.integers(0, keys, rows), "a": random.random(rows), "text": text})


def frames(
    make: Callable[[int, int, int], pd.DataFrame], row_bytes: int, nbytes: int, seed: int = 0, rows_per_key: float = 1.0
) -> dd.DataFrame:
    """A data frame of partitions of 16 MiB, each drawn from a seed of its own."""
    import dask.dataframe as dd

    partitions = max(2, nbytes // PARTITION_BYTES)
    rows = nbytes // partitions // row_bytes
    keys = max(1, int(rows * partitions / rows_per_key))
    seeds = [seed * 10_000 + number for number in range(partitions)]
    return dd.from_map(make, seeds, rows=rows, keys=keys, meta=make(0, 1, 1).iloc[:0])


def columns_of(nbytes: int) -> da.Array:
    """A square of integers, in chunks of whole rows."""
    import dask.array as da

    side = int((nbytes / 8) ** 0.5)
    strip = max(1, PARTITION_BYTES // (8 * side))
    return da.random.default_rng(1).integers(0, 1 << 40, (side, side), chunks=(strip, side))


CASES = [
    Case(
        "shuffle",
        "shuffle, numeric columns",
        lambda nbytes: [frames(numbers, 32, nbytes)],
        lambda frame: frame.shuffle("key", shuffle_method="p2p"),
    ),
    Case(
        "shuffle-text",
        "shuffle with a text column",
        lambda nbytes: [frames(texts, 44, nbytes)],
        lambda frame: frame.shuffle("key", shuffle_method="p2p"),
    ),
    Case(
        "merge",
        "merge on integers",
        lambda nbytes: [frames(numbers, 32, nbytes // 2, seed) for seed in (1, 2)],
        lambda left, right: left.merge(right, on="key", shuffle_method="p2p", broadcast=False),
    ),
    Case(
        "merge-text",
        "merge on texts",
        lambda nbytes: [frames(texts, 44, nbytes // 2, seed) for seed in (1, 2)],
        lambda left, right: left.merge(right, on="text", shuffle_method="p2p", broadcast=False),
    ),
    Case(
        "groupby",
        "groupby, two rows a group",
        lambda nbytes: [frames(numbers, 32, nbytes, rows_per_key=2.0)],
        lambda frame: frame.groupby("key").agg(
            {"a": "max", "b": "min"}, split_out=frame.npartitions, shuffle_method="p2p"
        ),
    ),
    Case(
        "sort",
        "sort_values",
        lambda nbytes: [frames(numbers, 32, nbytes)],
        lambda frame: frame.sort_values("key", shuffle_method="p2p"),
    ),
    Case(
        "rechunk",
        "array rechunk, rows to columns",
        lambda nbytes: [columns_of(nbytes)],
        lambda array: array.rechunk(array.chunksize[::-1], method="p2p"),
    ),
    Case(
        "larger-than-memory",
        f"shuffle of {MEMORY_FACTOR} times the memory",
        lambda nbytes: [frames(numbers, 32, nbytes)],
        lambda frame: frame.shuffle("key", shuffle_method="p2p"),
        modes=(DISK, OURS),
        in_memory=False,
    ),
]


def measure(
    nbytes: int, rounds: int, names: tuple[str, ...], threads: int = 1, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure the cases of these names, with workers of so many threads.

    Returns:
        ``rows``: case, what, mode, and of the last run of each round (medians): wall_s, cpu_s_per_gib (all workers),
        spread of wall_s; first_wall_s and first_cpu_s_per_gib of the first run. ``ratios``: of medians, by case: wall
        and CPU of each of Dask's modes to ours. ``carried``: by case, the fraction (0 to 1) of all bytes between
        processes that Mission Control carried, those of client and scheduler included.

    Raises:
        PrerequisiteMissing: Dask's data frames need pandas and pyarrow; or a case needs more data.
        RuntimeError: Two modes gave different results.
    """
    try:
        import dask.dataframe  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise PrerequisiteMissing(f"{error.name} is needed: pip install '.[bench]' in the checkout") from None
    cases = [own for own in CASES if own.name in names]
    for case in cases:
        if not fits(case, nbytes):
            raise PrerequisiteMissing(f"{case.name} needs --size {LARGER_BYTES_MIN / 2**30:.2f}GiB or more")
    rows, ratios, carried = [], {}, {}
    for case in cases:
        samples, carried[case.name] = measure_case(case, nbytes, rounds, threads, say)
        of_case = [row(case, mode, taken, nbytes) for mode, taken in samples.items()]
        rows += of_case
        medians = {own["mode"]: own for own in of_case}
        for mode in (mode for mode in case.modes if mode != OURS):
            for measured, name in (
                ("wall_s", "wall"),
                ("cpu_s_per_gib", "CPU"),
                ("first_wall_s", "wall of the first"),
                ("first_cpu_s_per_gib", "CPU of the first"),
            ):
                ratio = medians[mode][measured] / medians[OURS][measured]
                ratios[f"{case.what}: {name}, {mode} / {OURS}"] = ratio
    return {
        "rows": rows,
        "ratios": ratios,
        "carried": carried,
        "size_bytes": nbytes,
        "rounds": rounds,
        "environment": describe(),
    }


def fits(case: Case, nbytes: int) -> bool:
    """Whether so much data is enough for a case."""
    return case.in_memory or nbytes >= LARGER_BYTES_MIN


def row(case: Case, mode: str, samples: list[Sample], nbytes: int) -> dict[str, Any]:
    walls = [wall for _, (wall, _) in samples]
    gib = nbytes / 2**30
    return {
        "case": case.name,
        "what": case.what,
        "mode": mode,
        "wall_s": statistics.median(walls),
        "cpu_s_per_gib": statistics.median(cpu for _, (_, cpu) in samples) / gib,
        "spread": [min(walls), max(walls)],
        "first_wall_s": statistics.median(wall for (wall, _), _ in samples),
        "first_cpu_s_per_gib": statistics.median(cpu for (_, cpu), _ in samples) / gib,
    }


Sample = tuple[tuple[float, float], tuple[float, float]]
"""Wall and CPU seconds of the first and the last of some runs, one right after the other."""


def measure_case(
    case: Case, nbytes: int, rounds: int, threads: int, say: Callable[[str], None]
) -> tuple[dict[str, list[Sample]], float]:
    """Measure each mode in each round; a first round is not counted: modules are imported in it.

    Returns:
        The samples of each mode; and the fraction (0 to 1) of all bytes between processes that Mission Control
        carried on its own cluster.
    """
    loopback = 0
    samples: dict[str, list[Sample]] = {mode: [] for mode in case.modes}
    fingerprints: dict[str, tuple[int, int]] = {}
    with ExitStack() as stack:
        memory = memory_for(case, nbytes)
        clients = {mode: stack.enter_context(cluster_with(mode, memory, threads)) for mode in case.modes}
        inputs = {mode: inputs_on(client, case, nbytes) for mode, client in clients.items()}
        # One that is larger than memory takes minutes, and finds nothing in memory that was there before.
        for number in range(0 if case.in_memory else 1, rounds + 1):
            for mode, client in clients.items():
                say(f"{case.what}: {f'round {number} of {rounds}' if number else 'warm-up'}, {mode}")
                # Else what Dask's shuffle wrote is still being written while the next one runs.
                os.sync()
                runs = []
                for _ in range(IN_A_ROW if case.in_memory else 1):
                    taken, crossed, fingerprints[mode] = run(client, case, inputs[mode])
                    runs.append(taken)
                    loopback += crossed if mode == OURS else 0
                    if len(set(fingerprints.values())) != 1:
                        raise RuntimeError(f"{case.what}: results differ: {fingerprints}")
                if number:
                    samples[mode].append((runs[0], runs[-1]))
        if (carriers := carried_by(clients[OURS])) - {"mission"} == carriers:
            # Of one or two chunks Dask makes other tasks.
            raise PrerequisiteMissing(f"{case.name}: Mission Control carried no shuffle; take a larger --size")
        carried = bytes_carried(clients[OURS])
    moved = sum(carried.values())
    # What it carried in memory did not cross the loopback interface.
    return samples, moved / (loopback + carried.get("shm", 0)) if moved else 0.0


def inputs_on(client: Client, case: Case, nbytes: int) -> list[Any]:
    from distributed import wait

    inputs = case.inputs(nbytes)
    if not case.in_memory:
        return inputs
    with client.as_current():
        inputs = list(client.persist(inputs))
        wait(inputs)
    return inputs


def run(client: Client, case: Case, inputs: list[Any]) -> tuple[tuple[float, float], int, tuple[int, int]]:
    """Return wall and CPU seconds, bytes that crossed the loopback interface meanwhile, and the fingerprint of
    the result, which is forgotten."""
    known = len(client.cluster.scheduler.tasks)
    made: list[Any] = []
    with client.as_current():
        before = loopback_bytes()
        taken = timed(client, partial(operate, case, inputs, made))
        crossed = loopback_bytes() - before
        own = fingerprint(made.pop()) if case.in_memory else made.pop()
    forgotten(client, known)
    return taken, crossed, own


def loopback_bytes() -> int:
    """Return the bytes that this host's loopback interface has received: all that its processes sent one another."""
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())


def bytes_carried(client: Client) -> dict[str, int]:
    """Return the bytes that Mission Control has carried between workers since the cluster began, by transport."""
    time.sleep(REPORTED_WITHIN_S)
    plugin = client.cluster.scheduler.plugins["mission-control"]
    ended = (record for record in plugin.log.since(0)[1] if record["kind"] == "job-ended")
    carried: dict[str, int] = {}
    for job in (*ended, *plugin.status()["jobs"]):
        for transfer in (*job["transfers"], *([job["earlier_reported"]] if job["earlier"]["transfers"] else [])):
            for transport, count in transfer["transport"]["bytes"].items():
                carried[transport] = carried.get(transport, 0) + count
    return carried


def operate(case: Case, inputs: list[Any], made: list[Any]) -> None:
    """Appends the result, or the fingerprint of one that is not held."""
    from distributed import wait

    result = case.operate(*inputs)
    if case.in_memory:
        made.append(result.persist())
        wait(made)
    else:
        made.append(fingerprint(result))


def memory_for(case: Case, nbytes: int) -> int:
    """Return bytes for each worker."""
    if not case.in_memory:
        return nbytes // MEMORY_FACTOR // WORKERS
    # Nobody is to spill. Inputs, what is moved, and outputs are three times the data. After a shuffle on disk a heap
    # holds about as much again, and Dask spills from 0.7 of the limit on. With six times the data inputs were written
    # to the disk during whatever ran next.
    return 2 * WORKER_MEMORY_MIN + 12 * nbytes // WORKERS


@contextmanager
def cluster_with(mode: str, memory: int, threads: int = 1, silence_logs: int = logging.CRITICAL) -> Iterator[Client]:
    """Start a cluster of one mode, whose workers have so many bytes of memory each, and threads."""
    from distributed import Client

    options = {
        "n_workers": WORKERS,
        "threads_per_worker": threads,
        "dashboard_address": "127.0.0.1:0",
        "memory_limit": memory,
    }
    options |= {"silence_logs": silence_logs}
    quiet = {"dataframe.shuffle.method": "p2p", "distributed.worker.profile.enabled": False}
    # It warns of each shuffle's begin and end.
    logging.getLogger("distributed.shuffle._scheduler_plugin").setLevel(logging.ERROR)
    with dask.config.set(quiet), closed(local_cluster(**options)) as cluster, Client(cluster) as client:
        if mode == OURS:
            mission_control.install(client)
        if mode == MEMORY:
            shuffles: Any = cluster.scheduler.plugins["shuffle"]
            retrieve = shuffles._retrieve_spec
            shuffles._retrieve_spec = lambda shuffle: replace(retrieve(shuffle), disk=False)
        yield client


@contextmanager
def closed(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Close a cluster in the end, whether Dask finds in time that its processes have ended or not: the kernel takes
    longer to free gigabytes of a worker's files."""
    try:
        yield cluster
    finally:
        with suppress(TimeoutError):
            cluster.close()


def forgotten(client: Client, known: int) -> None:
    """Wait until the scheduler knows no more tasks than before: equal keys would be results that are there."""
    tasks = client.cluster.scheduler.tasks
    until = time.monotonic() + GONE_WITHIN_S
    while len(tasks) > known:
        if time.monotonic() > until:
            raise RuntimeError(f"the scheduler still has {len(tasks) - known} tasks of a result")
        time.sleep(0.05)


def carried_by(client: Client) -> set[str]:
    status = client.sync(client.scheduler.mission_control_status)
    return {shuffle["engine"] for job in status["jobs"] for shuffle in job["shuffles"]}


def fingerprint(collection: Any) -> tuple[int, int]:
    """Number of rows or items, and a sum over all of them: the same in any order of rows."""
    import numpy as np

    parts: Any = collection.to_delayed()
    if isinstance(parts, list):
        pairs = [dask.delayed(of_frame)(part) for part in parts]
    else:
        starts = [np.cumsum([0, *axis]) for axis in collection.chunks]
        places = [(int(starts[0][i]), int(starts[1][j])) for i, j in np.ndindex(parts.shape)]
        pairs = [dask.delayed(of_block)(part, place) for part, place in zip(parts.ravel(), places, strict=True)]
    computed = dask.compute(*pairs)
    return sum(count for count, _ in computed), sum(own for _, own in computed) % 2**64


def of_frame(frame: pd.DataFrame) -> tuple[int, int]:
    """Columns of numbers are mixed block by block: the temporary arrays of pandas' hash took two fifths of the time in
    which outputs of a shuffle larger than memory were read (2026-11-25)."""
    import numpy as np
    import pandas as pd

    columns = [frame[name].to_numpy() for name in frame.columns if isinstance(frame[name].dtype, np.dtype)]
    if len(columns) < len(frame.columns) or any(column.dtype.itemsize != 8 for column in columns):
        return len(frame), int(pd.util.hash_pandas_object(frame, index=False).sum())
    total = 0
    for start in range(0, len(frame), BLOCK_ROWS):
        words = [column[start : start + BLOCK_ROWS].view(np.uint64) for column in columns]
        mixed = np.zeros(len(words[0]), np.uint64)
        for word in words:
            mixed ^= word
            mixed *= np.uint64(FACTOR)
            mixed ^= mixed >> np.uint64(29)
        total += int(mixed.sum())
    return len(frame), total % 2**64


def of_block(block: np.ndarray, place: tuple[int, int]) -> tuple[int, int]:
    """Each item times a number of its place: an item elsewhere makes another sum."""
    import numpy as np

    rows, columns = (np.arange(at, at + n, dtype=np.uint64) for at, n in zip(place, block.shape, strict=True))
    factors = rows[:, None] * np.uint64(2_654_435_761) + columns[None, :] * np.uint64(40_503)
    return block.size, int((block.astype(np.uint64) * factors).sum(dtype=np.uint64))
