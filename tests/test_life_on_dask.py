"""Other events of tasks and workers in Dask: results are right, and nothing is left behind."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, Event, LocalCluster, wait

import mission_control
from mission_control import fetch, put
from mission_control.dask.scheduler import MissionControlScheduler
from mission_control.dask.worker import data_ports
from mission_control.workers import workers_of
from tests.conftest import data, resources, status, until, what_is_left
from tests.fork_server import new_interpreters

SIZE = 1 << 20


def made(seed: int) -> mission_control.Reference:
    return put([data(SIZE, seed), data(SIZE // 2, seed + 1)])


def digest(reference: mission_control.Reference) -> str:
    hashed = hashlib.sha256()
    for part in fetch(reference):
        hashed.update(part)
    return hashed.hexdigest()


def expected(seed: int) -> str:
    return hashlib.sha256(data(SIZE, seed).tobytes() + data(SIZE // 2, seed + 1).tobytes()).hexdigest()


def nothing_left(client: Client) -> bool:
    return not what_is_left(client, "objects", "copies", "live_bytes", "spooled_bytes")


@contextmanager
def cluster_of(workers: int, memory_limit: str = "1GiB") -> Iterator[tuple[LocalCluster, Client]]:
    """A cluster of the test's own, with Mission Control."""
    options = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": memory_limit}
    with LocalCluster(**options, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        yield cluster, client


def test_a_task_that_fails_after_it_put_is_tried_again(client, tmp_path):
    def fails_twice(seed: int) -> mission_control.Reference:
        reference = made(seed)
        tries = len(list(tmp_path.iterdir()))
        (tmp_path / str(tries)).touch()
        if tries < 2:
            raise OSError("not yet")
        return reference

    reference = client.submit(fails_twice, 1, retries=3, pure=False)
    # Each worker that runs it first imports this module, and with it Dask's data frames.
    assert client.submit(digest, reference, pure=False).result(timeout=180) == expected(1)
    assert sum(entry["objects"] for entry in resources(client).values()) == 1, "what failed tasks put is freed"
    del reference
    until(lambda: nothing_left(client), "nothing is left")


def test_futures_that_are_cancelled_while_their_tasks_fetch_leave_nothing(client):
    def fetches_for_long(reference: mission_control.Reference, number: int) -> str:
        Event("fetching").set()
        for _ in range(50):
            digest(reference)
        return digest(reference)

    references = client.map(made, range(4), pure=False)
    others = [
        client.submit(fetches_for_long, reference, number, pure=False) for number, reference in enumerate(references)
    ]
    assert Event("fetching").wait(30)
    client.cancel(others[:3], force=True)
    assert others[3].result(timeout=120) == expected(3)
    # The references are still valid for others.
    assert client.gather(client.map(digest, references, pure=False)) == [expected(seed) for seed in range(4)]
    Event("fetching").clear()
    del references, others
    until(lambda: nothing_left(client), "nothing is left", seconds=60)


def test_a_restarted_cluster_goes_on_and_knows_nothing_of_before():
    with cluster_of(2) as (_, client):
        references = client.map(made, range(4), pure=False)
        wait(references)
        client.restart(timeout=60)
        del references
        until(lambda: len(resources(client)) == 2 and nothing_left(client), "nothing is left", seconds=60)
        references = client.map(made, range(4), pure=False)
        assert client.gather(client.map(digest, references, pure=False)) == [expected(seed) for seed in range(4)]


def test_results_that_dask_spills_keep_their_references():
    """Results of a worker with little memory go to disk and come back; their objects stay meanwhile."""

    def heavy(seed: int) -> tuple[mission_control.Reference, np.ndarray]:
        return made(seed), np.full(30 << 20, seed % 256, np.uint8)

    def light(pair: tuple[mission_control.Reference, np.ndarray], seed: int) -> tuple[str, bool]:
        return digest(pair[0]), bool((pair[1] == seed % 256).all())

    with new_interpreters(), cluster_of(2, "400MiB") as (_, client):
        pairs = client.map(heavy, range(20), pure=False)
        wait(pairs)
        spilled = client.run(lambda dask_worker: len(dask_worker.data.disk) if hasattr(dask_worker.data, "disk") else 0)
        assert sum(spilled.values()) > 0, "Dask spilled something"
        results = client.gather([client.submit(light, pair, seed, pure=False) for seed, pair in enumerate(pairs)])
        assert results == [(expected(seed), True) for seed in range(20)]
        del pairs
        until(lambda: nothing_left(client), "nothing is left", seconds=60)


def test_dasks_own_shuffle_runs_beside_ours(client):
    frame = pd.DataFrame({"key": np.arange(60_000) % 997, "value": np.arange(60_000.0)})
    references = client.map(made, range(6), pure=False)
    digests = client.map(digest, references, pure=False)
    shuffled = dd.from_pandas(frame, npartitions=12).shuffle("key", shuffle_method="p2p")
    sums = shuffled.groupby("key").value.sum().compute()
    pd.testing.assert_series_equal(sums.sort_index(), frame.groupby("key").value.sum(), check_names=False)
    assert client.gather(digests) == [expected(seed) for seed in range(6)]
    del references, digests
    until(lambda: nothing_left(client), "nothing is left")


@pytest.mark.parametrize("away", ["scale", "kill"])
def test_objects_of_workers_that_go_are_made_again(away):
    """Adaptive deployments remove workers in the middle of jobs, and add others."""
    with cluster_of(3) as (cluster, client):
        references = client.map(made, range(9), pure=False)
        wait(references)
        if away == "scale":
            cluster.scale(1)
            until(lambda: len(workers_of(client)) == 1, "two workers are gone", seconds=60)
        else:
            os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        results = client.map(digest, references, pure=False)
        cluster.scale(3)
        assert client.gather(results) == [expected(seed) for seed in range(9)]
        del references, results
        until(lambda: nothing_left(client), "nothing is left", seconds=60)


def busy(number: int) -> int:
    time.sleep(0.3)
    return number


def test_objects_outlive_what_an_adaptive_cluster_takes_away():
    with cluster_of(1) as (cluster, client):
        cluster.adapt(minimum=1, maximum=3, interval="100ms", wait_count=5, target_duration="1s")
        work = client.map(busy, range(60), pure=False)
        until(lambda: len(client.scheduler_info(-1)["workers"]) == 3, "it has grown", seconds=60)
        references = client.map(made, range(9), pure=False)
        wait([*work, *references])
        until(lambda: len(client.scheduler_info(-1)["workers"]) == 1, "it has shrunk", seconds=60)
        assert client.gather(client.map(digest, references, pure=False)) == [expected(seed) for seed in range(9)]
        del references, work
        until(lambda: nothing_left(client), "nothing is left", seconds=60)


def test_data_is_served_at_the_ports_of_the_configuration():
    """A firewall may allow only these ports; without a free one a worker has no data plane, and reports why."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        taken, free = (server.getsockname()[1] for server in servers)
        servers[1].close()
        stack.enter_context(dask.config.set({"mission-control.port": [taken, free]}))
        _, client = stack.enter_context(cluster_of(1))
        (worker,) = status(client)["workers"].values()
        assert worker["address"] == f"127.0.0.1:{free}"
        reference = client.submit(made, 1)
        assert client.submit(digest, reference).result() == expected(1)
        client.cluster.scale(2)
        client.wait_for_workers(2)
        (why,) = until(lambda: status(client)["without"], "the scheduler hears of it").values()
        assert f"{free} at 127.0.0.1 is free" in why and "\n" not in why, why


@pytest.mark.parametrize(("given", "ports"), [(9900, [9900]), ("9900", [9900]), ("9900:9902", [9900, 9901, 9902])])
def test_ports_are_one_or_a_range(given, ports):
    with dask.config.set({"mission-control.port": given}):
        assert data_ports() == ports


@pytest.mark.parametrize("port", ["soon", 70000, -1, "9:8", [], 1.5j])
def test_ports_that_make_no_sense_are_refused_in_one_line(port):
    with dask.config.set({"mission-control.port": port}), pytest.raises(ValueError, match=r"give a port, or a range"):
        data_ports()


@pytest.mark.parametrize("blocked", [[], ["run_function"]])
def test_install_adds_what_is_missing_and_knows_what_is_there(blocked):
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "1GiB", "dashboard_address": ":0"}
    with (
        dask.config.set({"distributed.scheduler.blocked-handlers": blocked}),
        LocalCluster(**options) as cluster,
        Client(cluster) as client,
    ):
        assert not mission_control.jobs.installed(client)
        # As with a preloaded scheduler whose workers were not preloaded.
        client.register_plugin(MissionControlScheduler())
        assert mission_control.jobs.installed(client)
        if blocked:
            # Such a scheduler does not report which workers have joined.
            return
        mission_control.install(client)
        mission_control.install(client)
        reference = client.submit(made, 3, pure=False)
        assert client.submit(digest, reference, pure=False).result(timeout=60) == expected(3)
        # `install` does not wait for workers that are there already.
        until(lambda: len(status(client)["workers"]) == 2, "both workers have joined")


def test_flows_per_host_are_applied_or_refused(client):
    has = status(client)["flows_per_host"]
    mission_control.install(client, flows_per_host=has)
    with pytest.raises(ValueError, match=f"has Mission Control with {has} already"):
        mission_control.install(client, flows_per_host=has + 1)
    for wrong in (0, "many", -1, 1.5, 10**12, "10"):
        with pytest.raises(ValueError, match=r"^.+ flows per host"):
            mission_control.install(client, flows_per_host=wrong)
    assert status(client)["flows_per_host"] == has


def test_what_is_no_client_is_said(client):
    with pytest.raises(TypeError, match="give a client of Dask"), mission_control.job("a", client="tcp://127.0.0.1:1"):
        pass
    with pytest.raises(TypeError, match="give a client of Dask"):
        mission_control.install(None)
    with Client(client.scheduler.address, set_as_default=False) as other:
        pass
    with pytest.raises(RuntimeError, match="was closed"), mission_control.job("a", client=other):
        pass
