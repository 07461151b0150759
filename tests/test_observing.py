"""Pages for observers: Prometheus's page, and the page on the server of Dask's dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request

import numpy as np
import pytest
from distributed import Event, wait

import mission_control
from mission_control.workers import workers_of
from tests.conftest import status, until

BYTES = 1 << 20


def put() -> mission_control.Reference:
    return mission_control.put([np.ones(BYTES, np.uint8), np.ones(BYTES, np.uint8)])


def fetch(reference: mission_control.Reference) -> None:
    mission_control.fetch(reference)
    assert Event("looked").wait(60)


@pytest.fixture
def server(client) -> str:
    """Address of the scheduler's own web server, while a job named <observed> runs."""
    Event("looked", client=client).clear()
    owner, reader = list(workers_of(client))[:2]
    with mission_control.job("<observed>", transport="tcp"):
        reference = client.submit(put, pure=False, workers=[owner])
        wait(reference)
        done = client.submit(fetch, reference, pure=False, workers=[reader])
    port = client.scheduler_info()["services"]["dashboard"]
    address = f"http://127.0.0.1:{port}"
    until(
        lambda: any(transfer["asked_bytes"] for job in status(client)["jobs"] for transfer in job["transfers"]),
        "it is told of",
    )
    yield address
    Event("looked", client=client).set()
    wait(done)
    del reference, done
    until(lambda: not status(client)["jobs"], "the job is over")


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_finds_jobs_and_transfers_on_dasks_own_page(server):
    def line() -> list[str]:
        result = get(f"{server}/metrics").splitlines()
        return [entry for entry in result if entry.startswith("mission_control_transfer_carried_bytes_total")]

    (own,) = until(line, "the transfer is told of")
    assert 'job="<observed>"' in own and 'transport="tcp"' in own and float(own.split()[-1]) == 2 * BYTES
    assert "dask_scheduler_workers" in get(f"{server}/metrics")


def test_the_page_draws_what_the_scheduler_knows_in_a_browser(server, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    result = json.loads(get(f"{server}/mission-control/status.json"))
    assert [job["job"] for job in result["jobs"] if job["transfers"]] == ["<observed>"]
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=3000",
    ]
    done = subprocess.run(
        [browser, *options, "--dump-dom", f"{server}/mission-control"], capture_output=True, text=True, timeout=120
    )
    line, rows = (
        re.search(entry, done.stdout, re.S)
        for entry in ('<p id="line"[^>]*>(.*?)</p>', '<tbody id="rows">(.*?)</tbody>')
    )
    assert line is not None and rows is not None, done.stdout[-1000:] + done.stderr[-1000:]
    assert "3 workers" in line[1]
    for word in ("&lt;observed&gt;", "put → fetch", "2.0 MiB", "required by the job"):
        assert word in rows[1], rows[1]
