"""An object lives as long as a result carries a reference to it, at any depth in the result."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client, Event, LocalCluster, Security, Variable, get_client, rejoin, secede, wait, worker_client

import mission_control
from mission_control import fetch, put
from mission_control.objects import references_in
from mission_control.workers import workers_of
from tests.conftest import mission, resources, status, until

COUNT = 8


def content(seed: int) -> bytes:
    return bytes([seed, seed + 1]) * 50_000


def in_an_object_array(seed: int) -> np.ndarray:
    array = np.empty(2, object)
    array[:] = [None, put([content(seed)])]
    return array


def in_a_series(seed: int) -> pd.Series:
    return pd.Series([1, put([content(seed)])], dtype=object)


def in_a_closure(seed: int) -> Any:
    reference = put([content(seed)])
    return lambda: reference


def one_of_two_equal_ones(seed: int) -> mission_control.Reference:
    """The first of two equal references dies before the result is searched."""
    reference = put([content(seed)])
    copy = mission_control.Reference(*reference.__reduce__()[1])
    del reference
    gc.collect()
    return copy


def take(value: Any) -> bytes:
    if isinstance(value, mission_control.Reference):
        return bytes(fetch(value)[0])
    if callable(value):
        return bytes(fetch(value())[0])
    return bytes(fetch([item for item in value if isinstance(item, mission_control.Reference)])[0])


@pytest.mark.parametrize("produce", [in_an_object_array, in_a_series, in_a_closure, one_of_two_equal_ones])
def test_a_reference_is_found_wherever_it_hides(client, produce):
    with mission_control.job("hidden"):
        made = client.map(produce, range(COUNT), pure=False)
        wait(made)
        time.sleep(0.5)
        assert client.gather(client.map(take, made, pure=False)) == [content(seed) for seed in range(COUNT)]
    del made
    until(lambda: not any(own["objects"] for own in resources(client).values()), "all of them are freed")


def child(seed: int) -> mission_control.Reference:
    return put([content(seed)])


def with_worker_client(seed: int) -> mission_control.Reference:
    with worker_client() as client:
        return client.submit(child, seed, pure=False).result()


def with_get_client(seed: int) -> list[mission_control.Reference]:
    future = get_client().submit(child, seed, pure=False)
    secede()  # otherwise the children would wait for threads that wait for them
    reference = future.result()
    rejoin()
    return [reference]


@pytest.mark.parametrize("parent", [with_worker_client, with_get_client])
def test_a_reference_of_a_task_that_a_task_submitted_can_be_handed_on(client, parent):
    with mission_control.job("parents"):
        made = client.map(parent, range(COUNT), pure=False)
        wait(made)
        time.sleep(0.5)
        assert client.gather(client.map(take, made, pure=False)) == [content(seed) for seed in range(COUNT)]
    del made
    until(lambda: not any(own["objects"] for own in resources(client).values()), "all of them are freed")


def made_up(name: Any, owner: Any) -> mission_control.Reference:
    return mission_control.Reference(name, owner, "127.0.0.1:1", "job", "stage", [1])


@pytest.mark.parametrize(
    ("name", "owner"), [("hello", "tcp://127.0.0.1:1"), (5, "tcp://127.0.0.1:1"), ("0" * 32, ["not", "an", "address"])]
)
def test_a_reference_that_somebody_made_up_harms_nobody(client, name, owner):
    processes = client.run(os.getpid)
    made = client.submit(made_up, name, owner, pure=False)
    assert made.result(timeout=30).object == name
    del made
    # If a part of a message is invalid, the rest of it is still carried out.
    kept = client.submit(child, 8, pure=False)
    wait(kept)

    def say_nonsense(dask_scheduler: Any) -> None:
        own = dask_scheduler.plugins["mission-control"]
        tell = own.tell
        own.tell = lambda worker, version, message: tell(
            worker, version, {**message, "free": ["hello"], "lost": ["hello"]}
        )
        own.event("admit", spec={"job": "nonsense"}, client="nobody")
        own.event("client-gone", client="nobody")
        own.tell = tell

    client.run_on_scheduler(say_nonsense)
    time.sleep(1)
    assert client.run(os.getpid) == processes
    assert client.submit(take, kept, pure=False).result(timeout=60) == content(8)


class Unsendable:
    """An object that cannot leave its process, because a lock cannot be pickled."""

    def __init__(self, table: Any):
        self.lock, self.table = threading.Lock(), table


@pytest.mark.parametrize("produce", [in_an_object_array, in_a_series])
def test_a_reference_is_found_in_what_cannot_be_sent(client, produce):
    one = next(iter(workers_of(client)))
    with mission_control.job("unsendable"):
        made = client.submit(lambda: Unsendable(produce(3)), pure=False, workers=[one])
        wait(made)
        time.sleep(0.5)
        taken = client.submit(lambda held: take(held.table), made, pure=False, workers=[one])
        assert taken.result(timeout=60) == content(3)


def test_references_are_found_in_many_arrays_of_records():
    made = [made_up(f"{number:032x}", "tcp://127.0.0.1:1") for number in range(40)]
    arrays = [np.array([(reference, 1)], dtype=[("reference", object), ("number", int)]) for reference in made]
    assert {found.object for found in references_in([threading.Lock(), *arrays])} == {own.object for own in made}


def asks_for_a_child(name: str, seed: int) -> mission_control.Reference:
    """Several of these request the same child; each continues on a signal."""
    with worker_client() as client:
        future = client.submit(child, seed)
        reference = future.result()
        Event(f"{name}-has-it", client=client).set()
        Event(f"{name}-goes-on", client=client).wait(60)
        del future
        time.sleep(0.5)  # nobody wants the child any more
    return reference


@pytest.mark.parametrize("together", [True, False])
def test_a_child_that_several_tasks_asked_for_lives_until_the_last_of_them_is_done(client, together):
    workers = sorted(workers_of(client))
    with mission_control.job("equal-calls"):
        first = client.submit(asks_for_a_child, "first", 40 + together, workers=workers[:1])
        assert Event("first-has-it", client=client).wait(60)
        second = client.submit(asks_for_a_child, "second", 40 + together, workers=workers[: 1 if together else 2][-1:])
        assert Event("second-has-it", client=client).wait(60)
        Event("first-goes-on", client=client).set()
        wait(first)
        del first
        time.sleep(0.5)
        # It returns the child's result after all others have released it.
        Event("second-goes-on", client=client).set()
        wait(second)
        time.sleep(0.5)
        assert client.submit(take, second, pure=False).result(timeout=60) == content(40 + together)
    for name in ("first", "second"):
        Event(f"{name}-has-it", client=client).clear()
        Event(f"{name}-goes-on", client=client).clear()


async def hands_on(reference: mission_control.Reference) -> tuple[bytes, mission_control.Reference]:
    return bytes(1 << 20), reference


def test_what_a_coroutine_hands_on_is_kept(client):
    with mission_control.job("coroutine"):
        made = client.submit(child, 9, pure=False)
        handed = client.submit(hands_on, made, pure=False)
        wait(handed)
        del made
        time.sleep(0.5)
        assert client.submit(lambda pair: take(pair[1]), handed, pure=False).result(timeout=60) == content(9)


class Expensive:
    """A result that records when it was searched."""

    def __reduce__(self) -> Any:
        Path("/tmp/mission-test-looked-at").touch()
        return Expensive, ()


def expensive() -> Expensive:
    return Expensive()


def seen(value: Any) -> bool:
    return isinstance(value, Expensive)


def test_results_are_not_looked_at_where_no_reference_lives(client):
    mark = Path("/tmp/mission-test-looked-at")
    mark.unlink(missing_ok=True)
    one = next(iter(workers_of(client)))
    with mission_control.job("without-references"):
        made = client.submit(expensive, pure=False, workers=[one])
        wait(made)
        time.sleep(0.3)
        assert not mark.exists()
        assert client.submit(seen, made, workers=[one]).result()


def passed_on(reference: mission_control.Reference) -> mission_control.Reference:
    return reference


def gives(reference: mission_control.Reference) -> Any:
    return lambda: reference


def from_variable() -> mission_control.Reference:
    return Variable("reference").get(timeout=10)


@pytest.mark.parametrize("way", ["argument", "closure", "variable"])
def test_another_jobs_reference_can_be_handed_on(client, way):
    with mission_control.job("makes"):
        made = client.submit(child, 7, pure=False)
        reference = made.result()
        Variable("reference").set(reference)
    with mission_control.job("hands-on"):
        if way == "argument":
            handed = client.submit(passed_on, reference, pure=False)
        elif way == "closure":
            handed = client.submit(gives(reference), pure=False)
        else:
            handed = client.submit(from_variable, pure=False)
        wait(handed)
        Variable("reference").delete()
        del made, reference
        time.sleep(0.5)  # the first job's result is freed
        assert client.submit(take, handed, pure=False).result(timeout=60) == content(7)


def forks(seed: int) -> tuple[mission_control.Reference, str]:
    """Put in a forked process, which has the worker's memory, but no threads of the data plane."""
    reference, (reads, writes) = put([content(seed)]), os.pipe()
    if (pid := os.fork()) == 0:
        try:
            put([b"another"])
        except RuntimeError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writes)
    with os.fdopen(reads) as said:
        return reference, said.read()


def test_a_process_that_a_task_forked_is_refused(client):
    made = client.submit(forks, 3, pure=False)
    reference, said = made.result(timeout=60)
    assert "forked" in said
    assert client.submit(take, reference, pure=False).result() == content(3)


@pytest.mark.parametrize("part", [np.int64(0), np.uint8(0), False])
def test_numbers_of_parts_may_be_numpys(client, part):
    workers = sorted(workers_of(client))
    made = client.submit(child, 5, pure=False)
    assert client.submit(lambda held: bytes(fetch(held, part=part)[0]), made, pure=False).result() == content(5)
    time.sleep(0.5)  # a report goes out
    assert sorted(workers_of(client)) == workers
    with pytest.raises(TypeError, match="is no number of a part"):
        client.submit(lambda held: fetch(held, part="0"), made, pure=False).result()


def certificates(folder: Path) -> Security:
    """A cluster's certificates as Dask takes them: the worker's is of X.509 version 1."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "own.csr", "-subj", "/CN=localhost")
    openssl("x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", "own.pem")
    paths = {"cert": str(folder / "own.pem"), "key": str(folder / "key.pem")}
    roles = {f"tls_{role}_{kind}": path for role in ("client", "scheduler", "worker") for kind, path in paths.items()}
    return Security(tls_ca_file=str(folder / "ca.pem"), require_encryption=True, **roles)


def test_certificates_that_only_dask_takes_stop_no_worker(tmp_path):
    security = certificates(tmp_path)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, security=security, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        mission_control.install(client)
        with mission_control.job("plain", client=client):
            made = client.submit(child, 3, pure=False)
            assert client.submit(take, made).result() == content(3)
        problems = [own["problems"] for own in until(lambda: status(client)["workers"], "workers").values()]
        assert all("certificates" in problem for (problem,) in problems), problems
        with (
            pytest.raises(mission_control.JobRejected, match="the job demands encryption"),
            mission_control.job("secret", encrypt=True, client=client),
        ):
            pass


def test_a_worker_that_fails_after_it_joined_is_not_counted_on():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        plugin = cluster.scheduler.plugins["mission-control"]
        until(lambda: len(status(client)["workers"]) == 2, "both joined")
        failed, sound = sorted(status(client)["workers"])
        client.sync(plugin.on_without, failed, "it broke")
        assert set(status(client)["workers"]) == {sound} and status(client)["without"] == {failed: "it broke"}
        for number in range(3):
            with mission_control.job(f"job{number}", client=client):
                assert client.submit(sum, [1, 2], pure=False).result() == 3
        told = [record for record in plugin.log.since(0)[1] if record["kind"] == "worker-left"]
        assert [record["worker"] for record in told] == [failed] and set(status(client)["workers"]) == {sound}


def test_bad_settings_of_the_data_plane_stop_no_worker(monkeypatch):
    monkeypatch.setenv("MISSION_LINK_RATE", "fast")
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:
        monkeypatch.delenv("MISSION_LINK_RATE")
        with Client(cluster) as client:
            mission_control.install(client)
            assert client.submit(sum, [1, 2]).result() == 3
            with mission_control.job("cannot"), pytest.raises(RuntimeError, match=r"no data plane.*MISSION_LINK_RATE"):
                client.submit(child, 1, pure=False).result()
            refused = pytest.raises(mission_control.JobRejected, match=r"no worker has a data plane.*MISSION_LINK_RATE")
            with refused, mission_control.job("demands", transport="tcp"):
                pass
            (why,) = status(client)["without"].values()
            assert "MISSION_LINK_RATE" in why
            shown = mission("jobs", "--scheduler", cluster.scheduler_address)
            assert "no data plane" in shown.stdout, shown.stdout + shown.stderr
