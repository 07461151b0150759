"""A second engine: processes that put and fetch objects, and know nothing of Dask.

It shows what an engine has to implement for Mission Control: it numbers its tasks, reports their transitions, carries
messages to its workers and back, and recomputes lost results. This one runs one task at a time on each worker.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from mission_control import _native
from mission_control.controller import SAID, MissionController
from mission_control.throttle import ThrottleController

DEMANDS = json.dumps({"encrypt": "none", "transport": "tcp"})
REPORT_S = 0.1


class Worker(ThrottleController):
    """In a worker process: runs its tasks one after another, and reports to the engine."""

    def __init__(self, pipe: Connection, token: bytes, spool: str):
        self.pipe = pipe
        self.lock = threading.Lock()
        self.tasks: queue.Queue = queue.Queue()
        self.begin()
        self.own = _native.Endpoint("127.0.0.1", token, memory_limit=1 << 28, spool_folder=spool, flows_per_host=10)
        threading.Thread(target=self.run_tasks, daemon=True).start()
        self.say("join", **self.introduction(self.own))
        with contextlib.suppress(EOFError):
            while True:
                self.obey(*pipe.recv())

    def obey(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "join":
            self.say("join", **self.introduction(self.own))
        elif kind == "briefing":
            begins = self.endpoint is None
            self.join(self.own, values)
            if begins:
                threading.Thread(target=self.keep_reporting, daemon=True).start()
        elif kind == "tell":
            self.hear(**values)
        else:
            self.tasks.put(values)

    def run_tasks(self) -> None:
        while True:
            self.run(**self.tasks.get())

    def run(self, job: str, task: int, stage: str, content: list[bytes] | None, wanted: dict[str, Any]) -> None:
        try:
            if content is not None:
                self.say("put", task=task, object=self.own.put(content, job, DEMANDS))
            else:
                parts, _, _ = self.own.fetch(job, wanted["from"], stage, DEMANDS, wanted["parts"], False)
                self.say("fetched", task=task, data=[bytes(part) for part in parts])
        except _native.TransferError as error:
            self.say("failed", task=task, why=str(error))

    def keep_reporting(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(REPORT_S)
                self.report()

    # --- what an engine has to implement ----------------------------------------------------------------------------

    def say(self, kind: str, **said: Any) -> None:
        with self.lock:
            self.pipe.send((kind, said))

    def soon(self, call: Callable[[], Any]) -> None:
        call()


@dataclass
class Task:
    """A task of this engine: it puts content, or fetches a part of other tasks' objects."""

    number: int
    job: str
    stage: str
    content: list[bytes] | None = None
    inputs: list[Task] = field(default_factory=list)
    part: int = 0
    copies: int = 1
    # For a task that puts: its object, the sizes of its parts, and its address. For one that fetches: its content.
    made: tuple[str, list[int], str] | None = None
    data: list[bytes] | None = None
    worker: str | None = None


class Engine(MissionController):
    """Starts workers, and runs tasks on them in turn; all in the calling thread."""

    def __init__(self, workers: int, spool: str, policy: str = "performance-centric"):
        self.policy = policy
        self.begin(policy, 10, {})
        self.calls: deque[Callable[[], Any]] = deque()
        self.pipes: dict[str, Connection] = {}
        self.processes: dict[str, multiprocessing.Process] = {}
        self.addresses: dict[str, str] = {}
        self.tasks: dict[int, Task] = {}
        self.numbers = itertools.count()
        self.turn = itertools.count()
        token, context = os.urandom(32), multiprocessing.get_context("forkserver")
        for number in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=Worker, args=(there, token, f"{spool}/{number}"), daemon=True)
            process.start()
            there.close()
            self.pipes[f"w{number}"], self.processes[f"w{number}"] = here, process
        self.until(lambda: len(self.addresses) == workers, "all workers have joined")

    # --- what an engine has to implement ----------------------------------------------------------------------------

    def tell(self, worker: str, version: int, message: dict[str, Any]) -> None:
        self.send(worker, "tell", {"version": version, "message": message})

    def recompute(self, tasks: Sequence[int]) -> None:
        for number in tasks:
            self.lose(self.tasks[number])

    def soon(self, call: Callable[[], Any]) -> None:
        self.calls.append(call)

    def name_of_task(self, task: int) -> str:
        return f"{self.tasks[task].stage}-{task}" if task in self.tasks else str(task)

    def submit(self, job: str, stage: str, *, inputs: list[Task] | None = None, **given: Any) -> Task:
        task = Task(next(self.numbers), job, stage, inputs=inputs or [], **given)
        self.tasks[task.number] = task
        new = (task.number, stage, "work", [own.number for own in task.inputs])
        spec = json.dumps({"job": job})
        self.carry_out(self.controller.tasks(self.now(), [new], "client", spec))
        self.event("flush")
        return task

    def start(self, task: Task, worker: str | None = None) -> None:
        """Assign a task to a worker; a fetching task only once all its inputs are available."""
        alive = sorted(self.addresses)
        task.worker = worker or alive[next(self.turn) % len(alive)]
        self.carry_out(self.controller.begins(self.now(), task.number, task.worker))
        wanted: dict[str, Any] = {}
        if task.inputs:
            made = [own.made for own in task.inputs]
            parts = [(name, task.part, sizes[task.part], [address]) for name, sizes, address in made if name]
            wanted = {"from": task.inputs[0].stage, "parts": parts}
        order = {"job": task.job, "task": task.number, "stage": task.stage, "content": task.content, "wanted": wanted}
        self.send(task.worker, "run", order)

    def ended(self, task: Task) -> None:
        self.carry_out(self.controller.ends(self.now(), task.number))

    def carries(self, task: Task) -> None:
        """Report which object the result of a task carries."""
        assert task.made is not None
        name, sizes, _ = task.made
        carried = (name, task.worker, len(sizes), sum(sizes), task.copies)
        self.carry_out(self.controller.carries(self.now(), task.number, [carried], True))

    def lose(self, task: Task) -> None:
        """A result is invalid, so it is recomputed."""
        task.made = None
        self.carry_out(self.controller.result_gone(self.now(), task.number, True))
        self.start(task)

    def forget(self, *tasks: Task) -> None:
        for task in tasks:
            self.carry_out(self.controller.result_gone(self.now(), task.number, False))
            self.carry_out(self.controller.forgotten(self.now(), task.number))
            del self.tasks[task.number]

    # --- its transport of messages ----------------------------------------------------------------------------------

    def send(self, worker: str, kind: str, values: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.pipes[worker].send((kind, values))

    def hear(self, worker: str, kind: str, values: dict[str, Any]) -> None:
        task = self.tasks.get(values.get("task", -1))
        if kind == "join":
            self.send(worker, "briefing", self.join(worker=worker, **values))
            self.event("known", worker=worker)
            self.addresses[worker] = values["address"]
        elif kind in SAID:
            self.said(kind, worker=worker, **values)
        elif kind == "put" and task is not None:
            name, sizes = values["object"]
            task.made = (name, sizes, self.addresses[worker])
            self.carries(task)
            self.ended(task)
        elif kind == "fetched" and task is not None:
            task.data = values["data"]
            self.ended(task)
        elif kind == "failed" and task is not None:
            # An input is lost: run the task again once the input is available.
            self.ended(task)
            self.until(lambda: all(own.made for own in task.inputs), f"the inputs of {task.stage} are there again")
            self.start(task)

    def step(self) -> None:
        for worker, pipe in list(self.pipes.items()):
            try:
                while worker in self.pipes and pipe.poll(0.002):
                    self.hear(worker, *pipe.recv())
            except (EOFError, OSError):
                del self.pipes[worker]
                if self.addresses.pop(worker, None) is not None:
                    self.event("gone", worker=worker)
        while self.calls:
            self.calls.popleft()()
        self.event("tick")

    def until(self, true: Any, what: str, seconds: float = 30) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := true()):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            self.step()
        return value

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.log.since(0)[1]

    def kill(self, worker: str) -> None:
        pid = self.processes[worker].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def begin_anew(self) -> None:
        """The controller is lost with its state; the workers join another one."""
        self.begin(self.policy, 10, {})
        joined, self.addresses = self.addresses, {}
        for worker in joined:
            self.send(worker, "join", {})
        self.until(lambda: self.addresses == joined, "all workers have joined again")

    def tell_again(self, task: Task) -> None:
        """Report a finished task to a controller that does not know it."""
        new = (task.number, task.stage, "work", [own.number for own in task.inputs])
        self.carry_out(self.controller.tasks(self.now(), [new], "client", json.dumps({"job": task.job})))
        self.carries(task)

    def retire(self, worker: str) -> None:
        """End a worker once others have its objects."""
        self.event("leaving", worker=worker)
        self.until(lambda: not self.controller.is_handing_over(worker), f"others have the objects of {worker}")
        self.kill(worker)
        self.until(lambda: worker not in self.addresses, f"{worker} is gone")

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)
