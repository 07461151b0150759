"""The jobs: each compares its content with the expected one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, Future, get_worker

import mission_control
from mission_control import In
from mission_control.workloads.kmeans import KMeans
from mission_control.workloads.settings import Settings
from mission_control.workloads.sort import Sort
from mission_control.workloads.wordcount import WordCount
from tests.conftest import data, until

BROADCAST_BYTES = 5 << 20


class Broadcast:
    """One object after another, each fetched by many tasks."""

    def __init__(self, workload: Settings, number: int, folder: Path):
        self.seed, self.digests = workload.seed, [set[str]() for _ in range(3)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        for number, digests in enumerate(self.digests):
            reference = client.submit(produce, self.seed + number, pure=False)
            digests.update(client.gather(client.map(digest_of, [reference] * 6, range(6), pure=False)))

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        expected = [hashlib.sha256(data(BROADCAST_BYTES, self.seed + number)).hexdigest() for number in range(3)]
        return {"every task got every object right": self.digests == [{entry} for entry in expected]}


def produce(seed: int) -> mission_control.Reference:
    return mission_control.put([data(BROADCAST_BYTES, seed)])


def digest_of(reference: mission_control.Reference, number: int) -> str:
    return hashlib.sha256(mission_control.fetch(reference)[0]).hexdigest()


class Streams:
    """Tasks that write, forward and read streams, all at once."""

    def __init__(self, workload: Settings, number: int, folder: Path):
        self.seeds = [workload.seed * 10 + number for number in range(3)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        written = client.map(write_stream, self.seeds, pure=False)
        passed = client.map(pass_on, written, pure=False)
        read = [client.submit(read_stream, own, part, pure=False) for own in passed for part in range(2)]
        del written, passed
        self.digests = client.gather(read)

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        expected = [digest_all(buffers(seed)[part::2]) for seed in self.seeds for part in range(2)]
        return {"every reader got what was written": self.digests == expected}


class Programs:
    """Programs that sort, and others that request objects and other tasks from their worker."""

    def __init__(self, workload: Settings, number: int, folder: Path):
        self.seeds = [workload.seed * 10 + number for number in range(4)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        made = client.map(put_lines, self.seeds, pure=False)
        ordered = [client.submit(mission_control.run, ["sort", In(0)], inputs=[own], pure=False) for own in made]
        merge = [sys.executable, "-c", "from tests.chaos.jobs import ask_for_a_merge; ask_for_a_merge()"]
        merged = client.submit(mission_control.run, merge, inputs=ordered, pure=False)
        self.digest = client.submit(digest_of, merged, 0, pure=False).result()

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        lines = sorted(line for seed in self.seeds for line in lines_of(seed).splitlines(keepends=True))
        return {"all lines are there, in order": self.digest == hashlib.sha256(b"".join(lines)).hexdigest()}


def lines_of(seed: int) -> bytes:
    chance = random.Random(seed)
    return b"".join(b"%x\n" % chance.getrandbits(64) for _ in range(30_000))


def put_lines(seed: int) -> mission_control.Reference:
    return mission_control.put([lines_of(seed)])


def ask_for_a_merge() -> None:
    """Runs as a program: reads its inputs itself, puts them in one object, and delegates to a program that sorts."""
    path, credential = os.environ["MISSION_CONTROL_SOCKET"], os.environ["MISSION_CONTROL_CREDENTIAL"]

    def ask(where: str, *more: str) -> bytes:
        words = ["curl", "--silent", "--show-error", "--fail-with-body", "--unix-socket", path]
        words += ["-H", f"Authorization: Bearer {credential}", *more, f"http://worker{where}"]
        return subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout

    inputs = json.loads(ask("/task"))["inputs"]
    with tempfile.NamedTemporaryFile() as file:
        for own in inputs:
            file.write(ask("/fetch", "-d", json.dumps({"reference": own})))
        file.flush()
        put = json.loads(ask("/put", "-T", file.name))["reference"]
    ask("/delegate", "-d", json.dumps({"program": ["sort", {"in": 0}], "inputs": [put]}))


def buffers(seed: int) -> list[bytes]:
    """Return buffers to write: some are small, and some are separate chunks."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 10, 1000, 100_000]) for _ in range(60)] + [1 << 20, 5 << 20, 7]
    return [data(size, seed + number).tobytes() for number, size in enumerate(sizes)]


def digest_all(read: list[bytes]) -> str:
    return hashlib.sha256(b"".join(len(own).to_bytes(8, "little") + own for own in read)).hexdigest()


def write_stream(seed: int) -> None:
    # Readers of every other stream continue where they are when its worker is lost.
    with mission_control.open_stream(2, deterministic=seed % 2 == 1) as out:
        for number, own in enumerate(buffers(seed)):
            out.write(number % 2, own)
            time.sleep(0.01)


def pass_on(reference: mission_control.StreamReference) -> None:
    with mission_control.open_stream(2) as out:
        for part in range(2):
            for own in mission_control.stream(reference, part):
                out.write(part, own)


def read_stream(reference: mission_control.StreamReference, part: int) -> str:
    return digest_all([bytes(own) for own in mission_control.stream(reference, part)])


class Frames:
    """A merge of data frames by an unchanged program, whose shuffles use the data plane."""

    def __init__(self, workload: Settings, number: int, folder: Path):
        self.seeds = [[workload.seed * 100 + 10 * side + part for part in range(6)] for side in range(2)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        left, right = (dd.from_map(frame_of, seeds, meta=frame_of(0).iloc[:0]) for seeds in self.seeds)
        merged = left.merge(right, on="key", how="outer", shuffle_method="p2p", npartitions=5)
        with EXPRESSIONS:
            future = client.compute(merged)
            until(lambda: client.run_on_scheduler(knows, future.key), "the scheduler has the graph")
        self.got = future.result()

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        left, right = (pd.concat([frame_of(seed) for seed in seeds]) for seeds in self.seeds)
        expected = left.merge(right, on="key", how="outer")
        columns = list(expected.columns)
        both = [own.sort_values(columns).reset_index(drop=True) for own in (self.got[columns], expected)]
        return {"the merge has the rows that pandas has": both[0].equals(both[1])}


EXPRESSIONS = threading.Lock()
"""Lock while Dask makes the graph of a data frame, in the client and then in the scheduler. Here both share a process,
and before Python 3.12 two such threads can deadlock in ``cached_property`` (issue 43468 of Python)."""


def knows(key: Any, dask_scheduler: Any) -> bool:
    return key in dask_scheduler.tasks


def frame_of(seed: int) -> pd.DataFrame:
    """Some keys have one row, and one has many."""
    chance = np.random.default_rng(seed)
    keys = chance.integers(0, 20_000, 5000)
    keys[chance.random(5000) < 0.01] = 7
    # The type that Dask makes of texts.
    text = pd.array(np.char.add("row ", chance.integers(0, 1000, 5000).astype(str)), dtype="string[pyarrow]")
    return pd.DataFrame({"key": keys, "number": chance.random(5000), "text": text})


class Mistakes:
    """Errors of users: each has an error that names it, whatever else fails."""

    def __init__(self, workload: Settings, number: int, folder: Path):
        self.seed = workload.seed

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        written = client.submit(write_and_fail, pure=False)
        endless = {"inputs": [], "timeout": ENDLESS_S, "pure": False}
        self.found = {
            # Their errors are checked first, because others of the round may fail by the blow.
            "a delegate that refers to itself": ended(client.submit(wait_for_myself, pure=False), "wait for itself"),
            "a stream whose writer raises": ended(client.submit(read_stream, written, 0, pure=False), PLANNED),
            "a program that does not end": ended(
                client.submit(mission_control.run, ["sh", "-c", FORKS], **endless), f"after {ENDLESS_S} s"
            ),
            "a program that is not there": ended(
                client.submit(mission_control.run, ["no-such-program"], pure=False), "no-such-program"
            ),
        }
        del written
        garbage = client.submit(mission_control.run, [sys.executable, "-c", GARBAGE], pure=False)
        self.found["a program that sends garbage"] = client.submit(content_of, garbage, pure=False).result() == GUARDED
        del garbage
        reduced = mission_control.mapreduce([self.seed], map=raise_in_map, reduce=sum_of, reducers=2, client=client)
        self.found["a map that raises"] = ended(reduced[0], PLANNED)

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        return self.found


ENDLESS_S = 2
GARBAGE, GUARDED = "from tests.test_interface import harm; harm()", b"unharmed\n"
FORKS = "sleep 1000 & sleep 1000 & wait"
PLANNED = "as planned"


def ended(future: Any, says: str) -> bool:
    """Check that a task failed with this text; raise any other error."""
    error = future.exception()
    if error is None or says not in str(error):
        raise error or AssertionError(f"a task that was to fail with {says!r} gave {future.result()!r}")
    return True


def content_of(reference: mission_control.Reference) -> bytes:
    return bytes(mission_control.fetch(reference)[0])


def wait_for_myself() -> Any:
    return mission_control.delegate(digest_all, Future(get_worker().get_current_task()))


def write_and_fail() -> None:
    with mission_control.open_stream(1) as out:
        out.write(0, b"some")
        raise ValueError(PLANNED)


def raise_in_map(seed: int) -> Iterator[tuple[int, int]]:
    yield seed, 1
    raise ValueError(PLANNED)


def sum_of(key: int, values: Any) -> list[int]:
    return [sum(values)]


KINDS = {
    "sort": Sort,
    "kmeans": KMeans,
    "broadcast": Broadcast,
    "frames": Frames,
    "streams": Streams,
    "programs": Programs,
    "wordcount": WordCount,
    "mistakes": Mistakes,
}
MIXES = (
    ("sort", "kmeans"),
    ("sort", "frames"),
    ("sort", "kmeans", "frames"),
    ("broadcast", "sort", "kmeans"),
    ("frames", "frames"),
    ("streams", "sort"),
    ("streams", "frames"),
    ("programs", "sort"),
    ("wordcount", "kmeans"),
    ("mistakes", "streams"),
)
