"""Hadoop's stand-alone jobs and the gather, as real jobs whose bytes are compared; scenarios of both; equation 5."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import mission_control
from mission_control.experiments import engine, report
from mission_control.experiments.overhead import incast_overhead, overheads
from mission_control.experiments.points import planned
from mission_control.experiments.result import Point
from mission_control.scenario import BadInput, load, validate
from mission_control.workloads import WORKLOADS
from mission_control.workloads.blocks import Read, ReadSettings, Write, WriteSettings
from mission_control.workloads.gather import Counted, Gather, GatherSettings, tables
from mission_control.workloads.mix import Shuffle, ShuffleSettings
from tests.conftest import mission, status, until
from tests.lab import NEEDS_LAB

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def quiet(_: str) -> None:
    pass


def done(work, client, name: str, moved: int):
    """Run a job that moves a number of bytes; return its transfers by stages."""

    def transfers():
        (job,) = [job for job in status(client)["jobs"] if job["job"] == name]
        return {(entry["from"], entry["to"]): entry for entry in job["transfers"]}

    with mission_control.job(name, client=client):
        work.prepare(client, quiet)
        work.run(client, quiet)
        # Workers report some times a second.
        until(lambda: sum(entry["served_bytes"] for entry in transfers().values()) == moved, "all bytes reported")
        return transfers()


def test_each_block_is_stored_on_as_many_hosts_as_it_has_replicas(client, tmp_path):
    # Two whole blocks for each worker, and one that is shorter.
    write = Write(WriteSettings(size="6250 KiB", block="1 MiB", replication=3), 0, tmp_path, workers=3)
    moved = done(write, client, "write", 2 * 6250 * 1024)
    assert set(moved) == {("write-block", "write-replica"), ("write-replica", "write-replica")}
    places, made = write.replicas, client.gather(write.made)
    assert len(places) == 7 and all(len(set(homes)) == 3 for homes in places)
    assert sum(sum(one.reference.sizes) for one in made) == 3 * 6250 * 1024
    futures = write.made
    checks = write.check(client, quiet)
    assert checks == {"content of every replica": True, "replicas where they belong": True}
    # A replica with other bytes is detected, and so is one on another host.
    write.made, write.run_id = [futures[0], futures[4], *futures[2:]], "again"
    checks = write.check(client, quiet)
    assert not checks["content of every replica"]


def test_with_one_replica_no_byte_moves(client, tmp_path):
    write = Write(WriteSettings(size="2 MiB", block="512 KiB", replication=1), 0, tmp_path, workers=3)
    assert done(write, client, "write-one", 0) == {}
    assert all(write.check(client, quiet).values())


def test_more_replicas_than_workers_are_refused(tmp_path):
    with pytest.raises(BadInput, match="3 replicas on 2 workers: use more workers"):
        Write(WriteSettings(), 0, tmp_path, workers=2)
    asked = mission("run", "write", "--workers", "2", "--size", "1MiB", "--results", str(tmp_path))
    assert asked.returncode == 2 and asked.stderr.count("\n") == 1 and "use more workers" in asked.stderr


def test_no_block_is_read_where_it_lies(client, tmp_path):
    read = Read(ReadSettings(size="4500 KiB", block="512 KiB"), 0, tmp_path, workers=3)
    (moved,) = done(read, client, "read", 4500 * 1024).values()
    assert moved["local_bytes"] == 0
    assert read.check(client, quiet) == {"content": True}
    read.found[0] = [0]
    assert read.check(client, quiet) == {"content": False}


def test_a_shuffle_has_a_map_task_for_each_block(client, tmp_path):
    shuffle = Shuffle(ShuffleSettings(size="3 MiB", block="512 KiB"), 0, tmp_path, workers=3)
    (moved,) = done(shuffle, client, "shuffle-blocks", 18 * shuffle.part_bytes).values()
    assert (shuffle.objects, shuffle.part_bytes) == (6, (3 << 20) // 18) and moved["pattern"] == "shuffle"
    assert shuffle.check(client, quiet) == {"content": True}


@pytest.mark.parametrize(("senders", "expected"), [("auto", 2), (7, 7)])
def test_a_gather_takes_other_bytes_of_every_sender_in_each_round(client, tmp_path, senders, expected):
    settings = GatherSettings(fragment="40 kB", senders=senders, rounds=5, warm_up=2)
    work = Gather(settings, 0, tmp_path, workers=3)
    (moved,) = done(work, client, f"gather-{senders}", 7 * expected * 40_000).values()
    assert (work.senders, len(work.seconds), moved["pattern"]) == (expected, 5, "gather")
    assert moved["local_bytes"] == 0
    assert len({tuple(sums) for sums in work.came}) == 7
    assert work.check(client, quiet) == {"content of every fragment": True}
    work.came[3][0] ^= 1
    assert work.check(client, quiet) == {"content of every fragment": False}


def test_a_run_of_a_gather_has_its_rounds_and_no_kernels_of_hosts(tmp_path):
    words = ["--fragment", "16kB", "--rounds", "4", "--workers", "3", "--results", str(tmp_path), "--json"]
    ran = mission("run", "gather", *words)
    assert ran.returncode == 0, ran.stderr
    (point,) = json.loads(ran.stdout)["points"]
    assert (point["senders"], point["fragment_bytes"], len(point["rounds"])) == (2, 16_000, 4)
    measures = {name: one["value"] for name, one in point["measures"].items()}
    assert measures["gather_seconds"] == pytest.approx(sum(point["rounds"]))
    assert measures["goodput"] == pytest.approx(4 * 2 * 16_000 * 8 / sum(point["rounds"]) / 1e6)
    assert not {"timeouts", "of_ideal", "drops"} & set(measures)


def test_a_part_of_the_ideal_is_expected_where_the_ideal_is_known(tmp_path):
    expecting = {"workload": {"kind": "gather"}, "expect": {"goodput_of_ideal_min": 0.95}}
    with pytest.raises(BadInput, match="link_rate that is auto"):
        validate(expecting)
    scenario = validate({**expecting, "topology": {"link_rate": "100 Mbit/s"}})
    (one,) = planned("gather", scenario, ["lab"])
    work = Gather(GatherSettings(), 0, tmp_path, workers=48)
    for part, held in ((0.96, True), (0.94, False)):
        point = one.point()
        scenario.workload.found(point, SimpleNamespace(made=[work]), scenario)
        work.seconds = [47 * 64_000 * 8 / point.ideal_mbit / part / 1e6] * 3
        scenario.workload.found(point, SimpleNamespace(made=[work]), scenario)
        assert point.expectations == {"goodput at least 95% of the ideal": held}
        assert WORKLOADS["gather"].measures["of_ideal"].of(point) == pytest.approx(part)
    with pytest.raises(BadInput, match="goodput_of_ideal_min"):
        validate({"workload": {"kind": "write"}, "expect": {"goodput_of_ideal_min": 0.95}})


def test_the_kernels_tables_are_read_by_name(tmp_path):
    file = tmp_path / "snmp"
    file.write_text("Tcp: RtoMin RetransSegs\nTcp: 200 7\nUdp: InDatagrams\nUdp: 3\n")
    assert tables(file) == {"Tcp": {"RtoMin": 200, "RetransSegs": 7}, "Udp": {"InDatagrams": 3}}
    assert Counted() == (0, 0)


def test_equation_5_is_the_part_that_the_default_timeout_adds():
    assert incast_overhead(15.0, 10.0) == 0.5 and incast_overhead(10, 10) == 0
    with pytest.raises(ValueError, match="above 0"):
        incast_overhead(1.0, 0.0)


def test_overhead_is_that_of_variants_that_differ_in_their_timeout_alone(tmp_path):
    sets = {
        "short": {"stack.rto_min": "1 ms"},
        "long": {"stack.rto_min": "200 ms"},
        "tuned, short": {"stack.rto_min": "1 ms", "control.flows_per_host": 20},
        "tuned, long": {"control.flows_per_host": 20},
        "another": {"control.flows_per_host": 30},
    }
    compare = [{"name": name, "set": values} for name, values in sets.items()]
    scenario = validate({"workload": {"kind": "read"}, "study": {"compare": compare, "repeat": 2}})
    work = planned("s", scenario, ["lab"])
    seconds = {"short": (10, 20), "long": (15, 25), "tuned, short": (4, 4), "tuned, long": (4, 5), "another": (1, 1)}
    points = []
    for one in work:
        value = {"value": seconds[one.variant.name][one.repetition], "unit": "s"}
        points.append(Point.model_validate({**one.bare.model_dump(), "ok": True, "measures": {"job_seconds": value}}))
    found = {one.variant: one for one in overheads(work, points)}
    assert {name: one.to for name, one in found.items()} == {"long": "short", "tuned, long": "tuned, short"}
    assert (found["long"].median, found["long"].low, found["long"].high) == (0.375, 0.25, 0.5)
    assert (found["tuned, long"].job_seconds, found["tuned, long"].job_seconds_1ms) == (4.5, 4)
    points[1].valid = False  # the first of the long ones
    assert overheads(work, points)[0].median == 0.25
    result = engine.summed({"s": scenario}, work, points, tmp_path, False)
    drawn = report.page(result, [])
    assert "equation 5" in drawn and "incast overhead" in drawn.lower()


def test_every_scenario_of_hadoop_pairs_its_timeouts():
    names = sorted(path.stem for path in (SCENARIOS / "hadoop").glob("*.toml"))
    assert [name.partition("-")[2] for name in names] == ["write", "read", "shuffle", "sort"]
    for name in names:
        scenario = load(str(SCENARIOS / "hadoop" / f"{name}.toml"))
        work = planned(name, scenario, ["lab"])
        point = {"ok": True, "measures": {"job_seconds": {"value": 1.0, "unit": "s"}}}
        points = [Point.model_validate({**one.bare.model_dump(), **point}) for one in work]
        assert [one.median for one in overheads(work, points)] == [0, 0], name
        assert scenario.topology.hosts >= 17 and scenario.workload.kind == name.partition("-")[2]


def test_the_scenario_of_the_gather_is_at_the_papers_point():
    scenario = load(str(SCENARIOS / "gather.toml"))
    work = planned("gather", scenario, ["lab"])
    topology, workload = scenario.topology, scenario.workload
    assert (topology.hosts, workload.fragment, workload.senders) == (48, 64_000, "auto")
    assert topology.link_rate == 10**9 and topology.link_delay == 250 and topology.dilation == 200
    limits = {one.scenario.control.flows_per_host for one in work}
    assert limits == {"all", 10, "auto"}
    assert {one.scenario.stack.profile for one in work} == {"newreno", "linux-2.6.28", "modern"}


class TestInTheLab:
    pytestmark = NEEDS_LAB

    def test_a_gather_that_finds_its_flows_waits_for_no_more_timeouts(self, tmp_path):
        """All at once overflows a port of 8 KiB; how long that takes depends on the machine, and is not judged."""
        words = [
            "stack.profile=newreno",
            "stack.rto_min=20ms",
            "topology.port.buffer=8KiB",
            "topology.link_rate=50Mbit/s",
        ]
        settings = [word for one in words for word in ("--set", one)]
        timeouts = {}
        for limit in ("all", "auto"):
            own = ["--flows-per-host", limit, "--rounds", "20", "--warm-up", "20", "--fragment", "32kB", "--hosts", "9"]
            given = [*own, "--transport", "tcp", "--results", str(tmp_path), "--json"]
            ran = mission("run", "gather", "--in", "lab", *given, *settings)
            (point,) = json.loads(ran.stdout)["points"]
            assert point["checks"] == {"content of every fragment": True} and not point["errors"], ran.stderr
            assert point["senders"] == 8 and len(point["rounds"]) == 20
            assert 0 < point["measures"]["of_ideal"]["value"] <= 1
            # If the limit was not in force, both would be equal.
            assert (point["jobs"][0]["flows"] > 10) == (limit == "all")
            timeouts[limit] = point["timeouts"]
        assert timeouts["all"] > 0 and timeouts["auto"] <= timeouts["all"], timeouts
