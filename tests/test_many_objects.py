"""Many objects, parts and readers do not exhaust a process's descriptors, mappings and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import TOKEN, data, until

DEMANDS = json.dumps({"encrypt": "none", "transport": None})
OVER_TCP = json.dumps({"encrypt": "none", "transport": "tcp"})

OWNER = """
import json, resource, sys, threading
import numpy as np
from mission_control import _native
soft, objects, size = json.loads(sys.argv[2])
if soft:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
token = bytes.fromhex(sys.argv[1])
own = _native.Endpoint("127.0.0.1", token, memory_limit=4 << 30, spool_folder="/tmp", flows_per_host=10)
print("ready", flush=True)
sys.stdin.readline()
demands = '{"encrypt": "none", "transport": null}'
content = np.random.default_rng(7).integers(0, 256, size + objects, np.uint8)
names = [own.put([content[number : number + size]], "job", demands)[0] for number in range(objects)]
print(json.dumps([own.address, names]), flush=True)
for line in sys.stdin:
    if line.strip() == "free":
        for name in names:
            own.free(name)
    status = open("/proc/self/status").read()
    resident = int(status.split("VmRSS:")[1].split()[0]) << 10
    descriptors = len(__import__("os").listdir("/proc/self/fd"))
    print(json.dumps([resident, descriptors]), flush=True)
"""


class Owner:
    """A process that holds objects which differ by a byte."""

    def __init__(self, soft: int | None, objects: int, size: int):
        command = [sys.executable, "-c", OWNER, TOKEN.hex(), json.dumps([soft, objects, size])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdin is not None
        self.out, self.to = self.process.stdout, self.process.stdin
        assert self.out.readline() == "ready\n"

    def put(self) -> tuple[str, list[str]]:
        self.to.write("put\n")
        self.to.flush()
        address, names = json.loads(self.out.readline())
        return address, names

    def ask(self, what: str = "") -> tuple[int, int]:
        """Bytes of resident memory, and open descriptors."""
        self.to.write(what + "\n")
        self.to.flush()
        resident, descriptors = json.loads(self.out.readline())
        return resident, descriptors

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.out.close()
        self.to.close()


@pytest.mark.timeout(300)
def test_a_worker_with_1024_descriptors_holds_20000_objects_and_serves_200_readers(endpoint):
    objects, size = 20_000, 64 << 10
    content = data(size + objects, seed=7)
    with Owner(1024, objects, size) as owner:
        readers = [endpoint(flows_per_host=2) for _ in range(200)]
        address, names = owner.put()
        _, descriptors = owner.ask()
        assert descriptors < 600, descriptors

        def read(number: int) -> bool:
            # Some readers map the memory, some use TCP.
            demands = DEMANDS if number % 4 == 0 else OVER_TCP
            wanted = [(names[at], 0, size, [address]) for at in range(number, objects, 1009)]
            parts, _, _ = readers[number].fetch("job", "map", "reduce", demands, wanted, False)
            expected = [content[at : at + size] for at in range(number, objects, 1009)]
            return all((memoryview(part) == one.data) for part, one in zip(parts, expected, strict=True))

        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(read, range(200)))
        _, descriptors = owner.ask()
        assert descriptors < 1024, descriptors


def test_owners_that_are_gone_leave_no_descriptors(endpoint):
    reader, content = endpoint(), data(300_000)
    open_now = []
    for _ in range(16):
        own = endpoint()
        until(lambda own=own: json.loads(own.resources())["has_neighbours"], "it joined the host")
        name, sizes = own.put([content], "job", DEMANDS)
        parts, _, _ = reader.fetch("job", "map", "reduce", DEMANDS, [(name, 0, sizes[0], [own.address])], False, False)
        assert bytes(parts[0]) == content.tobytes()
        del parts
        own.close()
        open_now.append(len(os.listdir("/proc/self/fd")))
    (record,) = json.loads(reader.transfers())
    # On a busy machine a lease may come too late once, and TCP delivers the part: the test is about open descriptors.
    assert record["transport"]["bytes"]["shm"] >= 12 * len(content), record["transport"]
    # Two more for each, if they stayed. The first ones open shared resources, such as the probe of a path.
    assert open_now[-1] < open_now[5] + 10, open_now


def test_an_object_of_100000_parts_is_fetched_over_shared_memory(endpoint):
    parts = 100_000
    own, reader = endpoint(), endpoint()
    until(lambda: json.loads(own.resources())["has_neighbours"], "the reader joined the host")
    content = data(3 * parts + parts)
    starts = [4 * number for number in range(parts)]
    name, sizes = own.put([content[start : start + 1 + start % 4 + 2] for start in starts], "job", DEMANDS)
    wanted = [(name, number, size, [own.address]) for number, size in enumerate(sizes)]
    fetched, _, _ = reader.fetch("job", "map", "reduce", DEMANDS, wanted, False, True)
    for start, part in zip(starts, fetched, strict=True):
        assert bytes(part) == content[start : start + 1 + start % 4 + 2].tobytes()
    (record,) = json.loads(reader.transfers())
    assert set(record["transport"]["bytes"]) == {"shm"}, record["transport"]


@pytest.mark.timeout(120)
def test_freed_memory_and_its_descriptors_go_back_to_the_kernel(endpoint):
    with Owner(None, 96, 8 << 20) as owner:
        reader = endpoint()
        address, names = owner.put()
        content = data((8 << 20) + 96, seed=7)
        parts, _, _ = reader.fetch("job", "map", "reduce", DEMANDS, [(names[5], 0, 8 << 20, [address])], False)
        assert memoryview(parts[0]) == content[5 : 5 + (8 << 20)].data
        resident, descriptors = owner.ask()
        assert resident > 700 << 20
        began = time.monotonic()
        owner.ask("free")
        # Memory with a reader stays until the reader is done.
        assert memoryview(parts[0]) == content[5 : 5 + (8 << 20)].data
        del parts
        until(lambda: owner.ask()[0] < resident - (700 << 20), "the memory is back", seconds=30)
        until(lambda: owner.ask()[1] < descriptors, "the descriptors are closed", seconds=30)
        assert time.monotonic() - began < 60
