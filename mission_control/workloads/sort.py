"""Sort records of 100 bytes with a 10-byte key, as in the public sort benchmark: files in, files out.

Map tasks read a file, split it by sampled splitters and put the parts; reduce tasks fetch one part of each, sort and
write. A record is a key of 10 printable characters, 32 digits of its number, filler, and an end of line.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from uuid import uuid4

import numpy as np
from pydantic import Field

import mission_control
from mission_control import _native
from mission_control.map_reduce.phases import note_phases
from mission_control.workers import workers_of
from mission_control.workloads.settings import AutoCount, SizedSettings

if TYPE_CHECKING:
    import pyarrow as pa
    from distributed import Client

RECORD = 100
KEY = 10
PARTITION_BYTES = 64 << 20
"""Bytes of a task's input: small compared to a worker's memory (it also holds the output), large compared to a task's
overhead."""
SAMPLES_PER_FILE = 1000
"""Keys sampled per file: with 16 files the largest part is within about 10 % of the mean (sample sort, Blelloch et al.
1991)."""


class SortSettings(SizedSettings):
    """Records of 100 bytes with a 10-byte key are sorted, files to files."""

    files_per_byte: ClassVar[int] = 2
    """Input and output."""

    kind: Literal["sort"] = "sort"
    engine: Literal["python", "java", "mapreduce"] = Field(
        "python",
        description="Implementation of the tasks. java: classes in one Java process per worker; mapreduce: "
        "functions for the library mapreduce",
    )
    partitions: AutoCount = Field("auto", description="Map tasks per job. auto: one per worker, and per 64 MiB")
    reducers: AutoCount = Field("auto", description="Reduce tasks per job. auto: as many as map tasks")
    placement: Literal["free", "even"] = Field(
        "free",
        description="Placement of tasks. free: by Dask; even: workers in turn, so that all hosts send the same amount",
    )

    def make(self, number: int, folder: Path, workers: int) -> Sort:
        return Sort(self, number, folder, workers)


class Sort:
    """One sort job.

    Args:
        workload: of the scenario.
        number: of the job, from 0; each has another input.
        folder: for input and output; all workers must see it.
        workers: of the cluster, each of which gets something to do.
    """

    def __init__(self, workload: SortSettings, number: int, folder: Path, workers: int = 1):
        self.records = max(1, workload.size // RECORD)
        auto = max(workers, math.ceil(self.records * RECORD / PARTITION_BYTES))
        self.partitions = min(self.records, auto if workload.partitions == "auto" else workload.partitions)
        self.reducers = min(self.records, self.partitions if workload.reducers == "auto" else workload.reducers)
        self.even = workload.placement == "even"
        self.engine = workload.engine
        self.seed = workload.seed * 1000 + number
        self.inputs = [folder / f"input-{index:05}" for index in range(self.partitions)]
        self.outputs = [folder / f"output-{index:05}" for index in range(self.reducers)]
        self.sorted = folder / "sorted"
        self.made: list[tuple[int, int]] = []

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        say(f"makes {_native.format_bytes(self.records * RECORD)} of records in {self.partitions} files")
        self.inputs[0].parent.mkdir(parents=True, exist_ok=True)
        bounds = np.linspace(0, self.records, self.partitions + 1).astype(int)
        ranges = [(int(first), int(last)) for first, last in itertools.pairwise(bounds)]
        futures = [
            client.submit(make_file, path, self.seed, *entry, key=f"sort-make-{self.seed}-{path}", pure=False)
            for path, entry in zip(self.inputs, ranges, strict=True)
        ]
        self.made = client.gather(futures)

    def splitters(self, client: Client) -> bytes:
        """Sample the keys that split the input into parts of nearly equal size."""
        samples = client.gather(
            client.map(sample_keys, self.inputs, range(self.partitions), key="sort-sample", pure=False)
        )
        keys = np.sort(np.frombuffer(b"".join(samples), f"S{KEY}"))
        places = [len(keys) * index // self.reducers for index in range(1, self.reducers)]
        return keys[places].tobytes()

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        if self.engine == "mapreduce":
            self.map_reduce(client, say)
            return
        say("samples its keys")
        splitters = self.splitters(client)
        say("maps, shuffles and reduces")
        run = uuid4().hex  # keys of two jobs must differ
        workers = sorted(workers_of(client))

        def home(index: int) -> dict[str, Any]:
            """The worker on which a task runs, if that is fixed; another one if that worker is gone."""
            return {"workers": [workers[index % len(workers)]], "allow_other_workers": True} if self.even else {}

        map_one = self.map_in_java(splitters) if self.engine == "java" else partial(map_file, splitters=splitters)
        if self.even:
            parts = [
                client.submit(map_one, path, key=(f"sort-map-{run}", index), pure=False, **home(index))
                for index, path in enumerate(self.inputs)
            ]
        else:
            parts = client.map(map_one, self.inputs, key="sort-map", pure=False)
        reduce_one = reduce_part_in_java if self.engine == "java" else reduce_part
        done = [
            client.submit(
                reduce_one,
                parts,
                index,
                path,
                key=(f"sort-reduce-{run}", index),
                pure=False,
                **home(index),
            )
            for index, path in enumerate(self.outputs)
        ]
        del parts  # parts that were reduced are not needed any more
        client.gather(done)

    def map_reduce(self, client: Client, say: Callable[[str], None]) -> None:
        """The same job, implemented with the library mapreduce."""
        say("samples its keys, maps, shuffles and reduces")
        seeds = zip(self.inputs, range(self.partitions), strict=True)
        made = mission_control.mapreduce(
            list(seeds),
            map=records_of,
            reduce=as_bytes,
            partition="range",
            sample=sampled_keys,
            reducers=self.reducers,
            outputs=self.sorted,
            client=client,
            name="sort",
        )
        self.outputs = [Path(output.value) for output in client.gather(made)]

    def map_in_java(self, splitters: bytes) -> Callable[[Path], mission_control.Reference]:
        keys = [splitters[start : start + KEY].decode() for start in range(0, len(splitters), KEY)]
        return partial(map_file_in_java, keys=keys)

    def run_over_dask(self, client: Client) -> None:
        """The same job with its shuffle over stock Dask: for `mission bench sort`."""
        splitters = self.splitters(client)
        run = uuid4().hex
        parts = client.map(partial(map_file_to_arrays, splitters=splitters), self.inputs, key="stock-map", pure=False)
        done = []
        for index, path in enumerate(self.outputs):
            pieces = [
                client.submit(operator.getitem, part, index, key=(f"getitem-{run}", number, index), pure=False)
                for number, part in enumerate(parts)
            ]
            done.append(client.submit(reduce_arrays, pieces, path, key=(f"stock-reduce-{run}", index), pure=False))
        del parts, pieces
        client.gather(done)

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        say("checks order, number and checksum of all records")
        checked = client.gather(client.map(check_file, self.outputs, key="sort-check", pure=False))
        full = [entry for entry in checked if entry[0]]
        edges = list(itertools.pairwise(full))
        return {
            "order": all(ordered for _, ordered, _, _, _ in checked)
            and all(before[3] <= after[2] for before, after in edges),
            "record count": sum(entry[0] for entry in checked) == sum(count for count, _ in self.made),
            "checksum": _sum(entry[4] for entry in checked) == _sum(checksum for _, checksum in self.made),
        }


def _sum(checksums: Any) -> int:
    return sum(checksums) % 2**64


def make_file(path: Path, seed: int, first: int, last: int) -> tuple[int, int]:
    """Writes records ``first`` to ``last``; gives their number and checksum."""
    random = np.random.Generator(np.random.PCG64([seed, first]))
    count, checksum = 0, 0
    digits = np.frombuffer(b"0123456789ABCDEF", np.uint8)
    with open(path, "wb") as file:
        for start in range(first, last, 1 << 16):
            numbers = np.arange(start, min(last, start + (1 << 16)), dtype=np.uint64)
            block = np.full((len(numbers), RECORD), ord("."), np.uint8)
            block[:, :KEY] = random.integers(33, 127, (len(numbers), KEY), np.uint8)
            block[:, KEY + 2 : KEY + 34] = ord("0")
            for digit in range(16):
                block[:, KEY + 33 - digit] = digits[(numbers >> np.uint64(4 * digit)) & np.uint64(15)]
            block[:, -2:] = (ord("\r"), ord("\n"))
            content = block.tobytes()
            file.write(content)
            own = _native.records_check(content)
            count, checksum = count + own[0], (checksum + own[4]) % 2**64
    return count, checksum


def sample_keys(path: Path, seed: int) -> bytes:
    """Keys of some records of a file, one after another."""
    records = path.stat().st_size // RECORD
    places = np.sort(np.random.default_rng(seed).integers(0, records, min(records, SAMPLES_PER_FILE)))
    keys = []
    with open(path, "rb", buffering=0) as file:
        for place in places:
            file.seek(int(place) * RECORD)
            keys.append(file.read(KEY))
    return b"".join(keys)


def read_file(path: Path) -> _native.Segment:
    """A whole file in the data plane's memory."""
    segment = mission_control.allocate(path.stat().st_size, scratch=True)
    view = memoryview(segment)
    with open(path, "rb", buffering=0) as file:
        filled = 0
        while filled < len(view):
            count = file.readinto(view[filled:])
            if not count:
                raise OSError(f"{path} became shorter while it was read")
            filled += count
    return segment


def map_file(path: Path, splitters: bytes) -> mission_control.Reference:
    """Splits a file into the parts of the reduce tasks."""
    began = time.monotonic()
    whole = read_file(path)
    parts = mission_control.allocate(len(whole))
    sizes = _native.records_partition(whole, splitters, parts)
    made = mission_control.put(parts, sizes=sizes)
    note_phases(map_s=time.monotonic() - began)
    return made


def reduce_part(references: list[mission_control.Reference], index: int, path: Path) -> int:
    """Fetches one part of each, sorts and writes it; gives the number of bytes."""
    began = time.monotonic()
    parts = mission_control.fetch(references, part=index)
    fetched = time.monotonic()
    written = write_sorted(parts, path)
    note_phases(shuffle_s=fetched - began, reduce_s=time.monotonic() - fetched)
    return written


def records_of(given: tuple[Path, int]) -> pa.Table:
    """View a whole file as a column of records: sorting them by their bytes sorts them by their keys."""
    import pyarrow as pa

    whole = read_file(given[0])
    if len(whole) % RECORD:
        raise ValueError(f"{given[0]} has {len(whole)} bytes, which is no number of records of {RECORD} bytes")
    buffers = [None, pa.py_buffer(whole)]
    column = pa.Array.from_buffers(pa.binary(RECORD), len(whole) // RECORD, buffers)
    return pa.Table.from_arrays([column], ["record"])


def sampled_keys(given: tuple[Path, int]) -> list[bytes]:
    keys = sample_keys(*given)
    return [keys[start : start + KEY] for start in range(0, len(keys), KEY)]


def as_bytes(table: pa.Table) -> Iterator[memoryview]:
    """Convert sorted records to the bytes of the file."""
    for chunk in table.column(0).chunks:
        yield memoryview(chunk.buffers()[1])[chunk.offset * RECORD : (chunk.offset + len(chunk)) * RECORD]


def map_file_in_java(path: Path, keys: list[str]) -> mission_control.Reference:
    given = {"path": str(path), "splitters": keys}
    return mission_control.java("org.missioncontrol.workloads.Sort$Map", arguments=given)


def reduce_part_in_java(references: list[mission_control.Reference], index: int, path: Path) -> int:
    given = {"path": str(path), "index": index}
    return mission_control.java("org.missioncontrol.workloads.Sort$Reduce", inputs=references, arguments=given)


def write_sorted(records: Sequence[Any], path: Path) -> int:
    """Sort the records of several buffers into memory of the data plane, and write them whole or not at all."""
    out = mission_control.allocate(sum(map(len, records)), scratch=True)
    _native.rows_sort(records, RECORD, KEY, out)
    part = path.with_name(path.name + ".part")
    with open(part, "wb", buffering=0) as file:
        view = memoryview(out)
        while view:
            view = view[file.write(view) :]
    part.replace(path)
    return len(out)


def map_file_to_arrays(path: Path, splitters: bytes) -> list[np.ndarray]:
    """As :func:`map_file`, but the parts are a result that Dask moves."""
    whole = read_file(path)
    parts = mission_control.allocate(len(whole), scratch=True)
    sizes = _native.records_partition(whole, splitters, parts)
    return np.split(np.frombuffer(memoryview(parts), np.uint8), np.cumsum(sizes)[:-1])


def reduce_arrays(pieces: list[np.ndarray], path: Path) -> int:
    """As :func:`reduce_part`, with parts that Dask moved."""
    return write_sorted(pieces, path)


def check_file(path: Path) -> tuple[int, bool, bytes, bytes, int]:
    """Number, in order, first key, last key, checksum; see ``records_check``."""
    return _native.records_check(read_file(path))
