"""Tests in a lab are run again where the machine spoiled them: a run was not valid, or a hypervisor took the CPUs.

What a lab measures is bytes in time, so such a run says nothing of the program, as `mission_control.lab.watch` says of
its own. A pytest plug-in; at most three runs, and the last one counts. Where no run was valid because a hypervisor took
the CPUs each time, the test is skipped with that reason: `--must-run` fails where nothing ran. A test that asks for
bytes and not for time takes such a run as it is.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mission_control.lab.watch import STOLEN, STOLEN_MAX

RUNS = 3
PAUSE_S = 30
"""Before another run: who took the CPUs may be done by then."""


class NotValid(Exception):
    """What was measured is not what the scenario says; its words are why."""


def require_valid(result: dict[str, Any], *, in_time: bool = True) -> None:
    """Of a run, or of each of its points. Not `in_time`: what is asked does not depend on how fast the CPUs were."""
    for entry in (result, *result.get("points", ())):
        because = entry.get("invalid_because") or ["a point is not valid"]
        if entry.get("valid") is False and (in_time or not all(is_steal(why) for why in because)):
            raise NotValid("; ".join(because))


def is_steal(why: str) -> bool:
    """Whether a hypervisor that took the CPUs is what made a run not valid."""
    return why.startswith(STOLEN)


def cpu_times() -> tuple[int, int]:
    """Ticks of all CPUs since the boot: all of them, and those that were stolen."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool | None:
    """Run a test of the lab, again where it failed and time was stolen."""
    if item.get_closest_marker("lab") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    stolen_each_time = True
    for run in range(1, RUNS + 1):
        if run > 1:
            time.sleep(PAUSE_S)
            item._initrequest()
        before = cpu_times()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        after = cpu_times()
        stolen = (after[1] - before[1]) / max(1, after[0] - before[0])
        failed = [str(report.longrepr) for report in reports if report.failed]
        not_valid = any(NotValid.__name__ in text for text in failed)
        # A run says it of the time in which bytes moved, which may be a small part of the test.
        says_stolen = any(f"{NotValid.__name__}: {STOLEN}" in text for text in failed)
        stolen_each_time &= says_stolen or (not_valid and stolen > STOLEN_MAX)
        spoiled = stolen > STOLEN_MAX or not_valid
        if run == RUNS or not failed or not spoiled:
            break
        terminal = item.config.pluginmanager.get_plugin("terminalreporter")
        why = f"{stolen:.0%} of the CPUs' time was stolen" if stolen > STOLEN_MAX else "a run was not valid"
        terminal.write_line(f"{item.nodeid}: {why}, so it is run again")
    for report in reports:
        if report.failed and stolen_each_time:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, "Skipped: a hypervisor took the CPUs in each of three runs")
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
