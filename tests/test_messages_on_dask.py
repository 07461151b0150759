"""``mission://`` in whole clusters: gather and scatter, the job of messages, and workers that die or pause."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, Scheduler, Security, Worker, wait
from distributed.core import Status

import mission_control
from mission_control.dask import comm
from mission_control.dask.seams.messages import transfer_of
from mission_control.workers import workers_of
from tests.conftest import resources, status, until


@contextmanager
def cluster(**options: Any) -> Iterator[tuple[LocalCluster, Client]]:
    options = {"n_workers": 2, "threads_per_worker": 2, "dashboard_address": ":0", "memory_limit": "2GiB"} | options
    with LocalCluster(protocol="mission://", **options) as own, Client(own) as client:
        mission_control.install(client)
        yield own, client


def make(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 40, (1000, 1000))


def total(arrays: list[np.ndarray]) -> int:
    """Integers, because a sum of floats depends on their order in memory."""
    return int(sum(array.sum() for array in arrays))


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_program_gathers_over_the_data_plane_under_its_job(encrypted):
    security = Security.temporary() if encrypted else None
    with cluster(security=security) as (own, client):
        assert own.scheduler_address.startswith("mission://")
        one, two = workers_of(client)
        with mission_control.job("report", client=client):
            arrays = client.map(make, range(8), workers=[one])
            wait(arrays)
            got = client.submit(total, arrays, workers=[two]).result()
            assert got == total([make(seed) for seed in range(8)])
            (transfer,) = until(lambda: gathered(client, "report"), "it is reported")
            assert transfer["from"] == "make"
            transports = {name for name, carried in transfer["transport"]["bytes"].items() if carried}
            assert transports == ({"tls"} if encrypted else {"shm"}), transfer
            del arrays
            until(lambda: not any(own["objects"] for own in resources(client).values()), "frames are freed")


def test_results_scattered_gathered_and_computed_are_right():
    with cluster(n_workers=3) as (_, client):
        arrays = [make(seed) for seed in range(6)]
        scattered = client.scatter(arrays, broadcast=True)
        assert all(map(np.array_equal, client.gather(scattered), arrays))
        assert all(
            map(np.array_equal, client.gather(client.map(lambda own: own + 1, scattered)), [a + 1 for a in arrays])
        )
        x = da.random.default_rng(1).random((4000, 4000), chunks=(500, 4000))
        transposed = (x + x.T).rechunk((4000, 500), method="tasks").sum(axis=0)
        wanted = client.compute(transposed).result()
        values = client.compute(x).result()
        assert np.allclose(wanted, (values + values.T).sum(axis=0))


def test_workers_that_share_a_process_use_their_own_data_planes_also_those_that_come_later():
    options = {"threads_per_worker": 1, "memory_limit": "1GiB", "dashboard_address": ":0"}
    with (
        LocalCluster(n_workers=2, processes=False, protocol="mission://", **options) as own,
        Client(own) as client,
        mission_control.job("shared", transport="tcp", client=client),
    ):
        mission_control.install(client)
        own.scale(4)
        client.wait_for_workers(4)
        until(lambda: len(status(client)["workers"]) == 4, "all have a data plane")
        workers = list(workers_of(client))
        values = [client.submit(make, seed, workers=[worker], pure=False) for seed, worker in enumerate(workers)]
        # New connections of the scheduler.
        assert len(client.run(lambda: 1)) == 4
        for worker in workers:
            gathered = client.submit(list, values, workers=[worker], pure=False).result()
            assert all(map(np.array_equal, gathered, [make(seed) for seed in range(4)]))

        def moved(dask_worker: Worker) -> tuple[int, int]:
            all = json.loads(dask_worker.plugins["mission-control"].endpoint.transfers())
            # A worker that answers from a copy does not know the job of the result.
            own = [own for own in all if (own["from"], own["to"]) == ("make", "gather")]
            assert own and {one["job"] for one in own} <= {"shared", "unnamed"}, own
            return sum(one["asked_bytes"] for one in own), sum(one["served_bytes"] for one in own)

        # Dask may drop one of several copies, so a worker may have to fetch its own result, too.
        assert all(asked == served >= 3 * make(0).nbytes for asked, served in client.run(moved).values())


def test_a_worker_that_dies_while_others_fetch_from_it_is_made_up_for():
    with cluster(n_workers=3, threads_per_worker=1) as (_, client):
        one, two, three = workers_of(client)
        arrays = client.map(make, range(24), workers=[one, three], allow_other_workers=True)
        wait(arrays)
        pid = client.run(os.getpid, workers=[one])[one]
        result = client.submit(total, arrays, workers=[two], pure=False)
        os.kill(pid, signal.SIGKILL)
        assert result.result(timeout=120) == total([make(seed) for seed in range(24)])


def test_a_worker_that_pauses_delays_and_loses_nothing():
    with cluster(threads_per_worker=1) as (_, client):
        one, two = workers_of(client)
        arrays = client.map(make, range(8), workers=[one])
        wait(arrays)
        pid = client.run(os.getpid, workers=[one])[one]
        os.kill(pid, signal.SIGSTOP)
        try:
            result = client.submit(total, arrays, workers=[two], pure=False)
            with pytest.raises(TimeoutError):
                result.result(timeout=4)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert result.result(timeout=120) == total([make(seed) for seed in range(8)])


def test_a_scheduler_speaks_both_protocols_at_once():
    async def both() -> None:
        async with Scheduler(
            host="127.0.0.1", protocol=["mission://", "tcp://"], port=[0, 0], dashboard_address=":0"
        ) as scheduler:
            mission, tcp = scheduler.listeners[0].contact_address, scheduler.listeners[1].contact_address
            assert mission.startswith("mission://") and tcp.startswith("tcp://")
            async with (
                Worker(mission, host="127.0.0.1") as one,
                Worker(mission, host="127.0.0.1") as two,
                Client(tcp, asynchronous=True) as client,
            ):
                assert one.status == two.status == Status.running and one.address.startswith("mission://")
                arrays = client.map(make, range(4), workers=[one.address])
                got = await client.submit(total, arrays, workers=[two.address])
                assert got == total([make(seed) for seed in range(4)])

    asyncio.run(both())


@pytest.mark.parametrize("first", ["plain", "secret"])
def test_results_of_several_jobs_are_encrypted_where_one_demands_it(first):
    with cluster(threads_per_worker=1) as (_, client):
        one, two = workers_of(client)
        arrays = {}
        with mission_control.job("plain", client=client):
            arrays["plain"] = client.map(make, range(4), workers=[one])
            wait(arrays["plain"])
            with mission_control.job("secret", client=client, encrypt="opportunistic"):
                arrays["secret"] = client.map(make, range(4, 8), workers=[one], pure=False)
                wait(arrays["secret"])
                other = next(name for name in arrays if name != first)
                got = client.submit(total, [*arrays[first], *arrays[other]], workers=[two], pure=False)
                assert got.result(timeout=60) == total([make(seed) for seed in range(8)])


def test_a_result_that_is_passed_on_still_belongs_to_its_job():
    with cluster(n_workers=3, threads_per_worker=1) as (_, client):
        one, two, _ = workers_of(client)
        with mission_control.job("secret", client=client, encrypt="opportunistic"):
            arrays = client.map(make, range(4), workers=[one], pure=False)
            expected = total([make(seed) for seed in range(4)])
            assert client.submit(total, arrays, workers=[two], pure=False).result(timeout=60) == expected

            def jobs(dask_worker: Any) -> set[str]:
                return {transfer_of(dask_worker, [own.key]).job for own in arrays}

            assert client.run(jobs, workers=[two])[two] == {"secret"}, "whoever asks this worker for them"


def sum_of(array: np.ndarray) -> int:
    return int(array.sum())


@pytest.mark.parametrize("rows", [10, 1000])
def test_what_demands_encryption_never_leaves_in_the_clear_whatever_its_size(rows):
    def small(seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 1 << 40, (rows, 100))

    with cluster(n_workers=3, threads_per_worker=1) as (_, client):
        one, two, three = workers_of(client)
        with mission_control.job("secret", client=client, encrypt="opportunistic"):
            made = client.submit(small, 7, workers=[one], pure=False)
            assert client.submit(sum_of, made, workers=[two], pure=False).result(timeout=60) == int(small(7).sum())
            (transfer,) = until(lambda: gathered(client, "secret"), "it is reported")
            assert set(transfer["transport"]["bytes"]) == {"tls"}, transfer
        # A copy that Dask makes for itself, without a task of the job; and then a job that demands nothing.
        client.amm.stop()  # may drop it at any time
        client.replicate([made], workers=[three])
        whose = client.run(lambda dask_worker: transfer_of(dask_worker, [made.key]).demands, workers=[three])
        assert whose[three]["encrypt"] == "opportunistic"


def test_a_worker_that_cannot_reach_the_data_plane_gets_nothing_secret_in_the_clear():
    def reaches_nobody(dask_worker: Any) -> None:
        dask_worker.announced = comm.PLANES.announced
        comm.PLANES.announced = lambda: {}
        dask_worker.rpc.collect()

    def reaches_all_again(dask_worker: Any) -> None:
        comm.PLANES.announced = dask_worker.announced
        dask_worker.rpc.collect()

    with cluster(threads_per_worker=1) as (_, client):
        one, two = workers_of(client)
        client.run(reaches_nobody, workers=[two])
        with mission_control.job("plain", client=client):
            made = client.submit(make, 8, workers=[one], pure=False)
            assert client.submit(sum_of, made, workers=[two], pure=False).result(timeout=60) == int(make(8).sum())
        with mission_control.job("secret", client=client, encrypt="opportunistic"):
            made = client.submit(make, 7, workers=[one], pure=False)
            wait(made)
            # A client's gathers are Dask's own messages.
            assert (made.result(timeout=60) == make(7)).all()
            needed = client.submit(sum_of, made, workers=[two], pure=False)

            key = needed.key

            def refused(dask_worker: Any) -> bool:
                asked = [own for own in dask_worker.state.log if own[0] == "gather-dep-failed"]
                return bool(asked) and key in dask_worker.state.tasks

            until(lambda: client.run(refused, workers=[two])[two], "the other worker was refused")
            assert not needed.done()
            client.run(reaches_all_again, workers=[two])
            assert needed.result(timeout=60) == int(make(7).sum())
            (transfer,) = until(lambda: gathered(client, "secret"), "it is reported")
            assert set(transfer["transport"]["bytes"]) == {"tls"}, transfer


def gathered(client: Client, name: str) -> list[dict[str, Any]]:
    """Return the transfers between workers of a job.

    A transfer is known before its reader has reported, and has no bytes then.
    """
    transfers = [own for job in status(client)["jobs"] if job["job"] == name for own in job["transfers"]]
    return [own for own in transfers if own["to"] == "gather" and any(own["transport"]["bytes"].values())]


def test_a_worker_announces_the_address_on_the_network_of_its_scheduler_as_with_tcp():
    async def addresses() -> dict[str, tuple[str, str]]:
        found = {}
        for protocol in ("tcp", "mission"):
            async with (
                Scheduler(protocol=protocol, host="127.0.0.1", port=0, dashboard_address=":0") as scheduler,
                Worker(scheduler.address) as worker,
            ):
                found[protocol] = (worker.ip, worker.listeners[0].bound_address[0])
        return found

    found = asyncio.run(addresses())
    assert found["mission"] == found["tcp"]
    assert found["mission"][0] == "127.0.0.1"


def test_a_second_address_in_the_clear_is_no_encrypted_channel():
    async def start() -> None:
        security = Security.temporary()
        # As with certificates in Dask's configuration.
        security.require_encryption = False
        async with Scheduler(
            protocol=["mission://", "tcp://"], security=security, dashboard_address=":0", host="127.0.0.1"
        ) as one:
            assert not comm.is_encrypted(one, "scheduler")
        async with Scheduler(protocol="mission://", security=security, dashboard_address=":0", host="127.0.0.1") as one:
            assert comm.is_encrypted(one, "scheduler")

    asyncio.run(start())


def test_dask_still_sees_what_its_requests_for_results_take():
    with cluster(n_workers=1) as (_, client):

        def parameters(dask_worker: Any) -> list[str]:
            return list(inspect.signature(dask_worker.handlers["get_data"]).parameters)

        (found,) = client.run(parameters).values()
        assert found == ["comm", "keys", "who", "serializers"]


def test_commands_start_a_cluster_that_speaks_it(tmp_path):
    """`dask scheduler --protocol mission://` and `dask worker`, each with `--preload mission_control.dask`."""
    common = ["--preload", "mission_control.dask", "--no-dashboard"]
    dask = [sys.executable, "-m", "dask"]
    file = tmp_path / "scheduler.json"
    scheduler = f"scheduler --protocol mission:// --host 127.0.0.1 --port 0 --scheduler-file {file}".split()
    worker = f"worker --scheduler-file {file} --nworkers 2 --nthreads 1 --host 127.0.0.1".split()
    with ExitStack() as stack:
        for words in (scheduler, worker):
            process = subprocess.Popen([*dask, *words, *common], cwd=tmp_path, stderr=subprocess.DEVNULL)
            stack.enter_context(process)
            stack.callback(process.terminate)
            until(file.exists, "the scheduler is up")
        with Client(scheduler_file=str(file)) as client:
            client.wait_for_workers(2, timeout=60)
            one, two = workers_of(client)
            assert client.scheduler.address.startswith("mission://") and one.startswith("mission://")
            with mission_control.job("commands", client=client):
                arrays = client.map(make, range(4), workers=[one])
                got = client.submit(total, arrays, workers=[two]).result(timeout=60)
                assert got == total([make(seed) for seed in range(4)])
                until(lambda: gathered(client, "commands"), "the data plane carried them")


@pytest.mark.parametrize("dtype", ["c8", ">f4", "U2"])
def test_results_of_every_type_of_array_arrive(dtype):
    with cluster(threads_per_worker=1) as (_, client):
        one, two = workers_of(client)
        ones = client.submit(np.ones, 1 << 20, dtype, workers=[one], pure=False)
        counted = client.submit(lambda own: (str(own.dtype), int((own == own[0]).sum())), ones, workers=[two])
        assert counted.result(timeout=60) == (str(np.dtype(dtype)), 1 << 20)
