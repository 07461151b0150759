"""`mission bench console`: what the service's live page costs with 10,000 transfers that all move each second."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from mission_control.bench.browser import Page, browser
from mission_control.bench.service import Serving, join, serving_processes
from mission_control.environment import describe

MEMBERS = 10
TRANSFERS = 10_000
WATCH_S = 15.0
STARTS_S = 60.0


@contextmanager
def members(own: Serving, count: int, transfers: int) -> Iterator[None]:
    """Clusters, in a thread, whose transfers all move and are reported each second."""
    stop, ready = threading.Event(), threading.Event()

    async def report() -> None:
        joined, _ = await join(own, count, transfers)
        ready.set()
        second = 0
        while not stop.is_set():
            began = time.perf_counter()
            second += 1
            for member in joined:
                member.report(second)
                await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - began)))
        for member in joined:
            member.close()

    thread = threading.Thread(target=lambda: asyncio.run(report()), name="members")
    thread.start()
    try:
        if not ready.wait(STARTS_S):
            raise TimeoutError(f"the members have not joined within {STARTS_S:.0f} s")
        yield
    finally:
        stop.set()
        thread.join(STARTS_S)


def enter(page: Page, address: str, token: str) -> None:
    """Open the console, as a person with this token."""
    page.open(f"{address}/")
    page.until("document.readyState === 'complete' && document.querySelector('#ask')?.open")
    page.run(f"by('token').value = {token!r}; document.querySelector('#ask button').click()")
    page.until("document.querySelectorAll('#rows tr[data-row]').length > 10")


def take_pictures(page: Page, folder: Path) -> list[Path]:
    """Write what there is to see: transfers light and dark, and the jobs; return the files."""
    made = [folder / f"console-{name}.png" for name in ("light", "dark", "jobs")]
    for path, dark in zip(made, (False, True), strict=False):
        page.dark(dark)
        time.sleep(1.5)
        page.picture(path)
    page.dark(False)
    page.press("2")
    time.sleep(2.5)
    page.picture(made[-1])
    return made


def measure(pictures: Path | None = None, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure the service without and with somebody who looks, and the browser.

    Args:
        pictures: A folder for what there is to see, light and dark.

    Returns:
        ``service_alone``, ``service_watched``, ``browser``: parts of a core; ``rows``: table rows in the page.
    """
    with serving_processes(None, 1) as own, members(own, MEMBERS, TRANSFERS // MEMBERS):
        service = psutil.Process(own.processes[0].pid)

        def cpu(process: Callable[[], float]) -> Callable[[], float]:
            before, began = process(), time.perf_counter()
            return lambda: (process() - before) / (time.perf_counter() - began)

        def of_service() -> float:
            return float(sum(service.cpu_times()[:2]))

        say(f"{TRANSFERS} transfers move, and nobody looks")
        time.sleep(3)
        alone = cpu(of_service)
        time.sleep(WATCH_S)
        without = alone()
        with browser() as page:
            enter(page, f"http://127.0.0.1:{own.ports[0]}", own.tokens["viewer"])
            say("somebody looks")
            time.sleep(5)
            watched, drawn = cpu(of_service), cpu(page.cpu_seconds)
            time.sleep(WATCH_S)
            found = {"service_alone": without, "service_watched": watched(), "browser": drawn()}
            found["rows"] = page.run("document.querySelectorAll('#rows tr[data-row]').length")
            if pictures is not None:
                pictures.mkdir(parents=True, exist_ok=True)
                take_pictures(page, pictures)
            if page.errors:
                raise RuntimeError(f"scripts of the page raised: {page.errors[0]}")
    return {**found, "transfers": TRANSFERS, "environment": describe()}
