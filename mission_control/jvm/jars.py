"""The jars of a worker's tasks in Java, as files: one for each content, and those used last."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mission_control.objects import Reference, fetch

IDLE_MAX = 64
"""Most objects whose files are kept although no task runs with them."""


class Jars:
    """The files of one worker.

    Args:
        folder: Where they are; made when it is needed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = threading.Lock()
        self.files: OrderedDict[str, Path] = OrderedDict()
        """By object, the one that was used last at the end. Equal jars are one file, and one set of classes."""
        self.users: Counter[str] = Counter()
        """By object: the tasks that run with it."""

    @contextmanager
    def of(self, jars: Sequence[Reference]) -> Iterator[list[Path]]:
        """Fetch jars that are not here, and keep their files until the task ends."""
        with ExitStack() as stack:
            paths = []
            for jar in jars:
                with self.lock:
                    self.users[jar.object] += 1
                stack.callback(self._give_back, jar.object)
                paths.append(self._file_of(jar))
            yield paths

    def _file_of(self, jar: Reference) -> Path:
        with self.lock:
            if (path := self.files.get(jar.object)) is not None and path.exists():
                self.files.move_to_end(jar.object)
                return path
        # Two tasks may fetch it at once; with a lock, all tasks that need it would block their threads.
        content = fetch(jar)
        checksum = hashlib.blake2b(digest_size=16)
        for part in content:
            checksum.update(part)
        path = self.folder / f"{checksum.hexdigest()}.jar"
        self.folder.mkdir(exist_ok=True)
        if not path.exists():
            write(path, content)
        with self.lock:
            if not path.exists():
                # Another task's end has just removed it.
                write(path, content)
            self.files[jar.object] = path
            self.files.move_to_end(jar.object)
        return path

    def _give_back(self, name: str) -> None:
        with self.lock:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name]
            idle = [own for own in self.files if own not in self.users]
            for own in idle[: max(len(idle) - IDLE_MAX, 0)]:
                path = self.files.pop(own)
                if path not in self.files.values():
                    path.unlink(missing_ok=True)


def write(path: Path, content: Iterable[Any]) -> None:
    """Write a file that is there as a whole, or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in content:
                file.write(part)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
