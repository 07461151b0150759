"""The control service with real Dask clusters: they join it, share their host by its weights, and go on without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import mission_control
from mission_control import _native
from mission_control.bench.service import free_ports, in_etcd
from mission_control.errors import BadInput
from mission_control.service import serving
from mission_control.service.asking import Asking
from mission_control.service.membership import CLUSTER, SERVICE, TOKEN_FILE, Service
from mission_control.workers import workers_of
from tests.conftest import mission

WAIT_S = 60


def wait_for(what: str, found: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (got := found()):
        assert time.monotonic() < end, f"not within {WAIT_S} s: {what}"
        time.sleep(0.1)
    return got


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "service"


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[tuple[_native.Service, str]]:
    """A replica in this process, at a free port."""
    folder.mkdir(exist_ok=True)
    given = {
        "name": "test",
        "listen": "127.0.0.1:0",
        "policy": "priority",
        "tokens": serving.tokens_in(folder),
        "store": str(folder / "store"),
        "address": "http://127.0.0.1:1",
    }
    service = _native.Service(json.dumps(given | settings))
    try:
        yield service, f"http://127.0.0.1:{service.port}"
    finally:
        service.stop()


@contextmanager
def cluster(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Client]:
    """A Dask cluster that joins with this name; its workers are processes of this host."""
    monkeypatch.setenv(CLUSTER, name)
    with (
        LocalCluster(n_workers=2, threads_per_worker=4, dashboard_address=":0", **options) as own,
        Client(own) as client,
    ):
        mission_control.install(client, policy="fair")
        yield client


def status(client: Client) -> dict[str, Any]:
    return client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["mission-control"].status())


def move(client: Client, priority: float, stop: threading.Event, name: str) -> list[int]:
    """A job that moves bytes from worker to worker, and checks each, until it is stopped."""
    workers = sorted(workers_of(client))
    moved = []
    with mission_control.job(name, priority=priority, transport="tcp", client=client):
        while not stop.is_set():
            held = client.map(put, range(8), workers=[workers[0]], pure=False)
            got = client.map(take, held, range(8), workers=[workers[1]], pure=False)
            moved.append(sum(client.gather(got)))
    return moved


def put(number: int) -> Any:
    return mission_control.put([bytes([number]) * (4 << 20)])


def take(reference: Any, number: int) -> int:
    (part,) = mission_control.fetch([reference], part=0)
    assert bytes(part) == bytes([number]) * (4 << 20)
    return len(part)


def test_two_clusters_have_the_services_weights_and_go_on_without_it(folder, monkeypatch):
    with ExitStack() as stack:
        service, address = stack.enter_context(served(folder))
        monkeypatch.setenv(SERVICE, address)
        monkeypatch.setenv(TOKEN_FILE, str(folder / "cluster.token"))
        clients = [stack.enter_context(cluster(name, monkeypatch)) for name in ("a", "b")]
        for client in clients:
            wait_for("joined", lambda client=client: status(client)["service"]["joined"])
        stop, results = threading.Event(), {}

        def work(index: int, priority: float) -> None:
            results[index] = move(clients[index], priority, stop, "same-name")

        threads = [threading.Thread(target=work, args=args) for args in ((0, 7.0), (1, 3.0))]
        for thread in threads:
            thread.start()
        try:

            def weights() -> Any:
                jobs = json.loads(service.status())["jobs"]
                found = {job["cluster"]: job["weight"] for job in jobs if job["job"] == "same-name"}
                return found if len(found) == 2 and None not in found.values() else None

            def shared() -> Any:
                found = weights()
                return found and found["a"] == pytest.approx(0.7) and found["b"] == pytest.approx(0.3)

            wait_for("weights of 7 to 3", shared)

            def guided() -> Any:
                own = [job for client in clients for job in status(client)["jobs"] if job["job"] == "same-name"]
                return len(own) == 2 and [job["weight"] for job in own] == [pytest.approx(0.7), pytest.approx(0.3)]

            wait_for("the clusters' own status has them", guided)
            assert all(status(client)["policy"] == "priority" for client in clients), "the service's policy"
            monkeypatch.setenv(TOKEN_FILE, str(folder / "operator.token"))
            asking = Asking(address)
            asking.change({"ask": "change", "cluster": "b", "job": "same-name", "change": {"priority": 7.0}})
            wait_for("half each", lambda: (found := weights()) and found["b"] == pytest.approx(0.5))
            with pytest.raises(BadInput, match="there is no policy"):
                asking.change({"ask": "policy", "policy": "nonsense"})
            service.stop()
            # No transfer stops, and after a while each cluster uses its own weights again.
            wait_for("alone", lambda: not any(status(client)["service"]["guided"] for client in clients))
            wait_for("all of its own", lambda: [job["weight"] for job in status(clients[0])["jobs"]] == [1.0])
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        assert sorted(results) == [0, 1] and all(sum(own) > 0 for own in results.values())


def test_a_cluster_whose_token_is_wrong_says_so_and_works(folder, monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.token"
    wrong.write_text("wrong\n")
    with served(folder) as (_, address):
        monkeypatch.setenv(SERVICE, address)
        monkeypatch.setenv(TOKEN_FILE, str(wrong))
        with cluster("a", monkeypatch) as client:
            problem = wait_for("a problem", lambda: status(client)["service"]["problem"])
            assert "401" in problem and "token" in problem and "wrong" not in problem
            held = client.submit(put, 1)
            assert client.submit(take, held, 1).result() == 4 << 20


def test_what_is_wrong_with_the_environment_is_one_line():
    with pytest.raises(BadInput, match="no address of a service"):
        Service.of({SERVICE: "host:1"}, "tcp://x:1")
    with pytest.raises(BadInput, match="no token"):
        Service.of({SERVICE: "https://host:1"}, "tcp://x:1")
    with pytest.raises(BadInput, match="No such file"):
        Service.of({SERVICE: "https://host:1", TOKEN_FILE: "/nowhere"}, "tcp://x:1")
    with pytest.raises(BadInput, match="would show the token to the network"):
        Service.of({SERVICE: "http://192.0.2.1:1"}, "tcp://x:1")
    for address in ("http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1", "ftp://127.0.0.1:1"):
        with pytest.raises(BadInput, match="no address of a service"):
            Service.of({SERVICE: address}, "tcp://x:1")
    assert Service.of({}, "tcp://x:1") is None


@pytest.mark.parametrize(
    "words, said",
    [
        (["serve", "--listen", "0.0.0.0:8790"], "--certificate"),
        (["serve", "--listen", "nonsense"], "ADDRESS:PORT"),
        (["serve", "--store", "etcd:/127.0.0.1:1"], "etcd://HOST:PORT"),
        (["serve", "--store", "redis://x"], "etcd://HOST:PORT"),
        (["serve", "--store", "etcd://127.0.0.1"], "etcd://HOST:PORT"),
        (["serve", "--address", "nonsense"], "--address"),
        (["serve", "--policy", "nonsense"], "--policy"),
        (["service", "status", "--service", "http://127.0.0.1:99999"], "no address of a service"),
        (["service", "status", "--service", "http://127.0.0.1:1"], "no token"),
        (["service", "drain", ""], "no name of a host"),
        (["service", "set", "job"], "CLUSTER/JOB"),
        (["service", "set", "a/b", "--priority", "nan"], "priority"),
        (["service", "set", "a/b", "--transport", "pigeon"], "no transport"),
    ],
)
def test_bad_input_is_one_line(words, said, tmp_path):
    state = ["--state", str(tmp_path)] if words[0] == "serve" else []
    done = mission(*words, *state)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd on the path (Debian: etcd-server)")
def test_when_the_leader_is_killed_another_leads_and_nothing_answered_is_lost(tmp_path, monkeypatch):
    with ExitStack() as stack:
        store = stack.enter_context(in_etcd(1))
        replicas: list[subprocess.Popen[bytes]] = []
        ports = free_ports(2)
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        folder = tmp_path / "tokens"
        for port in ports:
            command = [sys.executable, "-m", "mission_control", "serve", "--listen", f"127.0.0.1:{port}"]
            command += ["--store", store, "--state", str(folder), "--policy", "priority"]
            replicas.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(end, replicas[-1])
            wait_for("tokens", lambda: (folder / "operator.token").exists())
        monkeypatch.setenv(TOKEN_FILE, str(folder / "operator.token"))
        asking = Asking(",".join(addresses))

        def leader() -> str | None:
            found = asking.statuses().items()
            return next((a for a, own in found if isinstance(own, dict) and own["role"] == "leader"), None)

        first = wait_for("a leader", leader)
        monkeypatch.setenv(SERVICE, ",".join(addresses))
        monkeypatch.setenv(TOKEN_FILE, str(folder / "cluster.token"))
        with cluster("a", monkeypatch) as client:
            wait_for("joined", lambda: status(client)["service"]["joined"])
            asking.change({"ask": "policy", "policy": "fifo"})
            asking.change({"ask": "drain", "host": "some-host"})
            os.kill(replicas[addresses.index(first)].pid, signal.SIGKILL)
            second = wait_for("another leader", lambda: (found := leader()) != first and found)
            own = asking.statuses()[second]
            assert isinstance(own, dict) and own["policy"] == "fifo" and own["drained"] == ["some-host"]
            asking.change({"ask": "drain", "host": "another-host"})
            wait_for("at the second", lambda: status(client)["service"]["leader"] == second)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_tokens_that_another_user_could_have_put_there_are_refused(tmp_path):
    folder = tmp_path / "state"
    tokens = serving.tokens_in(folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and serving.tokens_in(folder) == tokens
    folder.chmod(0o777)
    with pytest.raises(BadInput, match=r"everybody can write in --state .*: chmod 700"):
        serving.tokens_in(folder)
    folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(folder / "operator.token", 1, -1)
        with pytest.raises(BadInput, match=r"operator\.token belongs to user 1: remove it"):
            serving.tokens_in(folder)
        os.chown(folder / "operator.token", 0, -1)
        os.chown(folder, 1, -1)
        with pytest.raises(BadInput, match=r"--state .* belongs to user 1: choose a folder of your own"):
            serving.tokens_in(folder)
        os.chown(folder, 0, -1)
    assert serving.tokens_in(folder) == tokens


def test_replicas_that_start_at_once_agree_on_the_tokens(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        for number in range(50):
            folder = tmp_path / str(number)
            found = list(pool.map(serving.tokens_in, [folder] * 8))
            assert all(own == found[0] for own in found)
            assert sorted(own.name for own in folder.iterdir()) == sorted(f"{name}.token" for name in found[0])
