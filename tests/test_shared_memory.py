"""Objects of the same host are read without a copy: across processes, and across all other namespaces."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

import mission_control
from tests.conftest import TOKEN, data, put, status, until

READER = """
import hashlib, json, sys
from mission_control import _native
token = bytes.fromhex(sys.argv[1])
own = _native.Endpoint("127.0.0.1", token, memory_limit=1 << 30, spool_folder="/tmp", flows_per_host=4)
print("ready", flush=True)
name, size, address = json.loads(sys.stdin.readline())
demands = '{"encrypt": "none", "transport": null}'
parts, _, _ = own.fetch("job", "map", "reduce", demands, [(name, 0, size, [address])], False)
view = memoryview(parts[0])
(record,) = json.loads(own.transfers())
print(json.dumps([hashlib.sha256(view).hexdigest(), view.readonly, record["transport"]]), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def elsewhere(request):
    """A reader in a separate process, optionally with a prefix such as `unshare`."""
    prefix = getattr(request, "param", [])
    if prefix and subprocess.run([*prefix, "true"], capture_output=True, timeout=30).returncode != 0:
        pytest.skip("namespaces of users are not allowed here")
    command = [*prefix, sys.executable, "-c", READER, TOKEN.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        yield reader
        reader.kill()


CONTAINER = ["unshare", "--user", "--map-current-user", "--mount", "--ipc", "--uts", "--pid"]
CONTAINER += ["--fork", "--kill-child", "--mount-proc"]


@pytest.mark.parametrize("elsewhere", [[], CONTAINER], ids=["process", "container"], indirect=True)
def test_a_reader_maps_what_the_owner_wrote_and_it_stays(endpoint, elsewhere):
    own = endpoint()
    assert elsewhere.stdout.readline().strip() == "ready"
    content = data(8 << 20)
    until(lambda: json.loads(own.resources())["has_neighbours"], "the reader joined the host")
    name, sizes = put(own, content)
    elsewhere.stdin.write(json.dumps([name, sizes[0], own.address]) + "\n")
    elsewhere.stdin.flush()
    digest, readonly, facts = json.loads(elsewhere.stdout.readline())
    assert digest == hashlib.sha256(content).hexdigest() and readonly
    assert facts["bytes"] == {"shm": 8 << 20} and not facts["fallbacks"]
    assert "sealed" in facts["negotiated"][0]["memory"]
    # The memory is shared until the reader is gone; killing the reader releases it.
    assert own.free(name)
    assert json.loads(own.resources())["live_bytes"] >= 8 << 20
    elsewhere.kill()
    until(lambda: json.loads(own.resources())["live_bytes"] == 0, "a dead reader gives back")


def test_another_cluster_on_the_same_host_is_lent_nothing(endpoint):
    own, stranger = endpoint(), endpoint(token=b"another")
    name, sizes = put(own, data(1 << 20))
    demands = json.dumps({"encrypt": "none", "transport": "shm"})
    with pytest.raises(Exception, match="another host"):
        stranger.fetch("job", "map", "reduce", demands, [(name, 0, sizes[0], [own.address])], False)


def test_tasks_of_one_host_share_memory_without_asking_for_it(client):
    def produce(seed: int) -> mission_control.Reference:
        segment = mission_control.allocate(4 << 20)
        np.frombuffer(segment, np.uint8)[:] = seed
        return mission_control.put(segment, sizes=[1 << 20] * 4)

    def consume(references: list[mission_control.Reference], part: int) -> int:
        return sum(int(np.frombuffer(entry, np.uint8).sum()) for entry in mission_control.fetch(references, part=part))

    with mission_control.job("neighbours"):
        references = client.map(produce, range(6), pure=False)
        done = client.gather([client.submit(consume, references, part, pure=False) for part in range(4)])
        assert done == [sum(range(6)) << 20] * 4

        def result():
            jobs = [job for job in status(client)["jobs"] if job["job"] == "neighbours"]
            found = [
                transfer["transport"] for job in jobs for transfer in job["transfers"] if transfer["transport"]["bytes"]
            ]
            return found[0] if found else None

        facts = until(result, "the transfer is reported")
    assert facts["chosen"] == "shm" and set(facts["bytes"]) == {"shm"} and not facts["fallbacks"]
