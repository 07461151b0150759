"""On a cluster that is already running: plug-ins by preload, as operators start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client

from tests.conftest import mission, status, until


@pytest.fixture
def running(tmp_path):
    """`dask scheduler` and two `dask worker`, with Mission Control by preload; the scheduler's address."""
    file = tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    local = ["--no-dashboard", "--preload", "mission_control.dask"]
    commands = [[*dask, "scheduler", "--port", "0", "--host", "127.0.0.1", "--scheduler-file", str(file), *local]]
    commands[0] += ["--mission-policy", "fair"]
    worker = ["worker", "--scheduler-file", str(file), "--nthreads", "1", "--local-directory", str(tmp_path / "spool")]
    commands += [[*dask, *worker, *local]] * 2
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    processes = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
    try:
        until(file.exists, "the scheduler is up", seconds=60)
        address = until(lambda: file.read_text() and json.loads(file.read_text())["address"], "its address is known")
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            until(lambda: len(status(client)["workers"]) == 2, "both data planes are up")
            assert status(client)["policy"] == "fair"
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=30)
        log.close()


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
