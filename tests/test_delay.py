"""Links with a delay: the round trip is as configured, and lateness is counted. Needs root."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mission_control.incast.lab import reads_in
from mission_control.incast.reads import Reads
from mission_control.lab import Lab, bonded, delay, namespaces, star, two_path, two_rack
from mission_control.lab.described import topology_of
from mission_control.lab.events import Watching
from mission_control.lab.lab import PREFIX
from mission_control.lab.machine import STATE
from mission_control.lab.topology import Port, Topology
from mission_control.scenario import BadInput, Scenario, with_settings
from tests.conftest import mission, until
from tests.lab import NEEDS_LAB

COUNTED = ("packets", "drops")
LATE = {"frames": 0, "dropped": 0, "refused": 0, "late_ns": 0, "late_ns_max": 0, "late": [0] * 512, "bucket_ns": 20_000}


def delayed(topology: Topology, delay_us: int) -> Topology:
    return replace(topology, delay_us=delay_us)


def rtt_s(lab: Lab, one: str, other: str, times: int = 20) -> float:
    """Return the shortest time of an echo over an established connection: others may use the CPUs during most
    echoes."""
    address = lab.topology.address(one)
    listener = namespaces.inside(lab.namespace(one), lambda: socket.create_server((address, 0)))

    def echo() -> None:
        own, _ = listener.accept()
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with own:
            while word := own.recv(1):
                own.sendall(word)

    thread = threading.Thread(target=echo)
    thread.start()
    asking = namespaces.inside(lab.namespace(other), lambda: socket.create_connection(listener.getsockname(), 5))
    asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    with listener, asking:
        for _ in range(times):
            began = time.monotonic()
            asking.sendall(b"x")
            asking.recv(1)
            took.append(time.monotonic() - began)
    thread.join()
    return min(took)


def left(name: str) -> list[str]:
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [
        *namespaces.names(f"{PREFIX}{name}."),
        *(path.name for path in STATE.glob(f"{name}*")),
        *(thread for thread in threads if thread == "lab-delay"),
    ]


def test_lateness_between_two_looks_is_what_was_counted_in_between():
    before = {**LATE, "frames": 10, "late_ns": 10**9, "late": [0] * 511 + [10], "late_ns_max": 10**8}
    late = [90, 9, *[0] * 509, 11]
    after = {**before, "frames": 110, "late_ns": 10**9 + 100 * 30_000, "late": late}
    result = delay.since(after, before, 1000)
    assert (result["frames"], result["late_us"]) == (100, {"mean": 30.0, "p99": 40.0, "max": 10**5})
    assert delay.invalid_reasons(result) == []
    assert delay.since(before, before, 1000)["late_us"] == {"mean": 0.0, "p99": 0.0, "max": 0.0}


def test_what_was_later_than_a_part_of_the_delay_or_lost_is_not_valid():
    fine = {
        "delay_us": 500,  # of a link; a frame waits for both links of its way in one line
        "frames": 9,
        "dropped": 0,
        "refused": 5,
        "late_us": {"mean": 99.0, "p99": 500, "max": 9000},
    }
    assert delay.invalid_reasons(fine) == []
    (why,) = delay.invalid_reasons({**fine, "late_us": {"mean": 101.0, "p99": 200, "max": 300}})
    assert "101 us late on average" in why and "use slower links" in why
    (why,) = delay.invalid_reasons({**fine, "late_us": {"mean": 9.0, "p99": 520, "max": 900}})
    assert "520 us for one frame in 100" in why
    (why,) = delay.invalid_reasons({**fine, "dropped": 3})
    assert "lost 3 frames" in why


def described(*settings: str) -> Topology:
    return topology_of(with_settings(Scenario(), ["topology.link_rate=100Mbit/s", *settings]).topology)


def test_the_delay_dilates():
    assert described().delay_us == 0
    assert described("topology.link_delay=1ms").delay_us == 1000
    assert described("topology.link_delay=250us", "topology.dilation=10").delay_us == 2500


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["topology.link_delay=250"], 'write a time as in "250 us"'),
        (["topology.link_delay=fast"], "fast"),
        (["topology.link_delay=0us"], "write at least 1 us, not 0us"),
        (["topology.link_delay=2s"], "write at most 1000000 us, not 2s"),
        (["topology.link_delay=20us"], "use 500 us or more dilation"),
    ],
)
def test_a_delay_that_cannot_be_is_refused_in_one_line(settings, says):
    with pytest.raises(BadInput, match=re.escape(says)) as refused:
        described(*settings)
    assert "\n" not in str(refused.value)


class TestInTheLab:
    pytestmark = NEEDS_LAB

    def test_the_round_trip_is_what_was_asked_for(self, name):
        for delay_us in (500, 2500):
            with Lab(delayed(star(hosts=3), delay_us), name) as lab:
                assert rtt_s(lab, "h1", "h2") == pytest.approx(delay.base_rtt_s(delay_us), rel=0.2)
                assert "lab-delay" in left(name)
            assert left(name) == []

    def test_every_topology_has_it(self, name):
        for topology in (two_rack(hosts=4), two_path(hosts=2), bonded(hosts=2)):
            with Lab(delayed(topology, 2500), name) as lab:
                found = rtt_s(lab, topology.hosts[0], topology.hosts[-1])
                assert found == pytest.approx(0.01, rel=0.2), topology.kind
        assert left(name) == []

    def test_the_link_is_filled_and_lateness_is_counted(self, name):
        with Lab(delayed(star(hosts=3), 2500), name) as lab, reads_in(lab) as own:
            # The best of three, because others may use the CPUs meanwhile.
            found = [own.measure(1, Reads(fragment=8 << 20, blocks=2, warm_up=1)) for _ in range(3)]
        result = max(found, key=lambda one: one["goodput_mbit"])
        assert result["goodput_mbit"] > 90, [one["delay"] for one in found]
        assert result["delay"]["frames"] > 3 * (8 << 20) / 1500 and result["delay"]["dropped"] == 0
        assert 0 < result["delay"]["late_us"]["mean"] <= result["delay"]["late_us"]["p99"]
        assert result["valid"] or any(
            "late on average" in why or "processor" in why for why in result["invalid_because"]
        )

    def test_a_frame_waits_once_and_behind_the_queue_of_the_switch(self, name):
        small = replace(star(hosts=9), port=Port(buffer_bytes=16 << 10))
        with Lab(delayed(small, 500), name) as lab, reads_in(lab) as own:
            before = lab.ports(), lab.delays()["frames"]
            own.measure(8, Reads(fragment=64_000, blocks=3, warm_up=1))
            time.sleep(0.1)  # for frames in the lines
            after = lab.ports(), lab.delays()["frames"]
        passed, drops = (sum(x[what] - y[what] for x, y in zip(after[0], before[0], strict=True)) for what in COUNTED)
        # If frames waited on the hosts' side as well, there would be twice as many, including those that the queue
        # drops.
        assert drops > 50 and after[1] - before[1] == pytest.approx(passed, abs=drops / 2)

    def test_a_cut_link_carries_nothing_and_goes_on_when_it_is_restored(self, name):
        with Lab(delayed(star(hosts=2), 500), name) as lab:
            lab.cut("h1")
            until(lambda: "eth0" in namespaces.interfaces_down(lab.namespace("h1")), "the host sees it", 10)
            lab.restore("h1")
            assert rtt_s(lab, "h1", "h2") == pytest.approx(0.002, rel=0.3)

    def test_a_run_in_which_nothing_is_sent_has_a_delay_too(self, name):
        with Lab(delayed(star(hosts=2), 500), name) as lab:
            watching = Watching(lab, ())
            watching.begin()
            assert watching.stop_and_summarize()["delay"]["frames"] < 50, "what a kernel says of itself"

    def test_nothing_is_left_after_an_error_nor_after_a_process_that_was_killed(self, name):
        with pytest.raises(RuntimeError, match="on the way"), Lab(delayed(star(hosts=2), 500), name):
            raise RuntimeError("on the way")
        assert left(name) == []
        code = f"""
from dataclasses import replace
from mission_control.lab import Lab, star
import os, time
lab = Lab(replace(star(hosts=2), delay_us=500), {name!r})
lab.up()
if os.fork() == 0:
    del lab
    os._exit(0)  # a child has no thread to wait for
os.wait()
print("up", flush=True)
time.sleep(60)
"""
        maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert maker.stdout is not None and maker.stdout.readline() == "up\n"
        maker.kill()
        maker.wait()
        assert mission("lab", "down", name).returncode == 0
        assert left(name) == []

    def test_a_lab_that_outlives_its_process_takes_no_delay(self, name, tmp_path):
        path = tmp_path / "own.toml"
        path.write_text('version = 1\n[topology]\nlink_rate = "100 Mbit/s"\nlink_delay = "1 ms"\n')
        done = mission("lab", "up", str(path), "--name", name)
        assert done.returncode == 2 and "a delay line ends with its process" in done.stderr
