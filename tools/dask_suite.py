"""Run tests of dask/distributed three times and print what differs: stock, with Mission Control, over mission://.

    git clone --branch 2026.8.0 https://github.com/dask/distributed checkout
    python tools/dask_suite.py checkout distributed/tests/test_client.py ...

Without files it runs those whose subject Mission Control touches. `--ways preloaded` runs one way beside stock. The
tests run in the environment of this interpreter, with the checkout's own distributed: what is installed lacks their
certificates. They need `pytest-timeout` and `pytest-rerunfailures`. Differences that are meant have their reason in
`MEANT`. Exit status: 0: no other difference; 1: there are some; 2: bad input.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FILES = [
    "distributed/comm/tests/test_comms.py",
    "distributed/shuffle/tests/test_shuffle.py",
    "distributed/shuffle/tests/test_rechunk.py",
    "distributed/shuffle/tests/test_merge.py",
    "distributed/tests/test_active_memory_manager.py",
    "distributed/tests/test_actor.py",
    "distributed/tests/test_client.py",
    "distributed/tests/test_core.py",
    "distributed/tests/test_failed_workers.py",
    "distributed/tests/test_nanny.py",
    "distributed/tests/test_priorities.py",
    "distributed/tests/test_scheduler.py",
    "distributed/tests/test_spans.py",
    "distributed/tests/test_steal.py",
    "distributed/tests/test_worker.py",
]
PRELOAD = {
    "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": '["mission_control.dask"]',
    "DASK_DISTRIBUTED__WORKER__PRELOAD": '["mission_control.dask"]',
}
WAYS = {
    "stock": {},
    "preloaded": PRELOAD,
    "mission": PRELOAD | {"DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME": "mission"},
}
OTHER_RUN = "it looks into Dask's run of a shuffle, or puts its own there; Mission Control has another"
OTHER_DISK = "it breaks the disk that Dask's run writes to; Mission Control keeps data in memory, and has its own spool"
MEANT = {
    "test_bad_disk": OTHER_DISK,
    "test_closed_other_worker_during_barrier": OTHER_RUN,
    "test_closed_worker_during_barrier": OTHER_RUN,
    "test_deduplicate_stale_transfer[False]": OTHER_RUN,
    "test_deduplicate_stale_transfer[True]": OTHER_RUN,
    "test_flaky_connect_fails_without_retry": "no shard is sent through the connection that it breaks",
    "test_meaningful_out_of_disk_error": OTHER_DISK,
    "test_raise_on_incompatible_partitions": "values of several types in one column arrive as they were",
    "test_rechunk_in_memory_shards_dont_share_buffer": OTHER_RUN,
    "test_replace_stale_shuffle": OTHER_RUN,
    "test_restarting_during_barrier_raises_killed_worker": OTHER_RUN,
    "test_restarting_during_transfer_raises_killed_worker": OTHER_RUN,
}
"""Tests that differ with Mission Control, and why that is right. `tests/` has its own for these cases."""
EXPECTS_TCP = "it expects `tcp://` in an address where the protocol is mission://"
EXPECT_TCP = {
    "test_coerce_address",
    "test_coerce_to_address",
    "test_connection_pool",
    "test_default_client_server_ipv4[tornado]",
    "test_gather_missing_workers",
    "test_interface_async[Nanny]",
    "test_interface_async[Worker]",
    "test_resolve_address[tornado]",
    "test_rpc_inputs",
    "test_service_hosts_match_worker",
    "test_worker_listens_on_same_interface_by_default[Worker]",
    "test_worker_uses_same_host_as_nanny",
}
TEST_S = 120
"""A test that takes longer has failed."""
FILE_S = 3600

LAST_LINES = 60
"""Of a run that wrote no report, so many are shown."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", help="within the checkout")
    parser.add_argument("--ways", nargs="+", choices=[way for way in WAYS if way != "stock"], default=list(WAYS)[1:])
    parser.add_argument("-k", dest="only", help="only tests whose names match, as in pytest")
    given = parser.parse_args()
    files = given.files or FILES
    missing = [file for file in files if not (given.checkout / file).is_file()]
    if missing:
        print(f"{given.checkout} has no {missing[0]}: give a checkout of dask/distributed", file=sys.stderr)
        return 2
    differences = 0
    for file in files:
        stock = outcomes(given.checkout, file, "stock", given.only)
        for way in given.ways:
            other = outcomes(given.checkout, file, way, given.only)
            differ = sorted(name for name in stock | other if stock.get(name) != other.get(name))
            # One that fails now and then fails in stock Dask too: both get another chance.
            meant = {name: why for name in differ if (why := reason(name, way)) is not None}
            differ = [name for name in differ if name not in meant and still_differs(given.checkout, file, name, way)]
            differences += len(differ)
            print(f"{file}, {way}: {len(other)} tests, {len(differ)} differ, {len(meant)} on purpose", flush=True)
            for name in differ:
                print(
                    f"  {name}: {stock.get(name, 'did not run')} in stock, {other.get(name, 'did not run')}", flush=True
                )
            for name, why in meant.items():
                print(f"  {name}, on purpose: {why}", flush=True)
    return 1 if differences else 0


def reason(name: str, way: str) -> str | None:
    """Say why a test is meant to differ; ``None``: it is not."""
    test = name.partition("::")[2]
    return MEANT.get(test) or (EXPECTS_TCP if way == "mission" and test in EXPECT_TCP else None)


def still_differs(checkout: Path, file: str, name: str, way: str) -> bool:
    test = name.partition("::")[2]
    seen = [outcomes(checkout, f"{file}::{test}", own, None) for own in ("stock", way)]
    return set(seen[0].values()) != set(seen[1].values())


def outcomes(checkout: Path, file: str, way: str, only: str | None) -> dict[str, str]:
    """The outcome of each test, by its name."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
        command += [f"--junitxml={report}", f"--timeout={TEST_S}", "--rootdir", str(checkout), file]
        command += ["-k", only] if only else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
        paths = [str(checkout.absolute()), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= WAYS[way] | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, timeout=FILE_S
            )
        except subprocess.TimeoutExpired:
            print(f"{file}, {way}: stopped after {FILE_S} s", file=sys.stderr)
            return {}
        if not report.is_file():
            # pytest-timeout ends the whole process where a test does not end.
            said = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
            print(f"{file}, {way}: ended with status {done.returncode}, and no report:\n{said}", file=sys.stderr)
            return {}
        cases = ElementTree.parse(report).iter("testcase")
        found = {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}
        passed = sum(own == "passed" for own in found.values())
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{file}, {way}: {passed} of {len(found)} passed, {took}", file=sys.stderr, flush=True)
        return found


def outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")


if __name__ == "__main__":
    sys.exit(main())
