"""World `local`: what other hosts can reach, and what its disk has room for."""

from __future__ import annotations

import psutil
import pytest

from mission_control.errors import BadInput
from mission_control.experiments.engine import conduct
from mission_control.experiments.points import Conditions
from mission_control.scenario import validate
from mission_control.workloads.wordcount import make_text
from mission_control.worlds.local import local


def test_a_run_on_this_machine_listens_on_loopback_only():
    def listening() -> set[str]:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        connections = [entry for process in processes for entry in process.net_connections("tcp")]
        return {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}

    before = listening()
    with local(validate({"topology": {"hosts": 1, "memory_limit": "500 MiB"}})):
        assert listening() - before <= {"127.0.0.1"}


@pytest.mark.parametrize("kind", ("sort", "wordcount"))
def test_files_that_the_disk_has_no_room_for_are_refused_before_any_is_written(kind, tmp_path):
    data = tmp_path / "run" / "data"

    def workload(**settings):
        return validate({"workload": {"kind": kind, **settings}}).workload

    workload(size="1 MiB", jobs=3).check_room(data)
    for settings, flag in (
        ({"size": "4096 TiB"}, "--size,"),
        ({"size": "1000000 TiB"}, "--size,"),
        ({"jobs": 2, "sizes": ["1 MiB", "4096 TiB"]}, "--sizes,"),
    ):
        with pytest.raises(BadInput, match=rf"{kind}: its files take .* {flag}"):
            workload(**settings).check_room(data)
    # What this host does not have is of the cluster's hosts.
    workload(size="4096 TiB").check_room(data.parents[-1] / "not-of-this-host" / "data")


def test_a_study_is_refused_before_its_first_point_if_the_disk_has_no_room_for_its_last(tmp_path):
    scenario = validate({"study": {"vary": {"workload.size": ["1 MiB", "4096 TiB"]}}})
    with pytest.raises(BadInput, match="its files take"):
        conduct({"sizes": scenario}, Conditions(["local"]), results=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_text_is_no_longer_than_was_asked_but_for_some_words(tmp_path):
    for size in (100, 300_000):
        counts = make_text(tmp_path / "text", (1, 1), size)
        text = (tmp_path / "text").read_bytes()
        assert size <= len(text) < 1.01 * size + 200 and counts.sum() == len(text.split())
