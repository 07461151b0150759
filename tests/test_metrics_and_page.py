"""The page and the metrics in unusual settings: a path prefix, and two clusters in one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections import Counter
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

import mission_control
from tests.conftest import held_by_scheduler, status, until


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


def small_cluster(**options: Any) -> LocalCluster:
    return LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0", **options)


def dashboard(client: Client) -> str:
    return f"http://127.0.0.1:{client.scheduler_info()['services']['dashboard']}"


@pytest.mark.parametrize("prefix", ["/", "/behind/a/proxy-server"])
def test_the_page_is_below_the_prefix_of_dasks_dashboard(prefix, tmp_path):
    options = {"scheduler_kwargs": {"http_prefix": prefix}}
    with small_cluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        mission_control.install(client)
        address = dashboard(client) + prefix.rstrip("/") + "/mission-control"
        assert json.loads(get(f"{address}/status.json"))["policy"] == "performance-centric"
        assert 'fetch("/' not in get(address) and "Mission Control" in get(f"{address}/")
        # The common look is in the page: its policy lets it load nothing.
        assert "prefers" in get(address) and "--ground: light-dark(" in get(address)
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            return
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        done = subprocess.run(
            [browser, *options, "--virtual-time-budget=3000", "--dump-dom", address],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "policy performance-centric" in done.stdout


def test_two_clusters_in_one_process_share_one_page_of_metrics():
    with (
        small_cluster() as one,
        small_cluster() as two,
        Client(one, set_as_default=False) as first,
        Client(two, set_as_default=False) as second,
    ):
        mission_control.install(first)
        mission_control.install(second)
        lines = [entry for entry in get(f"{dashboard(first)}/metrics").splitlines() if "mission_control" in entry]
        headers = Counter(entry for entry in lines if entry.startswith("# TYPE"))
        assert headers and max(headers.values()) == 1, headers
        names = [entry.rpartition(" ")[0] for entry in lines if not entry.startswith("#")]
        assert len(set(names)) == len(names)
        objects = [entry for entry in names if entry.startswith("mission_control_objects")]
        assert len(objects) == 2
    with small_cluster() as last, Client(last, set_as_default=False) as client:
        mission_control.install(client)
        lines = get(f"{dashboard(client)}/metrics").splitlines()
        assert len([entry for entry in lines if entry.startswith("mission_control_objects")]) == 1


def kept_bytes(client: Client) -> int:
    return max(own["memory"].get("kept", 0) for own in status(client)["workers"].values())


def test_memory_that_is_kept_for_the_next_objects_is_shown(client):
    with mission_control.job("keeps"):
        made = client.submit(lambda: mission_control.put([bytes(3 << 20)]), pure=False)
        made.result()
        del made
        until(lambda: kept_bytes(client) >= 3 << 20, "a heartbeat says what is kept")
        lines = get(f"{dashboard(client)}/metrics").splitlines()
        shown = [line for line in lines if line.startswith("mission_control_worker_memory_bytes{")]
        assert any('kind="kept"' in line and 'worker="tcp://' in line for line in shown), shown
    until(lambda: kept_bytes(client) < 3 << 20, "nobody wants it", seconds=40)


def test_a_worker_remembers_only_the_newest_lost_objects(endpoint):
    own, names = endpoint(), [f"{number:032x}" for number in range(100_001)]
    own.lost(names[:-1], "their worker left")
    assert own.known_lost([names[0], names[-2], names[-1]]) == [names[0], names[-2]]
    own.lost(names[-1:], "their worker left")
    assert own.known_lost([names[0], names[1], names[-1]]) == [names[1], names[-1]]


def test_handlers_that_an_operator_blocks_are_not_offered():
    with (
        dask.config.set({"distributed.scheduler.blocked-handlers": ["mission_control_change"]}),
        small_cluster() as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        mission_control.install(client)
        assert "mission_control_change" not in cluster.scheduler.handlers
        assert "mission_control_status" in cluster.scheduler.handlers
        assert status(client)["jobs"] == []


def test_a_rejected_job_leaves_its_name_to_others(client, cluster):
    with Client(cluster, set_as_default=False) as other:
        rejected = mission_control.job("wanted", encrypt=True, client=client)
        with pytest.raises(mission_control.JobRejected), rejected:
            pass
        assert held_by_scheduler(client)["names of jobs"] == 0
        with mission_control.job("wanted", client=other):
            assert [job["job"] for job in status(other)["jobs"]] == ["wanted"]
