"""Repeat tests in a lab that the machine spoiled: a run was not valid, or a hypervisor stole CPU time.

A lab measures bytes over time, so such a run does not test the program (as in `mission_control.lab.watch`). A pytest
plug-in; at most three runs, and the last one counts. If no run was valid because CPU time was stolen each time, the
test is skipped with that reason: `--must-run` fails if nothing ran. A test that checks bytes and not times accepts such
a run.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mission_control.lab.watch import STOLEN, STOLEN_MAX

RUNS = 3
PAUSE_S = 30
"""Pause before another run, so that others may release the CPUs."""


class NotValid(Exception):
    """The measurement is not valid for the scenario; the text has the reason."""


def require_valid(result: dict[str, Any], *, in_time: bool = True) -> None:
    """Check a run, or each of its points. Without `in_time` the test does not depend on the speed of the CPUs."""
    for entry in (result, *result.get("points", ())):
        because = entry.get("invalid_because") or ["a point is not valid"]
        if entry.get("valid") is False and (in_time or not all(is_steal(why) for why in because)):
            raise NotValid("; ".join(because))


def is_steal(why: str) -> bool:
    """Whether a run is not valid because a hypervisor stole CPU time."""
    return why.startswith(STOLEN)


def cpu_times() -> tuple[int, int]:
    """Return the ticks of all CPUs since the boot: total and stolen."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool | None:
    """Run a test of the lab; repeat it if it failed and CPU time was stolen."""
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
        # A run judges the time in which bytes moved, which may be a small part of the test.
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
