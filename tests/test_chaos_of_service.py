"""Some rounds of `tests/chaos_of_service.py`, and a disk that is full; 200 rounds are for `make long`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mission_control.bench.service import serving_processes
from mission_control.errors import EnvironmentFailed
from mission_control.service.asking import Asking
from tests import chaos_of_service
from tests.chaos_of_service import wait_for

pytestmark = pytest.mark.lab


@pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd on the path (Debian: etcd-server)")
@pytest.mark.timeout(600)
def test_whatever_goes_wrong_one_leads_and_nothing_answered_is_lost():
    # Each fault once; each round asserts its invariants.
    ended = chaos_of_service.run(len(chaos_of_service.FAULTS))
    assert ended["operator"]["answered"] > 20 and ended["turns"] > 20, ended


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_with_a_full_disk_changes_are_refused_and_none_that_was_answered_is_lost(small_disk, tmp_path):
    store, filler = str(small_disk / "store"), small_disk / "filler"
    token = tmp_path / "operator.token"
    answered: set[str] = set()
    for start in range(2):
        with serving_processes(store, 1) as own:
            token.write_text(own.tokens["operator"])
            asking = Asking(f"http://127.0.0.1:{own.ports[0]}", token)
            wait_for("it leads", lambda asking=asking: leads(asking))
            for turn in range(3):
                fill(filler)
                refused = 0
                for number in range(30):
                    host = f"{start}-{turn}-{number}-{'x' * 200}"
                    try:
                        asking.change({"ask": "drain", "host": host})
                        answered.add(host)
                    except EnvironmentFailed as error:
                        assert "make room" in str(error), error
                        refused += 1
                assert refused > 0
                assert any("make room" in problem for problem in status(asking)["problems"])
                filler.unlink()
                asking.change({"ask": "drain", "host": f"{start}-{turn}"})
                answered.add(f"{start}-{turn}")
            assert set(status(asking)["drained"]) == answered
    assert len(answered) > 6


def fill(filler: Path) -> None:
    """Fill the disk so that less than a page is free."""
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def status(asking: Asking) -> dict:
    (own,) = asking.statuses().values()
    assert isinstance(own, dict), own
    return own


def leads(asking: Asking) -> bool:
    (own,) = asking.statuses().values()
    return isinstance(own, dict) and own["role"] == "leader"
