"""What the scheduler's plug-in knows of the objects that results carry."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class Objects:
    """Which keys carry which objects, and who owns them."""

    def __init__(self) -> None:
        self._owner: dict[str, str] = {}
        self._copies: dict[str, set[str]] = {}
        self._keys: dict[str, set[Any]] = {}
        self._carried: dict[Any, set[str]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def carry(self, key: Any, name: str, owner: str) -> None:
        self._owner[name] = owner
        self._keys.setdefault(name, set()).add(key)
        self._carried.setdefault(key, set()).add(name)

    def copied(self, name: str, worker: str) -> bool:
        """A worker keeps a copy; whether there is such an object still."""
        if name in self._owner:
            self._copies.setdefault(name, set()).add(worker)
        return name in self._owner

    def carried_by(self, key: Any) -> list[tuple[str, str]]:
        """The objects that a key carries, each with its owner."""
        return [(name, self._owner[name]) for name in self._carried.get(key, ())]

    def carried(self, key: Any) -> bool:
        return key in self._carried

    def release(self, key: Any) -> dict[str, list[str]]:
        """The objects that nothing carries now that this key does not, by each worker that has them."""
        free: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._carried.pop(key, ()):
            keys = self._keys[name]
            keys.discard(key)
            if not keys:
                del self._keys[name]
                for worker in {self._owner.pop(name), *self._copies.pop(name, ())}:
                    free[worker].append(name)
        return free

    def lost_with(self, worker: str) -> tuple[list[str], set[Any]]:
        """The objects that this worker owned, and the keys that carry them."""
        lost = [name for name, owner in self._owner.items() if owner == worker]
        return lost, {key for name in lost for key in self._keys[name]}
