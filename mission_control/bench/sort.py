"""`mission bench sort`: the same files sorted three ways, first read to last close, in turn on one cluster.

Dask's own way reads keys and payloads as `string[pyarrow]`, sorts by `sort_values` with its shuffle in memory, and
writes the same records; its partition count is the best of three.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mission_control import job
from mission_control.environment import describe
from mission_control.scenario import PrerequisiteMissing, validate
from mission_control.workloads.sort import KEY, RECORD, Sort, SortSettings
from mission_control.worlds.local import local

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client

PARTITION_FACTORS = (1, 2, 4)
"""Partitions tried for Dask, per file."""
OURS, STOCK, DASK = "our sort", "our sort, its shuffle over stock Dask", "Dask sort_values, string[pyarrow], in memory"


def measure(
    nbytes: int, workers: int, rounds: int, data: Path, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measures the three.

    Returns:
        ``rows``: what, seconds (median), mib_per_s, cpu_s_per_gib (all workers), spread in seconds; ``ratios``.

    Raises:
        PrerequisiteMissing: the comparison needs ``dask[dataframe]`` and pyarrow.
    """
    try:
        import dask.dataframe  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise PrerequisiteMissing(
            f"{error.name} is needed to compare with Dask: pip install '.[bench]' in the checkout"
        ) from None
    scenario = validate({"workload": {"size": f"{nbytes} B"}, "topology": {"hosts": workers}})
    samples: dict[str, list[tuple[float, float]]] = {DASK: [], STOCK: [], OURS: []}
    settings = SortSettings(size=f"{nbytes} B")
    settings.check_room(data.absolute())
    data.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-sort-", dir=data)).absolute()
    try:
        with local(scenario) as site, site.connect() as client:
            work = Sort(settings, 0, folder, workers)
            work.prepare(client, say)
            partitions = best_partitions(client, work, say)
            ways: dict[str, Callable[[], None]] = {
                DASK: lambda: sort_by_dask(client, work, partitions),
                STOCK: lambda: work.run_over_dask(client),
                OURS: lambda: run_ours(client, work),
            }
            for number in range(rounds):
                for what, way in ways.items():
                    say(f"round {number + 1} of {rounds}: {what}")
                    samples[what].append(timed(client, way))
                    checks = work.check(client, lambda _: None)
                    if not all(checks.values()):
                        raise RuntimeError(f"{what} is wrong: {checks}")
                    for path in work.outputs:
                        path.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [row(what, sample, nbytes) for what, sample in samples.items()]
    seconds = {entry["what"]: entry["seconds"] for entry in rows}
    return {
        "rows": rows,
        "ratios": {
            "Dask's time / our sort's": seconds[DASK] / seconds[OURS],
            "our sort over stock Dask / our sort: what the transport contributes": seconds[STOCK] / seconds[OURS],
        },
        "dask_partitions": partitions,
        "environment": describe(),
    }


def run_ours(client: Client, work: Sort) -> None:
    with job("bench", client=client):
        work.run(client, lambda _: None)


def timed(client: Client, way: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all workers."""
    import os

    def used() -> float:
        return sum(client.run(lambda: sum(os.times()[:2])).values())

    before, began = used(), time.perf_counter()
    way()
    seconds = time.perf_counter() - began
    return seconds, used() - before


def row(what: str, samples: list[tuple[float, float]], nbytes: int) -> dict[str, Any]:
    seconds = [sample for sample, _ in samples]
    return {
        "what": what,
        "seconds": statistics.median(seconds),
        "mib_per_s": nbytes / 2**20 / statistics.median(seconds),
        "cpu_s_per_gib": statistics.median(cpu for _, cpu in samples) / (nbytes / 2**30),
        "spread": [min(seconds), max(seconds)],
    }


def best_partitions(client: Client, work: Sort, say: Callable[[str], None]) -> int:
    """The number of partitions with which Dask is fastest."""
    times = {}
    for factor in PARTITION_FACTORS:
        count = factor * work.partitions
        say(f"tries {count} partitions for Dask")
        times[count] = timed(client, partial(sort_by_dask, client, work, count))[0]
        for path in work.outputs:
            path.unlink(missing_ok=True)
    return min(times, key=lambda count: times[count])


def sort_by_dask(client: Client, work: Sort, partitions: int) -> None:
    """Reads, sorts and writes with Dask's dataframe alone."""
    import dask
    import dask.dataframe as dd
    import pandas as pd

    settings = {"dataframe.shuffle.method": "p2p", "distributed.p2p.storage.disk": False}
    with dask.config.set(settings):
        meta = pd.DataFrame({"key": pd.Series(dtype="string[pyarrow]"), "payload": pd.Series(dtype="string[pyarrow]")})
        pieces = [
            (path, index, partitions // len(work.inputs))
            for path in work.inputs
            for index in range(partitions // len(work.inputs))
        ]
        frame = dd.from_map(read_piece, pieces, meta=meta)
        ordered = frame.sort_values("key", npartitions=partitions)
        folder, last = str(work.outputs[0].parent), len(work.outputs)
        written = ordered.map_partitions(
            write_piece, folder, partition_info=None, meta=pd.Series(dtype="int64"), enforce_metadata=False
        )
        numbers = [int(entry) for entry in dask.compute(written, scheduler=client)[0]]
        if sum(numbers) != work.records:
            raise RuntimeError(f"Dask wrote {sum(numbers)} of {work.records} records")
        gather_outputs(Path(folder), work.outputs, last)


def read_piece(piece: tuple[Path, int, int]) -> pd.DataFrame:
    """One of several equal pieces of a file, as a frame of strings."""
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    path, index, pieces = piece
    records = path.stat().st_size // RECORD
    first, last = records * index // pieces, records * (index + 1) // pieces
    raw = np.fromfile(path, np.uint8, (last - first) * RECORD, offset=first * RECORD).reshape(-1, RECORD)

    def column(start: int, end: int) -> Any:
        values = np.ascontiguousarray(raw[:, start:end])
        width = end - start
        offsets = np.arange(0, (len(values) + 1) * width, width, dtype=np.int64)
        array = pa.LargeStringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(values))
        return pd.Series(pd.array(pa.chunked_array([array]), dtype="string[pyarrow]"))

    return pd.DataFrame({"key": column(0, KEY), "payload": column(KEY, RECORD)})


def write_piece(frame: pd.DataFrame, folder: str, partition_info: Any = None) -> pd.Series:
    """Writes a sorted partition as records; gives their number."""
    import numpy as np
    import pandas as pd

    number = partition_info["number"] if partition_info else 0
    count = len(frame)
    records = np.empty((count, RECORD), np.uint8)
    for name, start, end in (("key", 0, KEY), ("payload", KEY, RECORD)):
        text = "".join(frame[name].to_list())
        records[:, start:end] = np.frombuffer(text.encode("ascii"), np.uint8).reshape(count, end - start)
    records.tofile(Path(folder) / f"dask-{number:05}")
    return pd.Series([count])


def gather_outputs(folder: Path, outputs: list[Path], count: int) -> None:
    """Names Dask's files as ours, so that the same check reads them; several partitions become one file's list."""
    written = sorted(folder.glob("dask-*"))
    groups = [written[len(written) * index // count : len(written) * (index + 1) // count] for index in range(count)]
    for path, group in zip(outputs, groups, strict=True):
        if len(group) == 1:
            group[0].replace(path)
            continue
        with open(path, "wb") as file:
            for part in group:
                file.write(part.read_bytes())
                part.unlink()
