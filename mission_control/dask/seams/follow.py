"""Let a job follow into the threads of its program.

Dask's annotations are of one thread. While a job is active, each thread that starts is noted with the job of the thread
that starts it, and what threads submit is examined, in the client: a thread that was started inside the job belongs to
it. Of threads that were there before the job nobody can tell. They are refused while the job demands encryption, since
their data might be the job's and would be in the clear.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import dask
from dask.context import thread_state
from distributed import Client

from mission_control.dask.seams.seam import Part, Parts, Seam
from mission_control.jobs import ANNOTATION, JobRejected

logger = logging.getLogger(__name__)

SUBMIT = Seam(
    "Client",
    "_graph_to_futures",
    "lets a job follow into threads, and refuses what would fall out of one that demands encryption",
    deliberate=(JobRejected,),
    when="while a program is inside `job`",
)


START = Seam(
    "threading.Thread",
    "start",
    "notes the job inside of which a thread is started",
    ("self",),
    when="while a program is inside `job`",
)

STARTED: WeakKeyDictionary[threading.Thread, dict[str, Any]] = WeakKeyDictionary()
"""The specification of the job inside of which a thread was started."""
UNKNOWN: WeakSet[threading.Thread] = WeakSet()
"""Threads that were there before a job: what they do may be a part of it. What they start is taken for their own, since
a server that starts a thread for each request is there before any job of a request."""


class Active:
    """A job that a thread of this process is inside of."""

    def __init__(self, spec: dict[str, Any]):
        self.spec = spec
        self.warned = False

    @property
    def demands(self) -> dict[str, Any]:
        return {name: level for name, level in self.spec["demands"].items() if level not in ("none", None)}


def note_start(start: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
    spec = dask.get_annotations().get(ANNOTATION) or STARTED.get(threading.current_thread())
    if spec is not None:
        STARTED[thread] = spec
    start(thread)


class Followed:
    """The active jobs of one client."""

    def __init__(self, client: Client):
        self.active: list[Active] = []
        self.lock = threading.Lock()
        self.parts = Parts("this client", client.loop.add_callback)
        self.part: Part | None = None

    def begin(self, client: Client, job: Active) -> None:
        with self.lock:
            self.active.append(job)
            if self.part is None:
                self.part = self.parts.part("following", "what threads submit belongs to no job")
                self.part.replace(SUBMIT, client, self.submit)

    def end(self, job: Active) -> None:
        with self.lock:
            self.active.remove(job)
            if not self.active and self.part is not None:
                self.part.undo()
                self.part = None

    def submit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        annotations = dask.get_annotations()
        # Of what a task submits the scheduler knows the job.
        if ANNOTATION in annotations or getattr(thread_state, "key", None) is not None:
            return original(*args, **kwargs)
        spec = self.job_of_thread()
        if spec is None:
            return original(*args, **kwargs)
        with dask.annotate(**{ANNOTATION: spec}):
            return original(*args, **kwargs)

    def job_of_thread(self) -> dict[str, Any] | None:
        """Return the job to which this thread belongs; ``None``: none that demands encryption is active.

        Raises:
            JobRejected: Nobody can tell, and one of the active jobs demands encryption.
        """
        thread = threading.current_thread()
        with self.lock:
            spec = STARTED.get(thread)
            if spec is not None and spec in [job.spec for job in self.active]:
                return spec
            demanding = [job for job in self.active if job.demands] if thread in UNKNOWN else []
        for job in demanding:
            name = job.spec["job"]
            if job.demands.get("encrypt") is not None:
                raise JobRejected(
                    f"thread {thread.name!r} submits work while job {name}, which demands encryption, is active in "
                    "another thread, and whether it belongs to the job is not known: start the thread (or the pool of "
                    "threads) inside `with job(...)`, or use `with job(...)` in the thread"
                )
            if not job.warned:
                job.warned = True
                logger.warning(
                    "Thread %r submits work outside job %s, whose demands (%s) do not hold for it: start the thread "
                    "inside `with job(...)`, or use `with job(...)` in the thread",
                    thread.name,
                    name,
                    ", ".join(f"{demand} {level}" for demand, level in job.demands.items()),
                )
        return None


class Starts:
    """Notes who starts threads while a job is active in this process, whatever its client: one part for all of them,
    which come and go in any order."""

    def __init__(self) -> None:
        self.active = 0
        self.lock = threading.Lock()
        self.parts = Parts("this process", lambda call: call())
        self.part: Part | None = None

    def begin(self) -> None:
        with self.lock:
            self.active += 1
            if self.part is None:
                self.part = self.parts.part("following", "what threads submit belongs to no job")
                self.part.replace(START, threading.Thread, note_start)

    def end(self) -> None:
        with self.lock:
            self.active -= 1
            if not self.active and self.part is not None:
                self.part.undo()
                self.part = None


STARTS = Starts()
FOLLOWED: WeakKeyDictionary[Client, Followed] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def into_threads(client: Client, spec: dict[str, Any]) -> Iterator[None]:
    """Let the job that this thread enters follow into threads that are started inside."""
    this = threading.current_thread()
    for thread in threading.enumerate():
        # One that was started inside another job is known.
        if thread is not this and thread not in STARTED:
            UNKNOWN.add(thread)
    with _lock:
        followed = FOLLOWED.setdefault(client, Followed(client))
    job = Active(spec)
    STARTS.begin()
    followed.begin(client, job)
    try:
        off = STARTS.parts.off.get("following") or followed.parts.off.get("following")
        if off is not None and job.demands.get("encrypt") is not None:
            raise JobRejected(
                f"job {spec['job']} demands encryption, but Mission Control cannot see which tasks its threads submit: "
                f"{off}. Restart this program"
            )
        yield
    finally:
        followed.end(job)
        STARTS.end()
