"""Counts the words of texts: files in, objects out, by :func:`mission_control.mapreduce`."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

import mission_control
from mission_control import _native
from mission_control.map_reduce import Output, items_of
from mission_control.workloads.settings import AutoCount, SizedSettings

if TYPE_CHECKING:
    from distributed import Client

PARTITION_BYTES = 64 << 20
"""As in the sort workload."""
WORDS = 50_000
"""Distinct words; a novel has about 10,000, an encyclopedia some millions."""
LINE = 12
"""Words per line."""
BLOCK = 1 << 16
LETTERS = 4
"""Of a word and the space behind it, on average: 4.09 over a block."""


class WordCountSettings(SizedSettings):
    """Words of texts are counted, by `mapreduce`."""

    files_per_byte: ClassVar[int] = 1
    """The text."""

    kind: Literal["wordcount"] = "wordcount"
    partitions: AutoCount = Field("auto", description="Map tasks per job. auto: one per worker, and per 64 MiB")
    reducers: AutoCount = Field("auto", description="Reduce tasks per job. auto: one per worker")

    def make(self, number: int, folder: Path, workers: int) -> WordCount:
        return WordCount(self, number, folder, workers)


class WordCount:
    """One job that counts words.

    Args:
        workload: of the scenario.
        number: of the job, from 0; each has another text.
        folder: for the text; all workers must see it.
        workers: of the cluster.
    """

    def __init__(self, workload: WordCountSettings, number: int, folder: Path, workers: int = 1):
        self.bytes = workload.size
        auto = max(workers, math.ceil(self.bytes / PARTITION_BYTES))
        self.partitions = auto if workload.partitions == "auto" else workload.partitions
        self.reducers = max(workers, 1) if workload.reducers == "auto" else workload.reducers
        self.seed = workload.seed * 1000 + number
        self.inputs = [folder / f"text-{index:05}" for index in range(self.partitions)]
        self.expected: Counter[bytes] = Counter()
        self.counted: list[Any] = []

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        say(f"writes {_native.format_bytes(self.bytes)} of text in {self.partitions} files")
        self.inputs[0].parent.mkdir(parents=True, exist_ok=True)
        size = self.bytes // self.partitions
        made = [
            client.submit(make_text, path, (self.seed, number), size, key=f"wordcount-make-{path}", pure=False)
            for number, path in enumerate(self.inputs)
        ]
        counts = np.sum(client.gather(made), axis=0)
        self.expected = Counter({word: int(count) for word, count in zip(vocabulary(), counts, strict=True) if count})

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        say("counts")
        given: dict[str, Any] = {"map": words, "reduce": count, "combine": operator.add, "name": "wordcount"}
        self.counted = mission_control.mapreduce(self.inputs, **given, reducers=self.reducers, client=client)
        client.gather(self.counted)

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        say("compares with what was written")
        found: list[tuple[bytes, int]] = []
        for output in self.counted:
            found += client.submit(all_items, output, pure=False).result()
        self.counted = []
        return {
            "each word once": len({word for word, _ in found}) == len(found),
            "counts": Counter(dict(found)) == self.expected,
        }


def words(path: Path) -> Iterator[tuple[bytes, int]]:
    """The map function."""
    with open(path, "rb") as file:
        for line in file:
            for word in line.split():
                yield word, 1


def count(word: bytes, counts: Iterable[int]) -> Iterator[tuple[bytes, int]]:
    """The reduce function."""
    yield word, sum(counts)


def all_items(output: Output) -> list[tuple[bytes, int]]:
    assert isinstance(output.value, mission_control.Reference)
    return list(items_of(output.value))


def vocabulary() -> list[bytes]:
    """Generate all words; frequent ones are short, as in natural languages."""
    letters = b"etaoinshrdlucmfwypvbgkjqxz"
    made = []
    for number in range(WORDS):
        # Of three letters and more.
        word, left = bytearray(), number + 1 + len(letters) + len(letters) ** 2
        while left:
            left, letter = divmod(left - 1, len(letters))
            word.append(letters[letter])
        made.append(bytes(word))
    return made


def make_text(path: Path, seed: tuple[int, int], size: int) -> np.ndarray:
    """Write words with frequencies by Zipf's law; return how often each was written."""
    random = np.random.default_rng(seed)
    chances = 1 / np.arange(1, WORDS + 1)
    cumulated = np.cumsum(chances / chances.sum())
    known = vocabulary()
    counts = np.zeros(WORDS, np.int64)
    written = 0
    with open(path, "wb", buffering=1 << 20) as file:
        while written < size:
            # The last blocks are as short as what is left.
            many = min(BLOCK, (size - written) // LETTERS + 1)
            ranks = np.minimum(np.searchsorted(cumulated, random.random(many)), WORDS - 1)
            counts += np.bincount(ranks, minlength=WORDS)
            chosen = [known[rank] for rank in ranks.tolist()]
            lines = (b" ".join(chosen[first : first + LINE]) for first in range(0, many, LINE))
            written += file.write(b"\n".join(lines) + b"\n")
    return counts
