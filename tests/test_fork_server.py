"""The fork server of the tests: its processes are like those that users start, only sooner."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

from tests import fork_server
from tests.conftest import installed


def surroundings() -> dict[str, Any]:
    server = os.getppid()
    threads = Path(f"/proc/{server}/task").iterdir()
    return {
        "server": server,
        "threads of the server": [Path(thread, "comm").read_text().strip() for thread in threads],
        "pid": os.getpid(),
        "folder": os.getcwd(),
        "variable": os.environ.get("MISSION_OF_A_TEST"),
        "dask": dask.config.get("of-a-test", None),
        "output": os.readlink("/proc/self/fd/1"),
        "imported": "pandas" in sys.modules,
    }


def test_a_worker_has_what_a_new_interpreter_would_have(tmp_path, monkeypatch):
    monkeypatch.setenv("MISSION_OF_A_TEST", "set")
    monkeypatch.setenv("DASK_OF_A_TEST", "7")
    monkeypatch.chdir(tmp_path)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        first, second = client.run(surroundings).values()
    assert first["pid"] != second["pid"] and first["server"] == second["server"] != os.getpid()
    # A thread that holds a lock while its process is forked would hold it for ever in the new process. The allocator of
    # Arrow has one, and stops it before each fork (pthread_atfork).
    assert [name for name in first["threads of the server"] if name != "jemalloc_bg_thd"] == ["python"]
    assert (first["variable"], first["dask"], first["folder"]) == ("set", 7, str(tmp_path))
    assert first["output"] == os.readlink("/proc/self/fd/1") and first["imported"]


def test_children_of_a_command_come_from_the_same_server(tmp_path):
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=start_another, args=(there,))
    process.start()
    own, of_child = here.recv()
    process.join(30)
    assert process.exitcode == 0 and own["server"] == of_child["server"] and own["pid"] != of_child["pid"]


def start_another(there: Any) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    child = context.Process(target=send_surroundings, args=(theirs,))
    child.start()
    there.send((surroundings(), ours.recv()))
    child.join(30)


def send_surroundings(there: Any) -> None:
    there.send(surroundings())


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(fork_server.subprocess.TimeoutExpired):
        fork_server.command(("serve", "--state", str(tmp_path)), timeout=3, env=dict(os.environ))


def test_workers_of_new_interpreters_carry_a_shuffle_too():
    """Users start workers so; other tests do not."""
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame({"key": range(1000), "value": 1})
    with fork_server.new_interpreters(), installed(n_workers=2) as cluster, Client(cluster) as client:
        parents = {own["server"] for own in client.run(surroundings).values()}
        shuffled = dd.from_pandas(frame, npartitions=4).shuffle("key", shuffle_method="p2p").compute()
    assert parents == {os.getpid()}
    pd.testing.assert_frame_equal(shuffled.sort_values("key"), frame)
