"""Incast: the model, and synchronized reads over loopback; what needs a lab is in test_incast_lab.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mission_control import _native
from mission_control.bench import advice as bench_advice
from mission_control.incast import lines, quantities, statistics, synchrony, variables
from mission_control.incast.reads import Reads, measure, serve
from mission_control.scenario import BadInput
from tests.conftest import TOKEN, mission, until

EXAMPLE = ["--senders", "1-48", "--fragment", "16kB,32kB,64kB", "--link", "1Gbit", "--rtt", "1ms", "--buffer", "64KiB"]
PAPER = [*EXAMPLE, "--rto", "200ms", "--initial-window", "1448B", "--model", "paper"]


@contextmanager
def senders(count: int, token: bytes = TOKEN) -> Iterator[list[str]]:
    servers = [serve("127.0.0.1", 0, token) for _ in range(count)]
    try:
        yield [f"127.0.0.1:{port}" for _, port in servers]
    finally:
        for server, _ in servers:
            server.close()


def test_ranges_and_sizes_are_read_as_people_type_them():
    assert quantities.senders("1-4,2,16, 8") == [1, 2, 3, 4, 8, 16]
    assert quantities.sizes("16kB, 64KiB") == [16_000, 65_536]
    for wrong in ("0", "4-2", "a", "", "1-", "1-99999999"):
        with pytest.raises(BadInput, match="as in 1-48"):
            quantities.senders(wrong)
    with pytest.raises(BadInput, match="no unit"):
        quantities.sizes("16")


def test_the_command_predicts_what_the_papers_found():
    done = mission("incast", "predict", *PAPER, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {typed: entry["value"] for typed, entry in result["onset"].items()} == {"16kB": 13, "32kB": 7, "64kB": 4}
    assert all(entry["low"] <= entry["value"] <= entry["high"] for entry in result["onset"].values())
    rows = {(row["fragment_bytes"], row["senders"]): row for row in result["rows"]}
    assert len(rows) == 3 * 48 and rows[16_000, 1]["regime"] == "ideal"
    assert set(rows[16_000, 1]) == {"fragment_bytes", "senders", "goodput_mbit", "ideal_mbit", "regime"}
    # Equation 2 by hand: 47 x 64,000 B in 201 ms and 24.064 ms.
    assert rows[64_000, 47]["goodput_mbit"] == pytest.approx(47 * 64_000 * 8 / 0.225064 / 1e6)
    assert (rows[64_000, 3]["regime"], rows[64_000, 4]["regime"]) == ("ideal", "collapsed")
    shown = mission("incast", "predict", *PAPER)
    assert "64kB: collapses from 4 senders on" in shown.stdout


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["--senders", "0", "--fragment", "64kB"], "write numbers from 1"),
        (["--fragment", "64kB", "--buffer", "1000B"], "holds no packet"),
        (["--fragment", "64kB", "--total", "1MB"], "Use --fragment"),
        (["--fragment", "64kB", "--link", "fast"], "as in"),
        (["--fragment", "64kB", "--rto", "0ms"], "use more than 0"),
        (["--fragment", "64kB", "--model", "oracle"], "paper"),
    ],
)
def test_nonsense_is_one_line_that_names_the_fix(words, result):
    done = mission("incast", "predict", *words)
    assert done.returncode == 2 and result in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_every_byte_of_every_block_is_read_and_every_sender_tells_of_its_kernel():
    with senders(3) as addresses:
        reads = Reads(fragment=50_000, blocks=20, warm_up=2, congestion_control="reno", rto_min_us=20_000)
        result = measure(addresses, reads, TOKEN)
    assert result["ended"] is None and len(result["blocks"]) == 20 and result["bytes"] == 20 * 3 * 50_000
    assert all(seconds > 0 for seconds in result["blocks"])
    assert [flow["sender"] for flow in result["flows"]] == addresses
    for flow in result["flows"]:
        assert flow["bytes"] == 20 * 50_000 and flow["congestion_control"] == "reno" and flow["cwnd"] > 0
        assert flow["delivered"] > 0 and flow["srtt_us"] > 0
        # 20 ms asked; the kernel rounds to its ticks.
        assert flow["rto_min_us"] is None or 20_000 <= flow["rto_min_us"] < 30_000


def test_no_more_senders_are_asked_at_once_than_allowed():
    # Slow senders: one after the other they take longer by a factor of their number.
    with senders(4) as addresses:
        alone = Reads(fragment=1_000_000, blocks=2, warm_up=1, pace=80_000_000, concurrent=1)
        together = Reads(fragment=1_000_000, blocks=2, warm_up=1, pace=80_000_000)
        one, all_ = (measure(addresses, entry, TOKEN)["blocks"] for entry in (alone, together))
    assert min(one) > 2 * max(all_)


def test_the_number_of_senders_is_looked_for_by_trial():
    """That the right one is found is a matter of times: `as_many_flows_as_fill_the_link_where_senders_are_slower`, in
    virtual time (crates/core/src/budget/tests.rs)."""
    # Large fragments, because pacing does not delay what fits into one packet of loopback.
    reads = Reads(fragment=1_000_000, blocks=40, warm_up=0, pace=400_000_000, concurrent="auto")
    with senders(6) as addresses:
        result = measure(addresses, reads, TOKEN)
    assert result["ended"] is None
    tried = {limit for _, limit in result["limits"]}
    assert len(tried) > 1 and tried <= set(range(1, 7)), result["limits"]


def test_lines_that_this_kernel_does_not_take_are_told():
    good, unknown = "sysctl -w net.ipv4.tcp_ecn=1  # both ends", "sysctl -w net.ipv4.no_such=1"
    assert list(lines.refused([good, unknown, "# switches: mark", "mission exec -- CMD"])) == [unknown]
    if os.geteuid() == 0:
        wrong = "ip route change 10.0.0.0/24 dev eth0 rto_mim 5ms"
        result = lines.refused([*lines.of("rto-min", 0.005), *lines.of("window", 2896), wrong])
        assert list(result) == [wrong] and "rto_mim" in result[wrong]


def test_the_minimum_rto_that_is_seen_tells_who_gave_it():
    flows = [{"rto_us": rto, "srtt_us": 4000, "asked": True} for rto in (56_000, 108_000)]
    result = statistics.rto_min(flows, {"route": 200_000, "socket": 50_000, "sysctl": 20_000})
    assert (result["won"], result["observed_us"]) == ("socket", 52_000)
    assert statistics.rto_min([], {"route": 200_000})["won"] is None


def test_senders_that_stand_still_together_are_told_from_those_that_wait_for_the_next_request():
    trace = [(0.0, 0, 100), (0.0, 1, 100), (0.2, 0, 1000), (0.205, 1, 1000)]
    assert synchrony.synchrony(trace, 1000, 0.2) == {"stalls": 2, "together": 2, "at_once": 2}
    # One resumes later; after its fragment each waits for the other, and that is no stall.
    trace = [(0.0, 0, 100), (0.0, 1, 100), (0.2, 0, 1000), (0.3, 1, 1000), (0.6, 0, 2000), (0.6, 1, 2000)]
    assert synchrony.synchrony(trace, 1000, 0.2) == {"stalls": 2, "together": 2, "at_once": 0}


def test_variables_that_go_together_are_found_and_those_that_never_change_are_no_pair():
    random = np.random.default_rng(1)
    senders = []
    for _ in range(2):
        cwnd = random.integers(1, 50, 200)
        rows = zip(cwnd, cwnd**3, -cwnd, random.integers(0, 100, 200), strict=True)
        names = ("cwnd", "unacked", "lost", "srtt_us")
        senders.append([{**dict(zip(names, map(int, row), strict=True)), "backoff": 0} for row in rows])
    found = variables.correlations([*senders, senders[0][: variables.LOOKS_MIN - 1]])
    assert found is not None and found["looks"] == 400 and found["pairs"] == 6
    strong = {frozenset((one["of"], one["with"])): one["rank"] for one in found["strong"]}
    three = ("cwnd", "unacked"), ("cwnd", "lost"), ("unacked", "lost")
    assert strong == {frozenset(pair): -1 if "lost" in pair else 1 for pair in three}
    assert found["rank"][4] == [None] * 5
    assert variables.correlations([senders[0][:10]]) is None


def test_ranks_of_equal_values_are_the_mean_of_theirs():
    assert variables.ranked(np.array([3.0, 1, 3, 2])).tolist() == [3.5, 1, 3.5, 2]


def test_a_sender_that_dies_is_named_and_what_was_measured_is_told():
    with senders(2) as addresses:
        server, port = serve("127.0.0.1", 0, TOKEN)
        mortal = f"127.0.0.1:{port}"
        threading.Timer(0.5, server.close).start()
        reads = Reads(fragment=200_000, blocks=10_000, warm_up=0, pace=80_000_000, deadline_s=20)
        result = measure([*addresses, mortal], reads, TOKEN)
    assert mortal in result["ended"] and result["blocks"] and len(result["blocks"]) < 10_000


def test_a_sender_that_hangs_ends_it_at_its_time():
    with senders(1) as addresses:
        slow = Reads(fragment=100_000, blocks=1000, warm_up=0, pace=1_000_000, deadline_s=1)
        result = measure(addresses, slow, TOKEN)
    assert "deadline of 1 s" in result["ended"] and addresses[0] in result["ended"] and result["bytes"] > 0


def test_who_does_not_know_the_token_gets_nothing():
    with senders(1) as addresses, pytest.raises(ConnectionError, match="tokens differ"):
        measure(addresses, Reads(fragment=1000), b"another")


def test_a_server_limits_connections_and_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = _native.IncastServer(os.dup(listener.fileno()), TOKEN, 1, 10_000)
    with pytest.raises(ConnectionError, match="already serves 1 connections"):
        measure([f"127.0.0.1:{port}"] * 2, Reads(fragment=1000, blocks=1, warm_up=0), TOKEN)
    until(lambda: server.served()[1] == 0, "the connection is over")
    result = measure([f"127.0.0.1:{port}"], Reads(fragment=10_001, blocks=1, warm_up=0), TOKEN)
    assert result["ended"] and not result["blocks"]
    server.close()


def test_strangers_that_only_connect_lock_nobody_out():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = _native.IncastServer(os.dup(listener.fileno()), TOKEN, 4, 10_000)
    strangers = []
    try:
        for _ in range(300):
            own = socket.socket()
            strangers.append(own)
            own.bind(("127.0.0.2", 0))
            own.connect(("127.0.0.1", port))
        began = time.monotonic()
        result = measure([f"127.0.0.1:{port}"] * 4, Reads(fragment=1000, blocks=3, warm_up=0), TOKEN)
        assert result["ended"] is None and len(result["blocks"]) == 3
        # The strangers are there all the time, but for those that made room; until their time for a proof is over.
        assert 64 - 4 <= server.served()[1] <= 64 + 4 or time.monotonic() - began > 10
    finally:
        for own in strangers:
            own.close()
        server.close()


def test_goodput_is_bytes_over_the_time_of_all_blocks_and_has_an_interval():
    run = {"blocks": [0.1] * 50 + [0.3] * 50, "flows": [], "ended": None, "bytes": 0, "seconds": 20.0}
    result = statistics.summary([run], 1_000_000)
    assert result["goodput_mbit"] == pytest.approx(100 * 8 / 20)
    low, high = result["interval95"]
    assert low < result["goodput_mbit"] < high and high - low > 5
    even = statistics.summary([{**run, "blocks": [0.2] * 100}], 1_000_000)
    assert even["interval95"] == pytest.approx([40, 40])
    nothing = statistics.summary([{**run, "blocks": [], "bytes": 500_000, "seconds": 2.0}], 1_000_000)
    assert nothing["goodput_mbit"] == pytest.approx(2)


def test_the_commands_serve_and_measure():
    words = [sys.executable, "-m", "mission_control", "incast", "serve", "--port", "0"]
    serving = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert serving.stderr is not None
    address = serving.stderr.readline().split()[2].rstrip(";")
    measured = ["incast", "measure", "--from", address, "--fragment", "100kB", "--blocks", "30", "--repeat", "2"]
    done = mission(*measured, "--json")
    result = json.loads(done.stdout)
    assert len(result["blocks"]) == 60 and result["goodput_mbit"] > 0
    # Beside other work a measurement says that it does not count, and why.
    assert result["valid"] == (not result["invalid_because"]) and done.returncode == (0 if result["valid"] else 5)
    assert all("CPU of this host was saturated" in why for why in result["invalid_because"]), result
    assert result["interval95"][0] <= result["goodput_mbit"] <= result["interval95"][1]
    assert "goodput" in mission(*measured).stdout
    split = ["incast", "measure", "--from", f"{address},{address}", "--total", "100kB", "--blocks", "4", "--json"]
    assert [flow["bytes"] for flow in json.loads(mission(*split).stdout)["flows"]] == [4 * 50_000 * 2]
    serving.send_signal(signal.SIGINT)
    assert serving.wait(10) == 130
    gone = mission(*measured)
    assert gone.returncode == 3 and address in gone.stderr and "mission incast serve" in gone.stderr


def test_beyond_this_host_both_ends_need_a_token(tmp_path):
    done = mission("incast", "serve", "--bind", "0.0.0.0")
    assert done.returncode == 2 and "--token-file" in done.stderr
    done = mission("incast", "measure", "--from", "10.1.2.3:7001")
    assert done.returncode == 2 and "--token-file" in done.stderr
    empty = tmp_path / "token"
    empty.write_text("\n")
    done = mission("incast", "measure", "--from", "10.1.2.3:7001", "--token-file", str(empty))
    assert done.returncode == 2 and "is empty" in done.stderr


def test_a_measurement_ends_when_it_is_told_to():
    with senders(1) as addresses:
        reads = Reads(fragment=10_000, blocks=10_000_000, warm_up=0, pace=8_000_000)
        result = measure(addresses, reads, TOKEN, lambda blocks: blocks > 20)
    assert result["ended"] == "interrupted" and 20 < len(result["blocks"]) < 10_000_000


def test_the_modern_model_tells_stacks_apart_and_its_terms():
    def rows(*words: str) -> dict[int, float]:
        done = mission(
            "incast", "predict", "--senders", "8,40", "--fragment", "128kB", "--link", "100Mbit", *words, "--json"
        )
        assert done.returncode == 0, done.stderr
        return {row["senders"]: row["goodput_mbit"] for row in json.loads(done.stdout)["rows"]}

    # Measured: 95.6 and 64.8 (docs/measurements/incast-model.md).
    modern, plain = rows(), rows("--no-sack")
    assert modern[8] == pytest.approx(95.6, rel=0.1) and modern[40] == pytest.approx(64.8, rel=0.15)
    assert plain[8] < 0.7 * modern[8]
    assert rows("--without", "overlap,backoff")[40] != modern[40]
    done = mission("incast", "predict", "--fragment", "64kB", "--without", "luck")
    assert done.returncode == 2 and "overlap" in done.stderr


def test_advice_says_whether_incast_happens_and_what_to_type():
    words = ["--senders", "40", "--fragment", "64kB", "--link", "1Gbit", "--buffer", "64KiB"]
    done = mission("incast", "advise", *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bites"] and result["onset"]["low"] <= result["onset"]["value"] <= result["onset"]["high"] < 40
    assert {remedy["kind"] for remedy in result["remedies"]} == {"flows", "rto-min", "dctcp", "buffer", "window"}
    for remedy in result["remedies"]:
        low, high = remedy.get("interval", (0, 0))
        assert remedy["what"] and remedy["lines"] and low <= remedy.get("expected_goodput_mbit", 0) <= high
    expected = [remedy.get("expected_goodput_mbit", 0) for remedy in result["remedies"]]
    assert expected == sorted(expected, reverse=True) and expected[0] > 2 * result["goodput_mbit"]
    unknown = {remedy["kind"]: remedy["unknown"] for remedy in result["remedies"] if "unknown" in remedy}
    assert set(unknown) == {"dctcp", "window"} and "two segments of each sender" in unknown["window"]
    assert not json.loads(mission("incast", "advise", "--senders", "2", "--fragment", "16kB", "--json").stdout)["bites"]
    shown = mission("incast", "advise", *words).stdout
    assert "no prediction: two segments of each sender" in shown
    begins = "Incast happens: goodput collapses from {value} senders on (between {low} and {high})."
    assert (
        shown.startswith(begins.format(**result["onset"])) and "ip route change" in shown and "spark.reducer" in shown
    )
    few = mission("incast", "advise", "--senders", "2", "--fragment", "16kB").stdout
    assert few.startswith("No incast: 2 senders of 16 kB each get about ")
    short = mission("incast", "advise", *words, "--rto", "1ms", "--json")
    assert "10 ms in effect" in json.loads(short.stdout)["warnings"][0]


def test_promises_are_judged_by_their_width_and_by_what_they_miss():
    assert bench_advice.interval_score((80, 100), 90) == 20
    assert bench_advice.interval_score((80, 100), 70) == pytest.approx(20 + 20 * 10)
    assert bench_advice.interval_score((80, 100), 101) == pytest.approx(20 + 20)
    row = {"kind": "flows", "value": 1.0, "expected_goodput_mbit": 90.0, "interval": [80.0, 100.0], "unknown": None}
    rows = [
        {**row, "measured_mbit": found, "inside": bench_advice.inside(row["interval"], found)} for found in (90, 70)
    ]
    rows += [{**row, "kind": "dctcp", "interval": None, "measured_mbit": 50.0, "inside": None}]
    rows += [{**row, "kind": "as it is", "value": None, "measured_mbit": 50.0, "inside": False}]
    found = bench_advice.judged(rows)
    assert found["inside"]["flows"] == [1, 2] and found["inside"]["dctcp"] == [0, 0]
    assert found["narrow"] == [2, 2] and found["unknown"] == 1
    assert found["score"] == pytest.approx((20 / 90 + 220 / 70) / 2)


def test_advice_needs_a_case(tmp_path):
    done = mission("incast", "advise", "--senders", "4")
    assert done.returncode == 2 and "--from-run" in done.stderr
    done = mission("incast", "advise", "--from-run", str(tmp_path))
    assert done.returncode == 2 and "results/<id>" in done.stderr


@pytest.mark.parametrize("flows", ["auto", "all"])
def test_a_job_runs_with_a_budget_that_is_not_given(tmp_path, flows):
    words = ["--size", "8MiB", "--workers", "3", "--partitions", "6", "--transport", "tcp", "--results", str(tmp_path)]
    done = mission("run", "sort", *words, "--flows-per-host", flows, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    wrong = mission("run", "sort", "--flows-per-host", "many")
    assert wrong.returncode == 2 and "--flows-per-host" in wrong.stderr


def test_a_scenario_that_is_no_incast_is_refused():
    path = "scenarios/incast-64k.toml"
    done = mission("run", path, "--in", "local")
    assert done.returncode == 2 and "model or lab" in done.stderr
    done = mission("run", path, "--in", "model", "--set", "topology.kind=two-rack")
    assert done.returncode == 2 and "use a star" in done.stderr


@pytest.mark.long
def test_a_folder_of_scenarios_is_one_report(tmp_path):
    words = ["--in", "model", "--results", str(tmp_path), "--json"]
    done = mission("run", "scenarios/incast-papers/", *words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["studies"]) >= 6 and result["ok"]
    page = (tmp_path / result["results"].rpartition("/")[2] / "report.html").read_text()
    assert page.count("<svg") == len(result["studies"]) and "Figure 4 of paper 000" in page
    sweep = [point for point in result["points"] if point["study"] == "05-rto-sweep"]
    assert {point["variant"] for point in sweep} == {"200 ms", "50 ms", "20 ms", "5 ms", "1 ms"}


@pytest.mark.parametrize("deadline", [-1.0, 0.0, 1e19, 1e30])
def test_a_deadline_that_no_clock_has_is_bad_input(deadline):
    with pytest.raises(BadInput, match="use seconds above 0"):
        measure(["127.0.0.1:1"], Reads(fragment=1000, deadline_s=deadline), TOKEN)
