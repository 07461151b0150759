"""World `local`: what other hosts can reach."""

from __future__ import annotations

import psutil

from mission_control.scenario import validate
from mission_control.worlds.local import local


def test_a_run_on_this_machine_listens_on_loopback_only():
    def listening() -> set[str]:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        connections = [entry for process in processes for entry in process.net_connections("tcp")]
        return {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}

    before = listening()
    with local(validate({"topology": {"hosts": 1, "memory_limit": "500 MiB"}})):
        assert listening() - before <= {"127.0.0.1"}
