"""On a running cluster: plug-ins by preload, as operators start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import mission_control
from tests.conftest import mission, status, until


@contextmanager
def preloaded(tmp_path: Path, environment: dict[str, str]) -> Iterator[str]:
    """`dask scheduler`, in this environment, and two `dask worker`, with Mission Control by preload; its address."""
    file = tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    local = ["--no-dashboard", "--preload", "mission_control.dask"]
    commands = [[*dask, "scheduler", "--port", "0", "--host", "127.0.0.1", "--scheduler-file", str(file), *local]]
    commands[0] += ["--mission-policy", "fair"]
    worker = ["worker", "--scheduler-file", str(file), "--nthreads", "1", "--local-directory", str(tmp_path / "spool")]
    commands += [[*dask, *worker, *local]] * 2
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    environments = [{**os.environ, **environment}, None, None]
    processes = [
        subprocess.Popen(command, stdout=log, stderr=log, env=own)
        for command, own in zip(commands, environments, strict=True)
    ]
    try:
        until(file.exists, "the scheduler is up", seconds=60)
        address = until(lambda: file.read_text() and json.loads(file.read_text())["address"], "its address is known")
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
        log.close()


@pytest.fixture
def running(tmp_path):
    with preloaded(tmp_path, {}) as address:
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            until(lambda: len(status(client)["workers"]) == 2, "both data planes are up")
            assert status(client)["policy"] == "fair"
        yield address


def test_bad_settings_stop_no_scheduler(tmp_path):
    with (
        preloaded(tmp_path, {"MISSION_LINK_RATE": "fast"}) as address,
        Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        log = (tmp_path / "log").read_text()
        assert "This scheduler runs no Mission Control: " in log and "MISSION_LINK_RATE" in log
        assert "NoMissionController: its scheduler runs none" in log, log


def test_an_unchanged_program_is_carried_and_explained(tmp_path):
    """Dask starts the plug-ins of a scheduler after its preloads have started them."""
    with preloaded(tmp_path, {}) as address, Client(address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
        until(lambda: len(status(client)["workers"]) == 2, "both data planes are up")
        frame = pd.DataFrame({"key": np.arange(2500) % 50, "number": np.arange(2500)})
        with dask.config.set({"dataframe.shuffle.method": "p2p"}):
            joined = dd.from_pandas(frame, npartitions=4).shuffle("key").persist(scheduler=client.get)
        got = client.gather(client.compute(joined)).sort_values("number")
        pd.testing.assert_frame_equal(got, frame)
        (shuffle,) = [own for job in status(client)["jobs"] for own in job["shuffles"]]
        assert (shuffle["engine"], shuffle["runs"], shuffle["rows_in"]) == ("mission", 1, 2500), shuffle
        assert "as Mission Control knows it" not in (tmp_path / "log").read_text()


def test_sort_runs_on_a_cluster_that_is_running(running, tmp_path):
    words = ["run", "sort", "--size", "16MiB", "--partitions", "4", "--scheduler", running, "--json"]
    done = mission(*words, "--results", str(tmp_path / "results"), "--data", str(tmp_path / "data"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] and result["world"] == "cluster"
    assert not list(Path(tmp_path / "data").rglob("input-*")), "its data is removed"
    refused = mission(
        "run", "sort", "--size", "16MiB", "--scheduler", running, "--encrypt", "--results", str(tmp_path / "r")
    )
    assert refused.returncode == 4 and "TLS" in refused.stderr


def test_a_cluster_without_mission_control_gets_it_only_if_told(tmp_path):
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        words = ["run", "sort", "--size", "8MiB", "--partitions", "4", "--scheduler", cluster.scheduler_address]
        words += ["--results", str(tmp_path), "--json"]
        refused = mission(*words)
        assert refused.returncode == 2 and "--install-policy installs it" in refused.stderr, refused.stderr
        assert not mission_control.jobs.installed(client) and not list(tmp_path.iterdir())
        done = mission(*words, "--install-policy")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "and stays" in json.loads(done.stdout)["notes"][0] and mission_control.jobs.installed(client)


def test_a_worker_that_is_started_before_its_scheduler_has_a_data_plane(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dask = [sys.executable, "-m", "dask"]
    local = ["--no-dashboard", "--preload", "mission_control.dask"]
    worker = ["worker", f"tcp://127.0.0.1:{port}", "--no-nanny", "--local-directory", str(tmp_path / "spool")]
    scheduler = ["scheduler", "--port", str(port), "--host", "127.0.0.1"]
    impatient = {**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}
    with open(tmp_path / "log", "w") as log, ExitStack() as stack:

        def start(command: list[str]) -> None:
            process = subprocess.Popen([*dask, *command, *local], stdout=log, stderr=log, env=impatient)
            stack.callback(process.wait, timeout=30)
            stack.callback(process.terminate)

        start(worker)
        waits = "waits for the scheduler"
        until(lambda: waits in (tmp_path / "log").read_text(), "the worker has found no scheduler", seconds=60)
        start(scheduler)
        with Client(f"tcp://127.0.0.1:{port}", timeout=60, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=60)
            until(lambda: len(status(client)["workers"]) == 1, "its data plane is up")
