"""The lab: real namespaces, links, switch ports. Needs root; `make test-lab` runs these."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from distributed import Client

import mission_control
from mission_control import _native
from mission_control.lab import Lab, Port, bonded, cgroup, namespaces, star, two_path, two_rack
from mission_control.lab.check import TRIALS
from mission_control.lab.congestion import AVAILABLE
from mission_control.lab.lab import PREFIX
from mission_control.lab.machine import ALLOWED, STATE, up
from mission_control.lab.watch import Sample, invalid_reasons
from mission_control.scenario import BadInput, Scenario, load, with_settings
from mission_control.worlds.lab import in_lab
from tests.conftest import mission, status, until
from tests.lab import NEEDS_LAB
from tests.proxy import Limit, Proxy
from tests.repeats import require_valid

pytestmark = NEEDS_LAB

SERVE = """
import socket, sys
own = socket.socket()
own.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, sys.argv[1].encode())
own.bind(("", 5000))
own.listen(64)
print("listens", flush=True)
kept = []
import threading
def drain(one):
    while one.recv(1 << 20):
        pass
while True:
    one, _ = own.accept()
    threading.Thread(target=drain, args=(one,), daemon=True).start()
"""
SEND = """
import socket, sys, time
own = socket.socket()
own.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, sys.argv[1].encode())
own.connect((sys.argv[2], 5000))
until, sent = time.monotonic() + float(sys.argv[3]), 0
while time.monotonic() < until:
    sent += own.send(bytes(65536))
got = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\\0")[0].decode()
print(got, sent)
"""


def python(lab: Lab, host: str, code: str, *words: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *words]
    return lab.host(host).popen(command, stdout=subprocess.PIPE, text=True, **options)


def flows(lab: Lab, congestion_control: str, senders: int, seconds: float) -> tuple[list[str], int, dict]:
    """Long flows from h2, h3, ... to h1: their congestion controls, the bytes of all, and what h1's port counted."""
    server = python(lab, "h1", SERVE, congestion_control)
    assert server.stdout is not None and server.stdout.readline() == "listens\n"
    hosts = [f"h{number + 2}" for number in range(senders)]
    sending = [python(lab, host, SEND, congestion_control, "h1", str(seconds)) for host in hosts]
    ends = [entry.communicate()[0].split() for entry in sending]
    server.kill()
    (port,) = [entry for entry in lab.ports() if entry["port"] == "h1"]
    return [end[0] for end in ends], sum(int(end[1]) for end in ends), port


def left(name: str) -> list[str]:
    return [*namespaces.names(f"{PREFIX}{name}."), *(path.name for path in STATE.glob(f"{name}*"))]


def test_a_port_has_the_rate_and_the_buffer_that_it_was_given(name):
    with Lab(star(hosts=3, link_rate=50_000_000, port=Port(buffer_bytes=96 << 10)), name) as lab:
        names, nbytes, port = flows(lab, "cubic", 2, 3)
        assert names == ["cubic", "cubic"]
        # Of 3 s at 50 Mbit/s some bytes are still in buffers when the senders stop; headers take 5 %. A link without a
        # limit would carry a hundred times as much. The lower bound leaves room for a machine with stolen CPU time.
        assert 0.6 < nbytes / (3 * 50e6 / 8) < 1.15
        assert port["drops"] > 0 and port["marks"] == 0
        assert port["queue_bytes_max"] <= 96 << 10 and port["queue_bytes_p95"] > 48 << 10
        assert port["oversized"] == 0, "a packet is a packet"
    assert left(name) == []


def test_packets_at_a_switch_are_no_longer_their_senders(name):
    """Otherwise hosts would treat a switch's queues as their own, and lose nothing."""
    setting = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    with Lab(two_rack(hosts=4), name) as lab:
        for switch in lab.topology.switches:
            assert namespaces.inside(lab.namespace(switch), setting.read_text).strip() == "1"


def test_hosts_know_each_other_by_name_in_every_topology(name):
    ask = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    for topology in (star(hosts=2), two_rack(hosts=4), two_path(hosts=2)):
        with Lab(topology, name) as lab:
            last = topology.hosts[-1]
            server = python(lab, last, SERVE, "cubic")
            assert server.stdout is not None and server.stdout.readline() == "listens\n"
            assert python(lab, "h1", ask, last).communicate()[0].strip() == topology.address(last)
            for path in range(topology.paths):
                sent = python(lab, "h1", SEND, "cubic", topology.address(last, path), "0.1")
                assert sent.communicate(timeout=20)[0].startswith("cubic"), f"{topology.kind}, path {path}"


def test_ports_of_a_shared_buffer_take_what_others_leave(name):
    """Dynamic threshold with alpha 1: one busy port may use half of the buffer."""
    port = Port(buffer_bytes=200 << 10, shared_bytes=200 << 10, alpha=1.0)
    with Lab(star(hosts=3, port=port), name) as lab:
        _, _, counted = flows(lab, "cubic", 2, 3)
        assert 90 << 10 < counted["queue_bytes_max"] <= 101 << 10


def test_alpha_follows_the_marked_fraction_as_rfc_8257_computes_it():
    """alpha = (1 - g) alpha + g F, with g = 1/16, in 1/1,024."""
    cases = {
        (1024, 0, 10): 960,  # 1 - 1/16
        (1024, 10, 10): 1024,  # all marked: stays 1
        (512, 5, 10): 512,  # half marked, from half before
        (0, 10, 10): 64,  # g
        (160, 1, 4): 166,  # 160 - 10 + 1024 / 16 / 4
        (8, 0, 4): 0,  # less than 1/64 becomes 0
    }
    for (alpha, marked, of), expected in cases.items():
        assert _native.Dctcp.alpha_after(alpha, marked, of) == expected


@pytest.fixture
def dctcp():
    if "dctcp" in AVAILABLE.read_text().split():
        yield
        return
    own = _native.Dctcp()
    yield
    own.close()


def test_a_probe_of_ecn_ends_though_its_sender_trickles(endpoint, dctcp):
    """A malicious worker must not block threads of others for ever."""
    own, reader = endpoint(), endpoint()
    # The handshake passes at once; of the 256 KiB of a probe, 160 arrive in 10 s.
    with Proxy(own.address, limit=Limit(16384)) as slow, pytest.raises(OSError, match="1 of 2 senders did not end"):
        reader.probe_ecn([own.address, slow.address])


def test_dctcp_keeps_the_queue_at_the_mark_and_loses_no_goodput(name, dctcp):
    threshold = 30 << 10
    port = Port(buffer_bytes=256 << 10, ecn_bytes=threshold)
    with Lab(star(hosts=3, port=port), name) as lab:
        _, by_cubic, cubic = flows(lab, "cubic", 2, 5)
    with Lab(star(hosts=3, port=port), name) as lab:
        names, by_dctcp, dctcp = flows(lab, "dctcp", 2, 5)
    assert names == ["dctcp", "dctcp"]
    assert cubic["marks"] == 0 and dctcp["marks"] > 0
    assert cubic["queue_bytes_p50"] > 4 * threshold and dctcp["queue_bytes_p50"] < 2 * threshold
    assert by_dctcp > 0.95 * by_cubic


def test_dctcp_without_ecn_is_reno_and_says_so(name, dctcp):
    with Lab(star(hosts=2), name) as lab:
        server = python(lab, "h1", SERVE, "cubic")
        assert server.stdout is not None and server.stdout.readline() == "listens\n"
        assert python(lab, "h2", SEND, "dctcp", "h1", "0.2").communicate()[0].startswith("reno")


def test_links_are_cut_restored_and_slowed_while_the_lab_runs(name):
    with Lab(star(hosts=2), name) as lab:
        server = python(lab, "h1", SERVE, "cubic")
        assert server.stdout is not None and server.stdout.readline() == "listens\n"
        assert mission("lab", "link", "h1", "rate", "5mbit", "--name", name).returncode == 0
        _, sent = python(lab, "h2", SEND, "cubic", "h1", "1").communicate()[0].split()
        (port,) = [entry for entry in lab.ports() if entry["port"] == "h1"]
        assert port["settings"]["bytes_per_second"] == 625_000 and port["drops"] > 0, sent
        lab.cut("h1")
        sender = python(lab, "h2", SEND, "cubic", "h1", "0.1")
        with pytest.raises(subprocess.TimeoutExpired):
            sender.wait(0.5)
        lab.restore("h1")
        assert sender.communicate(timeout=30)[0].startswith("cubic"), "it goes on where it was"
        lab.mark(30 << 10)
        assert all(entry["settings"]["ecn_bytes"] == 30 << 10 for entry in lab.ports())
    assert mission("lab", "link", "h1", "sideways").returncode == 2


OWNER = """
import json, sys
from mission_control import _native
own = _native.Endpoint(sys.argv[1], b"lab", memory_limit=1 << 30, spool_folder="/tmp", flows_per_host=10)
name, _ = own.put([bytes(range(256)) * (1 << 16)], "job", json.dumps({"transport": "mptcp"}))
print(json.dumps([own.address, name, json.loads(own.environment)["interfaces"]]), flush=True)
sys.stdin.read()
"""
READER = """
import json, sys
from mission_control import _native
own = _native.Endpoint(sys.argv[1], b"lab", memory_limit=1 << 30, spool_folder="/tmp", flows_per_host=10)
address, name, size = sys.argv[2], sys.argv[3], 1 << 24
demands = json.dumps({"encrypt": "none", "transport": "mptcp"})
(part,), _, _ = own.fetch("job", "map", "reduce", demands, [(name, 0, size, [address])], False)
assert bytes(part) == bytes(range(256)) * (1 << 16)
print(json.dumps(json.loads(own.transfers())[0]["transport"]))
"""


def test_multipath_uses_both_paths(name):
    with Lab(two_path(hosts=2), name) as lab:
        owner = python(lab, "h1", OWNER, lab.host("h1").address, stdin=subprocess.PIPE)
        assert owner.stdout is not None
        address, named, interfaces = json.loads(owner.stdout.readline())
        assert interfaces == 2, "those of the host, not of the machine"
        facts = json.loads(python(lab, "h2", READER, lab.host("h2").address, address, named).communicate()[0])
        assert max(entry["subflows"] for entry in facts["negotiated"]) == 2, facts
        owner.communicate("")
        carried = [port["bytes"] for port in lab.ports() if port["port"] == "h2"]
        assert len(carried) == 2 and min(carried) > 0.3 * sum(carried), carried


def test_two_labs_do_not_touch_each_other(name):
    with Lab(star(hosts=2), name) as one, Lab(star(hosts=2), f"{name}-b") as other:
        assert one.processes() == {}
        sleeper = python(other, "h1", "import time; time.sleep(60)")
        while not other.processes():
            time.sleep(0.01)
        one.down()
        assert sleeper.poll() is None and other.processes() == {sleeper.pid: "h1"}
    assert sleeper.wait(10) == -signal.SIGKILL
    assert left(name) == left(f"{name}-b") == []


def test_labs_that_are_made_at_once_get_names_of_their_own():
    made = [Lab(star(hosts=2)) for _ in range(3)]
    with ExitStack() as stack:
        names = {stack.enter_context(lab).name for lab in made}
        assert len(names) == 3
        with pytest.raises(BadInput, match="is up"):
            Lab(star(hosts=2), made[0].name).up()
        assert len(namespaces.names(f"{PREFIX}{made[0].name}.")) == 3, "one that is refused takes nothing down"


def test_several_processes_look_at_the_machine_at_once():
    """Tests check concurrently, two at a time. A killed check has left a namespace behind."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    namespaces.batch("ip", [f"netns add {TRIALS}{ended.pid}"])
    code = "from mission_control.lab.check import check; print([entry.what for entry in check() if entry.there])"
    looking = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = [process.communicate()[0] for process in looking]
    assert all(process.returncode == 0 for process in looking)
    assert found[0] and len(set(found)) == 1
    assert namespaces.names(TRIALS) == []


def test_nothing_is_left_of_a_lab_that_was_killed(name):
    """Half of the cycles end with kill -9, at any time."""
    allowed = ALLOWED.read_text()
    before = set(namespaces.names(""))
    code = f"from mission_control.lab import Lab, star; import time; Lab(star(hosts=8), {name!r}).up(); time.sleep(60)"
    for cycle in range(6):
        maker = subprocess.Popen([sys.executable, "-c", code])
        time.sleep(0.4 + 0.1 * cycle)
        maker.kill()
        maker.wait()
        done = mission("lab", "down", name)
        assert done.returncode == 0 or "no lab" in done.stderr, done.stderr
        with Lab(star(hosts=8), name):
            pass
        assert left(name) == []
    assert set(namespaces.names("")) == before
    # A congestion control goes when the kernel has time for it.
    until(lambda: ALLOWED.read_text() == allowed, "what the machine allows is as it was")


def test_the_command_builds_shows_and_removes_a_lab(name):
    words = ["two-rack", "--hosts", "6", "--ecn-threshold", "30KiB", "--switch", "paper-003", "--name", name]
    done = mission("lab", "up", *words)
    try:
        assert done.returncode == 0 and "[s3] ══ s1 (100 Mbit/s) ══ s2 (100 Mbit/s)" in done.stdout, (
            done.stdout + done.stderr
        )
        again = mission("lab", "up", "star", "--name", name)
        assert again.returncode == 2 and f"mission lab down {name}" in again.stderr
        inside = mission("lab", "exec", "h3", "--name", name, "--", "sh", "-c", "cat /etc/hosts; exit 7")
        assert inside.returncode == 7 and "10.77.0.6 h6" in inside.stdout
        assert mission("lab", "exec", "h9", "--name", name, "--", "true").returncode == 2
        shown = json.loads(mission("lab", "show", "--name", name, "--json").stdout)
        assert {port["port"] for port in shown["ports"]} == {"h1", "h2", "h3", "h4", "h5", "h6", "s1", "s2", "s3"}
        assert all(port["settings"]["ecn_bytes"] == 30 << 10 for port in shown["ports"])
        assert all(port["settings"]["limit_bytes"] == 131_072 for port in shown["ports"])
        assert "768 KiB shared by 12 ports, at most 128 KiB for each" in done.stdout.replace(".0", "")
    finally:
        done = mission("lab", "down", name)
    assert done.returncode == 0 and left(name) == []


def run_in_lab(tmp_path: Path, *words: str) -> tuple[int, dict]:
    done = mission("run", "sort", "--in", "lab", "--results", str(tmp_path), "--json", *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_job_runs_in_the_lab_and_its_ports_tell_what_it_moved(tmp_path):
    words = ["--topology", "two-rack", "--hosts", "4", "--size", "32MiB", "--partitions", "4", "--transport", "tcp"]
    status, result = run_in_lab(tmp_path, *words, "--link-rate", "50Mbit/s")
    assert result["world"] == "lab" and all(result["checks"].values()) and not result["errors"], result
    require_valid(result, in_time=False)
    assert status == (0 if result.get("valid", True) else 5)
    (job,) = result["jobs"]
    (shuffle,) = [transfer for transfer in job["transfers"] if transfer["pattern"] == "shuffle"]
    moved = shuffle["bytes"] - shuffle["local_bytes"]
    into_hosts = sum(port["bytes"] for port in result["ports"] if port["port"].startswith("h"))
    assert 1.0 < into_hosts / moved < 1.2, "headers, requests and control beside the bytes"
    assert {"queue_bytes_p50", "queue_bytes_p95", "queue_bytes_max", "drops", "marks"} <= set(result["ports"][0])
    assert all(port["oversized"] == 0 for port in result["ports"])


def test_a_run_on_links_that_the_machine_cannot_fill_is_not_valid(tmp_path):
    words = ["--topology", "star", "--hosts", "4", "--size", "1GiB", "--partitions", "8", "--transport", "tcp"]
    status, result = run_in_lab(tmp_path, *words, "--link-rate", "10Gbit/s", "--buffer", "1MiB")
    assert (status, result["valid"]) == (5, False)
    assert any("saturated" in why or "the machine took" in why for why in result["invalid_because"])


TALK = """
import socket
listening = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listening.getsockname())
other, _ = listening.accept()
name = lambda own: own.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\\0")[0].decode()
print(name(one), name(other))
"""


def test_exec_gives_an_unchanged_program_another_transport_and_leaves_nothing(tmp_path):
    available = AVAILABLE.read_text()
    result = tmp_path / "told.json"
    words = ["--transport", "dctcp", "--rto-min", "20ms", "--pace", "50mbit", "--report", str(result)]
    done = mission("exec", *words, "--", sys.executable, "-c", f"{TALK}\nraise SystemExit(7)")
    assert done.returncode == 7 and done.stdout == "dctcp dctcp\n", done.stdout + done.stderr
    (agreed,) = json.loads(result.read_text())["agreed"]
    assert (agreed["congestion_control"], agreed["connections"]) == ("dctcp", 2)
    assert agreed["pacing_bytes_per_second"] == 6_250_000
    assert agreed["rto_min_us"] == 20_000
    assert "2 connections had dctcp, minimum RTO 20 ms, at most 50 Mbit/s each" in done.stderr
    assert not list(cgroup.root().glob(f"{cgroup.PREFIX}*"))
    # A congestion control goes when the kernel has time for it.
    until(lambda: AVAILABLE.read_text() == available, "the congestion control is gone")
    assert mission("exec", "--transport", "nothing", "--", "true").returncode == 2


def test_a_window_that_is_asked_for_is_kept_when_data_comes(tmp_path):
    """The kernel replaces the window with the first full segments, unless the buffer has no room."""
    send = "import threading\nthreading.Thread(target=other.sendall, args=(bytes(1 << 20),)).start()\nleft = 1 << 20\n"
    receive = "while left: left -= len(one.recv(left))\nprint(one.getsockopt(socket.IPPROTO_TCP, 10))"
    done = mission("exec", "--window", "16kB", "--", sys.executable, "-c", f"{TALK}\n{send}{receive}")
    assert done.returncode == 0 and int(done.stdout.split()[-1]) < 32_000, done.stdout + done.stderr


def test_a_bonded_pair_carries_one_connection_over_both_links(name):
    with Lab(bonded(hosts=2, link_rate=20_000_000, port=Port(buffer_bytes=128 << 10)), name) as lab:
        _, _, _ = flows(lab, "cubic", 1, 3)
        carried = {port["port"]: port["bytes"] for port in lab.ports()}
        one_link = 3 * 20e6 / 8
        # A shared machine sometimes reaches less than both links; one link alone could not carry this much.
        assert carried["h1"] + carried["h1-2"] > 1.2 * one_link, carried
        assert 0.9 < carried["h1"] / carried["h1-2"] < 1.1, "packets take the links in turn"


def test_links_of_ones_own_come_from_a_scenarios_file(name, tmp_path):
    path = tmp_path / "own.toml"
    links = '{a="h1", b="s1", rate="50 Mbit/s"}, {a="s1", b="s2", rate="20 Mbit/s"}, {a="s2", b="h2"}, {a="s2", b="h3"}'
    path.write_text(f'version = 1\n[topology]\nkind = "custom"\nlinks = [{links}]\n[stack]\nprofile = "2009"\n')
    done = mission("lab", "up", str(path), "--name", name)
    try:
        assert done.returncode == 0 and "[s1] ══ s2 (20 Mbit/s)" in done.stdout, done.stdout + done.stderr
        lab = Lab.open(name)
        result = lab.host("h3").run(
            ["sh", "-c", "ip route; cat /proc/sys/net/ipv4/tcp_sack"], capture_output=True, text=True
        )
        assert "initcwnd 2 rto_min lock 200ms" in result.stdout and result.stdout.endswith("\n0\n")
        server = python(lab, "h3", SERVE, "reno")
        assert server.stdout is not None and server.stdout.readline() == "listens\n"
        assert python(lab, "h1", SEND, "reno", "h3", "0.2").communicate()[0].startswith("reno")
    finally:
        mission("lab", "down", name)
    for wrong, says in (
        ('{a="h1", b="h2"}', "put a switch"),
        ('{a="h1", b="s1"}, {a="h2", b="s1"}, {a="h3", b="s2"}', "in pieces"),
        ('{a="h1", b="s1"}, {a="h2", b="s2"}, {a="s1", b="s2"}, {a="s1", b="s3"}, {a="s2", b="s3"}', "loop"),
        ('{a="h1", b="s1"}, {a="h1", b="s1", path=1}, {a="h2", b="s1"}', "two links between"),
        ('{a="h1", b="s1", path=1}, {a="h2", b="s1"}', "no link on path 0"),
        ('{a="h1", b="s1"}', "use 2 to"),
    ):
        path.write_text(f'version = 1\n[topology]\nkind = "custom"\nlinks = [{wrong}]\n')
        refused = mission("lab", "up", str(path), "--name", name)
        assert refused.returncode == 2 and says in refused.stderr, refused.stderr
    assert left(name) == []


def test_queues_are_traced_while_packets_come(name):
    with Lab(star(hosts=2, link_rate=20_000_000), name) as lab:
        server = python(lab, "h1", SERVE, "cubic")
        assert server.stdout is not None and server.stdout.readline() == "listens\n"
        sender = python(lab, "h2", SEND, "cubic", "h1", "5")
        done = mission("lab", "trace", "--seconds", "0.5", "--port", "h1", "--name", name)
        sender.wait()
        head, *rows = done.stdout.splitlines()
        assert head == "seconds,switch,port,queue_bytes,backlog_bytes" and len(rows) > 100
        assert {tuple(row.split(",")[1:3]) for row in rows} == {("s1", "h1")}
        times = [float(row.split(",")[0]) for row in rows]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= 0.5


def scenario(*settings: str) -> Scenario:
    common = ["topology.link_rate=20Mbit/s", "workload.size=8MiB", "workload.partitions=4"]
    return with_settings(load("sort"), [*common, *settings])


def chosen(client: Client, job: str) -> str:
    """Return the first leg of a job's plan, and why DCTCP is not in it."""
    (own,) = [entry for entry in status(client)["jobs"] if entry["job"] == job]
    refused = dict(map(tuple, own["plan"]["refused"]))
    return own["plan"]["legs"][0]["transport"] + ": " + refused.get("dctcp", "")


def test_dctcp_is_chosen_when_switches_mark_and_left_when_they_stop():
    """Paper 001, 5.4: turning ECN on in all switches prompts the Mission Controller to switch."""
    with in_lab(scenario()) as site, site.connect() as client, mission_control.job("waits", client=client):
        lab = Lab.open(next(entry for entry in up() if entry.startswith("star")))
        until(lambda: "lost and none was marked" in chosen(client, "waits"), "it is known that nobody marks")
        assert chosen(client, "waits").startswith("tcp")
        lab.mark(20 << 10)
        until(lambda: chosen(client, "waits").startswith("dctcp"), "DCTCP is chosen", seconds=30)
        lab.mark(0)
        until(lambda: chosen(client, "waits").startswith("tcp"), "it is left", seconds=30)
        assert "lost and none was marked" in chosen(client, "waits")


def test_a_peer_that_downgrades_without_a_word_is_found_out(name):
    with Lab(star(hosts=2), name) as lab:
        route = "ip route change 10.77.0.0/24 dev eth0 proto kernel scope link src 10.77.0.1 congctl lock reno"
        lab.host("h1").run(route.split(), check=True)
        owner = python(lab, "h1", OWNER.replace('"mptcp"', '"dctcp"'), lab.host("h1").address, stdin=subprocess.PIPE)
        assert owner.stdout is not None
        address, named, _ = json.loads(owner.stdout.readline())
        reader = READER.replace('"mptcp"', '"dctcp"') + "\nsys.stdout.flush(); sys.stdin.read()"
        reading = python(lab, "h2", reader, lab.host("h2").address, address, named, stdin=subprocess.PIPE)
        assert reading.stdout is not None
        facts = json.loads(reading.stdout.readline())
        assert "dctcp was planned, the sender's kernel uses reno" in facts["fallbacks"], facts
        # The connection is kept for a moment, and the kernel reports the same.
        port = address.rpartition(":")[2]
        shown = lab.host("h1").run(["ss", "-tinH", "sport", "=", f":{port}"], capture_output=True, text=True).stdout
        assert " reno " in shown and "dctcp" not in shown, shown
        reading.communicate("")
        owner.communicate("")


def test_a_path_that_is_cut_in_the_middle_costs_no_byte(tmp_path):
    events = '[{after="1 s", do="cut", host="h2", path=1}, {after="1 s", do="cut", host="h3", path=0}]'
    words = ["--topology", "two-path", "--hosts", "4", "--size", "32MiB", "--partitions", "4", "--transport", "mptcp"]
    status, result = run_in_lab(tmp_path, *words, "--link-rate", "20Mbit/s", "--set", f"topology.events={events}")
    assert all(result["checks"].values()) and not result["errors"], result
    assert status in (0, 5), "its bytes are asked for, and not its times"


def test_one_host_with_one_interface_takes_nothing_from_the_others(tmp_path):
    paths = [f'{{a="h{host}", b="s{path + 1}", path={path}}}' for host in (1, 2, 3) for path in (0, 1)]
    # The last one is the scheduler's.
    paths += ['{a="h4", b="s1"}', '{a="h5", b="s1"}']
    file = tmp_path / "own.toml"
    links = ", ".join(paths)
    file.write_text(f'version = 1\nworld = "lab"\n[topology]\nkind = "custom"\nlinks = [{links}]\n')
    done = mission("run", str(file), "--size", "16MiB", "--partitions", "4", "--results", str(tmp_path), "--json")
    assert done.returncode in (0, 5), done.stderr
    result = json.loads(done.stdout)
    assert all(result["checks"].values()) and not result["errors"], result
    facts = result["jobs"][0]["transfers"][-1]["transport"]
    # The six ways between the three, and the six from or to the fourth, carry about the same.
    assert min(facts["bytes"].get(transport, 0) for transport in ("mptcp", "tcp")) > 2 << 20, facts
    assert {entry["subflows"] for entry in facts["negotiated"] if entry["transport"] == "mptcp"} == {2}, facts
    assert not [fallback for fallback in facts["fallbacks"] if "does not support it" in fallback], facts


def test_a_host_that_dies_in_the_middle_costs_no_byte(tmp_path):
    words = ["--hosts", "5", "--size", "32MiB", "--partitions", "8", "--link-rate", "20Mbit/s", "--transport", "tcp"]
    event = 'topology.events=[{after="1500 ms", do="die", host="h2"}]'
    status, result = run_in_lab(tmp_path, *words, "--set", event)
    assert all(result["checks"].values()) and not result["errors"], result
    assert status in (0, 5), "its bytes are asked for, and not its times"
    records = Path(result["results"], "records.jsonl").read_text()
    assert '"worker-left"' in records, "it was there, and died"


def test_an_encrypted_cluster_is_built_in_the_lab(tmp_path):
    words = ["--hosts", "3", "--size", "8MiB", "--partitions", "3", "--link-rate", "20Mbit/s", "--encrypt"]
    status, result = run_in_lab(tmp_path, *words)
    assert all(result["checks"].values())
    assert status in (0, 5), "its bytes are asked for, and not its times"
    negotiated = [entry for transfer in result["jobs"][0]["transfers"] for entry in transfer["transport"]["negotiated"]]
    assert negotiated and all(entry["tls"] and entry["authenticated"] for entry in negotiated)


def test_a_run_whose_processors_were_lent_to_others_is_not_valid():
    def moving(stolen: float) -> Sample:
        return Sample(0.125, (0.3, 0.2), (0.9,), stolen)

    assert invalid_reasons([moving(0.01)] * 8, []) == []
    assert invalid_reasons([moving(0.0), moving(0.1)] * 4, []) == [
        "the hypervisor stole 5% of the CPU time: measure again later"
    ]
    idle = Sample(0.125, (0.0, 0.0), (0.0,), 0.5)
    assert invalid_reasons([moving(0.0), idle], []) == [], "nothing moved then"


def test_a_run_that_does_not_show_what_it_is_about_is_not_valid(tmp_path):
    words = ["--hosts", "2", "--size", "4MiB", "--partitions", "2", "--link-rate", "20Mbit/s", "--transport", "tcp"]
    status, result = run_in_lab(tmp_path, *words, "--set", 'expect.condition=["marks"]')
    assert status == 5 and "no marks at any port, but the run tests them" in result["invalid_because"]


def test_exec_gives_an_unchanged_program_two_paths(name):
    assert shutil.which("iperf3"), "a program that nobody changed for this: install iperf3"
    with Lab(two_path(hosts=2), name) as lab:
        result = f"/tmp/{name}"
        own = [sys.executable, "-m", "mission_control", "exec", "--transport", "mptcp"]
        server = lab.host("h1").popen([*own, "--", "iperf3", "-s", "-1"], stdout=subprocess.PIPE, text=True)
        until(lambda: b"5201" in lab.host("h1").run(["ss", "-tlnH"], capture_output=True).stdout, "iperf3 listens")
        words = [*own, "--report", result, "--", "iperf3", "-c", "h1", "-t", "2"]
        done = lab.host("h2").run(words, capture_output=True, text=True)
        server.wait(20)
        agreed = json.loads(Path(result).read_text())
        Path(result).unlink()
        assert done.returncode == 0 and set(agreed["subflows"]) == {"2"}, done.stderr
        assert "had mptcp with 2 subflows" in done.stderr
        carried = [port["bytes"] for port in lab.ports() if port["port"] == "h1"]
        assert min(carried) > 0.3 * sum(carried)
