"""Which reduce task gets a key."""

from __future__ import annotations

import bisect
import struct
import zlib
from collections.abc import Iterable
from numbers import Number
from typing import Any

TEXT, BYTES, NOTHING, SEVERAL = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
"""Seeds by kind of key, so that equal bytes of different kinds have different numbers. (Digits of pi, as arbitrary
numbers.)"""


def hash_of(key: Any) -> int:
    """Return a number of 64 bits that is the same in all processes, and for equal keys.

    Python's hash of texts differs between processes.

    Raises:
        TypeError: The key has no such number.
    """
    kind = type(key)
    if kind is str:
        return _mixed(zlib.crc32(key.encode(errors="surrogatepass")), TEXT ^ len(key))
    if kind is bytes:
        return _mixed(zlib.crc32(key), BYTES ^ len(key))
    if key is None:
        return _mixed(0, NOTHING)
    if kind in (int, float, bool):
        return _of_number(key)
    if kind is tuple:
        return _mixed(zlib.crc32(b"".join(struct.pack("<Q", hash_of(own)) for own in key)), SEVERAL ^ len(key))
    # Values of derived types are equal to those of their base type.
    if isinstance(key, str):
        return hash_of(str.__str__(key))
    if isinstance(key, bytes):
        return hash_of(bytes(memoryview(key)))
    if isinstance(key, tuple):
        return hash_of(tuple(key))
    if isinstance(key, Number):
        return _of_number(key)
    if kind.__module__ == "numpy" and isinstance(key.item(), bool):
        return _of_number(key.item())
    raise TypeError(
        f"a key is {kind.__module__}.{kind.__name__}: with partition='hash' keys are texts, bytes, numbers or tuples "
        "of them; for others that have an order give partition='range', or a function"
    )


def is_equal_to_itself(key: Any) -> bool:
    """Whether a key is equal to its copies; NaN is not. A tuple with NaN is equal to itself, but not to its copy."""
    return all(map(is_equal_to_itself, key)) if isinstance(key, tuple) else bool(key == key)


def _of_number(key: Any) -> int:
    """Return a number from Python's hash, the same in all processes, and for equal numbers of different types."""
    # -1 and -2 have the same hash.
    number = -1 if key == -1 else hash(key)
    return _mixed(number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)


def _mixed(low: int, high: int) -> int:
    """Mix two numbers of 32 bits (the finalizer of SplitMix64: Steele et al. 2014)."""
    value = (high << 32 ^ low) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def partition_by_hash(key: Any, reducers: int) -> int:
    return hash_of(key) % reducers


class Ranges:
    """Keys that split all keys into ranges of nearly equal size (sample sort, Blelloch et al. 1991)."""

    def __init__(self, splitters: list[Any]):
        self.splitters = splitters

    @classmethod
    def of(cls, samples: Iterable[list[Any]], reducers: int) -> Ranges:
        """Return the ranges for a number of reduce tasks."""
        keys = sorted(key for own in samples for key in own)
        return cls([keys[len(keys) * index // reducers] for index in range(1, reducers)] if keys else [])

    def __call__(self, key: Any, reducers: int) -> int:
        return bisect.bisect_right(self.splitters, key)
