"""A process that is stopped and continued: its late answers are not mistaken, and nobody waits for it for ever."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.conftest import TOKEN, data

PARTS, PART_BYTES, THREADS = 24, 512 << 10, 4
PAUSE_S = 6  # longer than a reader waits for one answer (defaults: stall, 5 s)

OWNER = """
import json, sys
import numpy as np
from mission_control import _native
token = bytes.fromhex(sys.argv[1])
own = _native.Endpoint("127.0.0.1", token, memory_limit=1 << 30, spool_folder="/tmp", flows_per_host=4)
print("ready", flush=True)
parts, size = json.loads(sys.stdin.readline())
demands = '{"encrypt": "none", "transport": null}'
content = [np.random.default_rng(seed).integers(0, 256, size, np.uint8) for seed in range(parts)]
name, _ = own.put(content, "job", demands)
print(json.dumps([own.address, name]), flush=True)
sys.stdin.readline()
"""


@contextmanager
def another() -> Iterator[subprocess.Popen[str]]:
    """A process that puts an object with parts of equal size on request."""
    command = [sys.executable, "-c", OWNER, TOKEN.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.send_signal(signal.SIGCONT)
        process.kill()


def ask_to_put(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the address of the owner, and the name of the object."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([PARTS, PART_BYTES]) + "\n")
    process.stdin.flush()
    address, name = json.loads(process.stdout.readline())
    return address, name


@pytest.fixture
def owner(endpoint):
    """A process with an object that also grants the host's slots, and a reader."""
    with another() as process:
        reader = endpoint()
        yield process, reader, *ask_to_put(process)


def test_no_reader_gets_another_part_while_or_after_the_owner_is_stopped(owner):
    process, reader, address, name = owner
    expected = [data(PART_BYTES, seed).tobytes() for seed in range(PARTS)]

    def fetch(part: int) -> list[int]:
        """Return the received part, after a check that it is the requested one."""
        demands = json.dumps({"encrypt": "none", "transport": None})
        parts, _, _ = reader.fetch("job", "map", "reduce", demands, [(name, part, PART_BYTES, [address])], False)
        return [number for number, content in enumerate(expected) if bytes(parts[0]) == content]

    with ThreadPoolExecutor(THREADS) as pool:
        before = list(pool.map(fetch, range(THREADS)))
        process.send_signal(signal.SIGSTOP)
        during = [pool.submit(fetch, part) for part in range(PARTS)]
        time.sleep(PAUSE_S)
        process.send_signal(signal.SIGCONT)
        while_paused = [entry.result(timeout=60) for entry in during]
        after = list(pool.map(fetch, range(PARTS)))
    assert before == [[part] for part in range(THREADS)]
    assert while_paused == [[part] for part in range(PARTS)]
    assert after == [[part] for part in range(PARTS)]


def test_a_stopped_arbiter_is_replaced_and_follows_its_successor_when_it_goes_on(endpoint):
    with another() as first, another() as second:
        reader = endpoint()
        address, name = ask_to_put(second)
        expected = [data(PART_BYTES, seed).tobytes() for seed in range(PARTS)]

        def fetch() -> None:
            demands = json.dumps({"encrypt": "none", "transport": "tcp"})
            wanted = [(name, part, PART_BYTES, [address]) for part in range(PARTS)]
            parts, _, _ = reader.fetch("job", "map", "reduce", demands, wanted, False)
            assert [bytes(part) for part in parts] == expected

        fetch()
        assert json.loads(reader.resources())["has_neighbours"]
        first.send_signal(signal.SIGSTOP)
        for _ in range(8):
            fetch()
            time.sleep(0.7)
        # The owner or this process grants the slots now; the first one joins it.
        first.send_signal(signal.SIGCONT)
        for _ in range(8):
            fetch()
            time.sleep(0.3)
        address, name = ask_to_put(first)
        fetch()
