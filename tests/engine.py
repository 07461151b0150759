"""A second engine: processes that put and fetch objects, and know nothing of Dask.

What an engine has to write to run on Mission Control's core: it numbers its tasks, says what becomes of them, hands
messages on to its workers, and computes again what it is told to. This one runs one task at a time on each worker.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from mission_control import _native

DEMANDS = json.dumps({"encrypt": "none", "transport": "tcp"})
REPORT_S = 0.1


def work(pipe: Connection, token: bytes, spool: str) -> None:
    """A worker process: does what the engine says, and reports."""
    endpoint = _native.Endpoint("127.0.0.1", token, memory_limit=1 << 28, spool_folder=spool, flows_per_host=10)
    lock = threading.Lock()

    def say(kind: str, **values: Any) -> None:
        with lock:
            pipe.send((kind, values))

    def report(last_of: str | None = None) -> None:
        if (report := endpoint.report(0.0, last_of)) is not None:
            say("report", report=json.loads(report))

    def keep_reporting() -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(REPORT_S)
                report()

    def obey(version: int, message: dict[str, Any]) -> None:
        missing_after, last_of, _ = endpoint.hear(version, json.dumps(message))
        assert missing_after is None, "a pipe keeps all messages in order"
        if last_of is not None:
            report(last_of)

    def run(job: str, task: int, stage: str, content: list[bytes] | None, wanted: dict[str, Any]) -> None:
        try:
            if content is not None:
                say("put", task=task, object=endpoint.put(content, job, DEMANDS))
            else:
                parts, _, _ = endpoint.fetch(job, wanted["from"], stage, DEMANDS, wanted["parts"], False)
                say("fetched", task=task, data=[bytes(part) for part in parts])
        except _native.TransferError as error:
            say("failed", task=task, why=str(error))

    where = {"host": endpoint.host, "address": endpoint.address, "environment": json.loads(endpoint.environment)}
    where["protocol"] = _native.PROTOCOL
    say("join", **where)
    kind, values = pipe.recv()
    assert kind == "briefing"
    endpoint.joined(json.dumps(values))
    threading.Thread(target=keep_reporting, daemon=True).start()
    tasks: queue.Queue = queue.Queue()
    threading.Thread(target=lambda: [run(**tasks.get()) for _ in itertools.count()], daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            kind, values = pipe.recv()
            if kind == "join":
                say("join", **where)
            elif kind == "briefing":
                endpoint.joined(json.dumps(values))
            else:
                obey(**values) if kind == "tell" else tasks.put(values)


@dataclass
class Task:
    """A task of this engine: it puts content, or fetches a part of what others put."""

    number: int
    job: str
    stage: str
    content: list[bytes] | None = None
    inputs: list[Task] = field(default_factory=list)
    part: int = 0
    copies: int = 1
    # Of one that puts: its object, the sizes of its parts, and where it lies. Of one that fetches: what came.
    made: tuple[str, list[int], str] | None = None
    data: list[bytes] | None = None
    worker: str | None = None


class Engine:
    """Starts workers, and runs tasks on them in turn; all of it in the thread that calls."""

    def __init__(self, workers: int, spool: str, policy: str = "performance-centric"):
        self.policy = policy
        self.controller = _native.Controller(policy, 10, "{}")
        self.began = time.monotonic()
        self.pipes: dict[str, Connection] = {}
        self.processes: dict[str, multiprocessing.Process] = {}
        self.addresses: dict[str, str] = {}
        self.tasks: dict[int, Task] = {}
        self.records: list[dict[str, Any]] = []
        self.numbers = itertools.count()
        self.turn = itertools.count()
        token, context = os.urandom(32), multiprocessing.get_context("spawn")
        for number in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, token, f"{spool}/{number}"), daemon=True)
            process.start()
            there.close()
            self.pipes[f"w{number}"], self.processes[f"w{number}"] = here, process
        self.until(lambda: len(self.addresses) == workers, "all workers have joined")

    # --- what an engine has to write --------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() - self.began

    def event(self, kind: str, **values: Any) -> dict[str, Any]:
        return self.carry_out(self.controller.handle(self.now(), json.dumps({"event": kind, **values})))

    def carry_out(self, commands: str | None) -> dict[str, Any]:
        answers = {}
        for command in json.loads(commands or "[]"):
            kind = command.pop("command")
            if kind == "tell":
                self.send(command.pop("worker"), "tell", command)
            elif kind == "record":
                self.records.append(command["record"])
            elif kind == "recompute":
                for number in command["tasks"]:
                    self.lose(self.tasks[number])
            elif kind == "soon":
                answers |= self.event("flush")
            else:
                answers[kind] = command
        return answers

    def submit(self, job: str, stage: str, *, inputs: list[Task] | None = None, **given: Any) -> Task:
        task = Task(next(self.numbers), job, stage, inputs=inputs or [], **given)
        self.tasks[task.number] = task
        new = (task.number, stage, "work", [own.number for own in task.inputs])
        spec = json.dumps({"job": job})
        self.carry_out(self.controller.tasks(self.now(), [new], "client", spec))
        self.event("flush")
        return task

    def start(self, task: Task, worker: str | None = None) -> None:
        """Gives a task to a worker; one that fetches, once all its inputs are there."""
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
        """Says which object the result of a task carries."""
        assert task.made is not None
        name, sizes, _ = task.made
        carried = (name, task.worker, len(sizes), sum(sizes), task.copies)
        self.carry_out(self.controller.carries(self.now(), task.number, [carried], True))

    def lose(self, task: Task) -> None:
        """A result is invalid: what it was is computed again."""
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
            self.send(worker, "briefing", self.event("join", worker=worker, **values)["briefing"])
            self.event("known", worker=worker)
            self.addresses[worker] = values["address"]
        elif kind == "report":
            self.event("report", worker=worker, **values)
        elif kind == "put" and task is not None:
            name, sizes = values["object"]
            task.made = (name, sizes, self.addresses[worker])
            self.carries(task)
            self.ended(task)
        elif kind == "fetched" and task is not None:
            task.data = values["data"]
            self.ended(task)
        elif kind == "failed" and task is not None:
            # An input is lost: again, once it is there.
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
        self.event("tick")

    def until(self, true: Any, what: str, seconds: float = 30) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := true()):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            self.step()
        return value

    def status(self) -> dict[str, Any]:
        return json.loads(self.controller.status())

    def kill(self, worker: str) -> None:
        pid = self.processes[worker].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def begin_anew(self) -> None:
        """The controller is lost, with all that it knew; the workers join another one."""
        self.controller = _native.Controller(self.policy, 10, "{}")
        joined, self.addresses = self.addresses, {}
        for worker in joined:
            self.send(worker, "join", {})
        self.until(lambda: self.addresses == joined, "all workers have joined again")

    def tell_again(self, task: Task) -> None:
        """A task whose result is there, to a controller that does not know it."""
        new = (task.number, task.stage, "work", [own.number for own in task.inputs])
        self.carry_out(self.controller.tasks(self.now(), [new], "client", json.dumps({"job": task.job})))
        self.carries(task)

    def retire(self, worker: str) -> None:
        """Ends a worker once others have its objects."""
        self.event("leaving", worker=worker)
        self.until(lambda: not self.controller.is_handing_over(worker), f"others have the objects of {worker}")
        self.kill(worker)
        self.until(lambda: worker not in self.addresses, f"{worker} is gone")

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)
