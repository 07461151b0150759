"""Functions for tasks that delegate, and checks of what they leave."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from distributed import Client

import mission_control
from tests.conftest import until, what_is_left

LEFT = ("objects", "live_bytes", "spooled_bytes")


def nothing_left(client: Client) -> bool:
    client.run(gc.collect)
    left, kept = what_is_left(client, *LEFT), kept_by_scheduler(client)
    print(left, kept)
    return not left and not kept


def kept_by_scheduler(client: Client) -> dict[str, int]:
    def count(dask_scheduler: Any) -> dict[str, int]:
        own = dask_scheduler.plugins["mission-control"].delegates
        ours = [name for name in dask_scheduler.clients if name.startswith("mission-control")]
        found = {"first": own.first, "next": own.next, "awaited": own.awaited, "clients": ours}
        found["tasks"] = dask_scheduler.tasks
        return {name: len(value) for name, value in found.items() if value}

    return client.run_on_scheduler(count)


def note(path: Path, what: str) -> None:
    with path.open("a") as file:
        file.write(f"{what}\n")


def noted(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def count_down(number: int, total: int = 0) -> Any:
    return mission_control.delegate(count_down, number - 1, total + number) if number else total


def content_of(reference: Any) -> bytes:
    return bytes(mission_control.fetch(reference)[0])


def square(number: int) -> int:
    return number * number


def wait_for(path: Path) -> None:
    until(path.exists, f"{path} is there")
