"""Callers that are no plain task: actors, coroutines, and clients that are asynchronous."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
from distributed import Client

import mission_control
from mission_control.workers import workers_of
from tests.conftest import resources, until


def objects(client: Any) -> int:
    return sum(resource["objects"] for resource in resources(client).values())


class Keeper:
    """An actor that puts when it is made, and tries to in a method."""

    def __init__(self) -> None:
        self.reference = mission_control.put([np.full(1000, 7, np.uint8)])

    def put(self) -> mission_control.Reference:
        return mission_control.put([b"from a method"])

    async def put_later(self) -> mission_control.Reference:
        return mission_control.put([b"from a coroutine"])

    def fetch(self) -> bytes:
        return bytes(mission_control.fetch(self.reference)[0])


def test_what_an_actor_puts_lives_as_long_as_the_actor(client):
    before = objects(client)
    with mission_control.job("actors", transport="tcp"):
        keeper = client.submit(Keeper, actor=True, pure=False)
        actor = keeper.result(timeout=60)
    assert objects(client) == before + 1
    assert actor.fetch().result() == b"\x07" * 1000
    with pytest.raises(RuntimeError, match=r"actor.*put it in a task") as caught:
        actor.put().result()
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"event loop.*plain def"):
        actor.put_later().result()
    assert objects(client) == before + 1
    del keeper, actor
    del caught
    # Tracebacks of refused calls hold the actor, in cycles of references.
    until(lambda: gc.collect() >= 0 and objects(client) == before, "the actor's object is freed")


def test_a_coroutine_is_refused_in_one_line(client):
    async def put() -> mission_control.Reference:
        await asyncio.sleep(0)
        return mission_control.put([b"part"])

    with pytest.raises(RuntimeError, match=r"event loop.*plain def") as caught:
        client.submit(put, pure=False).result(timeout=60)
    assert "\n" not in str(caught.value)


def test_an_asynchronous_client_is_refused_in_one_line(cluster):
    async def main() -> list[str]:
        texts = []
        async with Client(cluster.scheduler_address, asynchronous=True, set_as_default=False) as client:
            for attempt in (
                lambda: mission_control.job("a", client=client).__enter__(),
                lambda: mission_control.install(client),
                lambda: mission_control.uninstall(client),
            ):
                with pytest.raises(RuntimeError) as caught:
                    attempt()
                texts.append(str(caught.value))
        return texts

    for text in asyncio.run(main()):
        assert "asynchronous=True" in text and "asyncio.to_thread" in text and "\n" not in text


def test_a_plain_client_in_a_thread_is_what_an_asynchronous_program_uses(cluster):
    def work() -> bytes:
        address = cluster.scheduler_address
        with Client(address, set_as_default=False) as client, mission_control.job("in a thread", client=client):
            return client.submit(lambda: b"done", pure=False).result(timeout=60)

    async def main() -> bytes:
        return await asyncio.to_thread(work)

    assert asyncio.run(main()) == b"done"


def test_a_method_does_not_fetch_as_the_job_of_another_actor(client):
    worker = next(iter(workers_of(client)))
    with mission_control.job("actors one", transport="tcp"):
        one = client.submit(Keeper, actor=True, pure=False, workers=[worker]).result(timeout=60)
    with mission_control.job("actors two", transport="tcp"):
        two = client.submit(Keeper, actor=True, pure=False, workers=[worker]).result(timeout=60)
    with pytest.raises(RuntimeError, match=r"Keeper of several jobs.*its own class"):
        one.fetch().result()
    del two
