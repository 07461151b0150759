"""The experiment engine: points and their order, resuming, validity, refusals, runs on a user's cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import mission_control
from mission_control.cli.run import worlds_asked
from mission_control.experiments import compare, engine, observed, parallel
from mission_control.experiments.jobs import Jobs
from mission_control.experiments.points import AGAIN, Conditions, planned, until_valid
from mission_control.experiments.result import Point, Summary, load, schema
from mission_control.incast import statistics
from mission_control.scenario import BadInput, Variant, plain, validate, with_settings
from mission_control.scenario import load as scenario_of
from mission_control.workloads import WORKLOADS
from tests.conftest import mission, status, until

WORDS = ["--size", "1MiB", "--partitions", "2", "--workers", "2"]


def test_the_interval_of_a_median_is_that_of_order_statistics():
    """Conover 1999, table A3: with 6 values the smallest and the largest, with 9 the second of each end."""

    def result(values: Sequence[float]) -> tuple[float, ...]:
        own = compare.interval(values)
        return own["median"], own["low"], own["high"], round(own["coverage"], 3)

    assert result([3.0]) == (3, 3, 3, 0)
    assert result([5, 1, 3, 2, 4]) == (3, 1, 5, 0.938)
    assert result(range(1, 7)) == (3.5, 1, 6, 0.969)
    assert result(range(1, 10)) == (5, 2, 8, 0.961)
    assert result(range(1, 21)) == (10.5, 6, 15, 0.959)
    assert compare.interval([])["median"] is None


def test_an_interval_that_covers_too_little_says_so_in_words():
    labels: dict[str, Any] = {"study": "s", "world": "lab", "at": {}, "variant": "", "measure": "m", "unit": "s"}
    two, six = (Summary(**labels, **compare.interval(values)) for values in ([1, 2], [1, 2, 3, 4, 5, 6]))
    assert "range of 2 runs" in compare.spread(two) and "50% only" in compare.spread(two)
    assert compare.spread(six) == "1 to 6"
    assert compare.spread(Summary(**labels, **compare.interval([1]))) == "one run: no interval"


def test_jains_index_is_one_where_all_are_served_alike():
    def progress(worker: str, served: int, own: int, started: float, ended: float) -> dict:
        labels = {"kind": "progress", "job": "j", "from": "a", "to": "b"}
        moved = {"served_bytes": served, "local_bytes": own, "started": started, "ended": ended}
        return {**labels, "worker": worker, **moved}

    alike = [progress(worker, 10 * time, 0, 0, time) for worker in "xyz" for time in (1, 2)]
    assert observed.fairness(alike) == {("j", "a", "b"): pytest.approx(1)}
    # Rates of 10, 10 and 40, without bytes that never left their worker: 60 squared by 3 times 1,800.
    unlike = [*alike[:4], progress("z", 100, 20, 1, 3)]
    assert observed.fairness(unlike)[("j", "a", "b")] == pytest.approx(3600 / 5400)
    # A worker that forgets a quiet transfer begins it anew.
    anew = [*alike[:4], progress("z", 10, 0, 0, 1), progress("z", 10, 0, 1.5, 2)]
    assert observed.fairness(anew) == observed.fairness(alike)


def test_jains_index_of_flows_is_of_the_sums_that_workers_report():
    def found(**rates: float) -> float | None:
        entry = {"from": "a", "to": "b", "pattern": "shuffle", "evidence": "e", "served_bytes": 1}
        return observed.transfer_of({**entry, "transport": {"observed": {"rates": rates}}}, {}).flow_fairness

    assert found(count=3, sum=60.0, squares=1800.0) == pytest.approx(3600 / 5400)
    for count, total, squares in [(0, 0.0, 0.0), (1, 0.0, 0.0), (2, 1e300, 1e300), (2, None, None)]:
        assert found(count=count, sum=total, squares=squares) is None


def test_a_share_is_that_of_the_time_in_which_all_jobs_move_something():
    def progress(job: str, time: float, served: int) -> dict:
        labels = {"kind": "progress", "worker": "w", "from": "a", "to": "b", "local_bytes": 0}
        return {**labels, "job": job, "time": time, "served_bytes": served}

    records = [progress("a", time, 30 * time) for time in (1, 2, 3)]
    records += [progress("b", time, 10 * time) for time in (1, 2, 3, 4, 5)]
    parts_of_bytes = observed.parts_of_bytes
    assert parts_of_bytes(records, [("a",), ("b",)]) == {("a",): 0.75, ("b",): 0.25}
    assert parts_of_bytes(records, [("a",), ("b",), ("c",)]) == {}
    apart = [progress("a", 1, 10), progress("a", 2, 20), progress("b", 3, 10), progress("b", 4, 20)]
    assert parts_of_bytes(apart, [("a",), ("b",)]) == {}
    # A worker that forgets a quiet transfer begins it anew.
    began = [{**record, "started": 0.0} for record in records]
    for record in began:
        if record["job"] == "b" and record["time"] > 2:
            record |= {"started": 2.5, "served_bytes": record["served_bytes"] - 20}
    assert parts_of_bytes(began, [("a",), ("b",)]) == {("a",): 0.75, ("b",): 0.25}
    # Two workers share the slots of their host: each carries one job at a time.
    in_turn = [{**record, "worker": {"a": "w", "b": "x"}[record["job"]]} for record in records]
    assert parts_of_bytes(in_turn, [("a",), ("b",)]) == {}
    assert parts_of_bytes(in_turn, [("a",), ("b",)], {"w": "h", "x": "h"}) == {("a",): 0.75, ("b",): 0.25}
    # One of them died, so its host is not known any more.
    died = [{**record, "worker": f"tcp://10.0.0.1:{ord(record['job'])}"} for record in records]
    alive = {f"tcp://10.0.0.1:{ord('a')}": "h"}
    assert parts_of_bytes(died, [("a",), ("b",)], alive) == {("a",): 0.75, ("b",): 0.25}


def test_jobs_are_in_the_scenarios_order_whichever_was_admitted_first():
    running = object.__new__(Jobs)
    running.names, running.admitted = ["sort-1", "sort-2"], {"sort-2": "sort-2", "sort-1": "sort-1"}
    running.seconds, running.errors, running.refusal = {"sort-1": 1.0, "sort-2": 2.0}, {}, None
    running.started = running.ended = None
    running._stop = threading.Event()
    assert [job.name for job in running.found([], {})["jobs"]] == ["sort-1", "sort-2"]


def test_variants_take_turns_and_every_value_is_run():
    scenario = with_settings(scenario_of("sort"), ["study.repeat=2", 'study.vary={"workload.size"=["1 MiB", "2 MiB"]}'])
    two = [Variant(name="tcp", set={"control.transport": "tcp"}), Variant(name="tls", set={"control.transport": "tls"})]
    scenario = scenario.model_copy(update={"study": scenario.study.model_copy(update={"compare": tuple(two)})})
    points = planned("s", scenario, ["local"])
    assert [(point.at["workload.size"], point.variant.name, point.repetition) for point in points[:5]] == [
        ("1 MiB", "tcp", 0),
        ("1 MiB", "tls", 0),
        ("1 MiB", "tcp", 1),
        ("1 MiB", "tls", 1),
        ("2 MiB", "tcp", 0),
    ]
    assert len({point.key for point in points}) == len(points) == 8
    assert points[1].scenario.control.transport == "tls"
    assert plain(points[4].scenario)["workload"]["size"] == f"{2 << 20} B"
    wrong = scenario.study.model_copy(update={"compare": (Variant(name="x", set={"control.transport": "pigeon"}),)})
    with pytest.raises(BadInput, match=r"study\.compare 'x'.*transport"):
        planned("s", scenario.model_copy(update={"study": wrong}), ["local"])


def test_the_grid_of_incast_is_swept_in_turns_by_variant_and_repetition():
    settings = ["workload.senders=1,4", 'workload.fragment=["16 kB", "64 kB"]', "study.repeat=2"]
    settings.append('study.compare=[{name="all", set={"control.flows_per_host"="all"}}, {name="auto"}]')
    points = planned("s", with_settings(scenario_of("incast"), settings), ["model", "lab"])
    assert len(points) == 2 * 4 + 2 * 2 * 4, "the model says the same each time"
    places = [(point.world, point.repetition, point.variant.name, *point.at.values()) for point in points]
    assert places[:4] == [("model", 0, "all", n, f) for f in ("16 kB", "64 kB") for n in (1, 4)]
    turns = (("model", 0), ("lab", 0), ("lab", 1))
    assert [place[:3] for place in places[::4]] == [(*turn, variant) for turn in turns for variant in ("all", "auto")]


def test_what_is_not_valid_is_measured_again_twice_at_most():
    def point(valid: bool) -> Point:
        return Point(study="s", world="lab", valid=valid, invalid_because=[] if valid else ["slow"])

    said: list[str] = []
    assert until_valid(lambda attempt: point(attempt == 1), said.append).valid and len(said) == 1
    attempts: list[int] = []
    assert not until_valid(lambda attempt: attempts.append(attempt) or point(False), said.append).valid
    assert attempts == list(range(AGAIN + 1))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("sort --points 5", "--points: sort does not read it"),
        ("incast --size 1MiB --in model", "--size: incast does not read it"),
        ("incast --policy fair --in model", "--policy fair: incast does not read it"),
        ("incast --scheduler tcp://h:1", "--scheduler: incast does not run there"),
        ("incast --data x --in model", "--data: incast does not read it"),
        ("sort --labs 2", "--labs: sort does not read it"),
        ("sort --mtu 9000", "--mtu: world local does not read it; use --in lab"),
        ("sort --topology two-rack", "--topology: world local does not read it"),
        ("sort --install-policy", "give --scheduler"),
        ("sort --in model", "sort does not run there; use local or lab"),
        ("sor", "there is no scenario 'sor': use demo, kmeans, mix, sort, wordcount"),
        ("sort --set workload.points=3", "sort does not read it"),
        ('sort --set study.measure=["goodput"]', "sort has no measure 'goodput': use shuffle_seconds"),
        ("--resume nowhere", "nowhere: no run is there"),
        ("", "which scenario?"),
    ],
)
def test_what_a_workload_or_a_world_does_not_read_is_refused(words, why, tmp_path):
    done = mission("run", *words.split(), cwd=tmp_path)
    assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.glob("results/*"))


def test_help_shows_the_flags_of_the_workload_and_no_others():
    # Examples name flags of several workloads.
    sort, incast = (mission("run", kind, "--help").stdout.partition("Examples:")[0] for kind in ("sort", "incast"))
    assert "--placement" in sort and "--points" not in sort and "--senders" not in sort and "--labs" not in sort
    assert "--senders" in incast and "--size" not in incast and "--policy" not in incast
    for kind, settings in WORKLOADS.items():
        assert settings.model_fields["kind"].default == kind and settings.measures


def test_errors_in_what_varies_name_file_and_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('version = 1\n[study]\nrepeat = 2\n[study.vary]\n"workload.size" = ["1 MiB", 7]\n')
    done = mission("run", str(file))
    assert done.returncode == 2 and "mine.toml, line 4: study.vary (size 7)" in done.stderr, done.stderr
    file.write_text('version = 1\n[workload]\nkind = "sort"\nk = 7\n')
    done = mission("run", str(file))
    assert done.returncode == 2 and "mine.toml, line 4" in done.stderr and "sort does not read it" in done.stderr


def check_schema(result: dict[str, Any]) -> None:
    """Validate a result by its JSON Schema, with the rules that the schema uses."""
    own = json.loads(mission("schema", "result").stdout)
    assert own == json.loads(json.dumps(schema()))

    def fits(value: Any, rule: dict[str, Any], path: str) -> list[str]:
        if "$ref" in rule:
            return fits(value, own["$defs"][rule["$ref"].rpartition("/")[2]], path)
        if "anyOf" in rule:
            tried = [fits(value, option, path) for option in rule["anyOf"]]
            return min(tried, key=len)
        kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "null": type(None)}
        kind = rule.get("type")
        if kind == "number":
            return [] if isinstance(value, int | float) else [f"{path}: {value!r} is no number"]
        if kind in kinds and not isinstance(value, kinds[kind]):
            return [f"{path}: {value!r} is not of type {kind}"]
        wrong = []
        if isinstance(value, dict):
            known = rule.get("properties", {})
            wrong += [f"{path}: {name} is missing" for name in rule.get("required", ()) if name not in value]
            for name, entry in value.items():
                more = rule.get("additionalProperties", True)
                if name in known:
                    wrong += fits(entry, known[name], f"{path}.{name}")
                elif more is False:
                    wrong.append(f"{path}: {name} is not in the schema")
                elif isinstance(more, dict):
                    wrong += fits(entry, more, f"{path}.{name}")
        if isinstance(value, list) and isinstance(rule.get("items"), dict):
            for number, entry in enumerate(value):
                wrong += fits(entry, rule["items"], f"{path}[{number}]")
        return wrong

    assert fits(result, own, "result") == []


def test_the_command_compares_and_tells_medians_and_ratios(tmp_path):
    done = mission("run", "sort", *WORDS, "--compare", "tcp,tls", "--repeat", "2", "--results", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    check_schema(result)
    places = [(point["variant"], point["repetition"]) for point in result["points"]]
    assert places == [("tcp", 0), ("tls", 0), ("tcp", 1), ("tls", 1)]
    assert all(point["ok"] and point["world"] == "local" and point["commit"] for point in result["points"])
    (ratio,) = result["comparisons"]
    assert (ratio["variant"], ratio["to"], ratio["runs"]) == ("tls", "tcp", 2)
    assert ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["held"] is None
    pairs = [point["measures"]["shuffle_seconds"]["value"] for point in result["points"]]
    assert ratio["low"] == pytest.approx(min(pairs[1] / pairs[0], pairs[3] / pairs[2]))
    folder = Path(result["results"])
    page = (folder / "report.html").read_text()
    assert "tls to tcp" in page and page.count("<svg") >= 1 and "range of 2 runs" in page
    runs = list((folder / "runs").iterdir())
    assert len(runs) == 4 and all((run / "report.html").exists() and (run / "records.jsonl").exists() for run in runs)
    # Generated again from the files.
    (folder / "report.html").unlink()
    assert mission("report", str(folder)).returncode == 0
    assert "tls to tcp" in (folder / "report.html").read_text()


def test_scenarios_of_a_folder_run_each_in_its_own_world():
    both = {world: validate({"version": 1, "world": world}) for world in ("local", "lab")}
    assert worlds_asked(both, None, None) == () and worlds_asked(both, "local", None) == ("local",)


def test_a_folder_is_one_run_and_an_expectation_that_is_missed_fails_it(tmp_path):
    head = 'version = 1\n[topology]\nhosts = 2\n[workload]\nsize = "1 MiB"\npartitions = 2\n'
    (tmp_path / "a.toml").write_text(head + '[study]\ntitle = "First"\nmeasure = ["job_seconds"]\n')
    compared = '[{ name = "one" }, { name = "other", ratio_max = 0.000001 }]'
    (tmp_path / "b.toml").write_text(head + f'[study]\ntitle = "Second"\nbecause = "so"\ncompare = {compared}\n')
    done = mission("run", str(tmp_path), "--results", str(tmp_path / "results"), "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["comparisons"][0]["held"] is False
    assert {point["study"] for point in result["points"]} == {"a", "b"}
    page = Path(result["results"], "report.html").read_text()
    assert "First" in page and "Second" in page and "1 expectation missed" in page
    # Variants of the command line replace those of the file, and their expectations.
    words = ["--compare", "tcp", "--results", str(tmp_path / "results"), "--json"]
    done = mission("run", str(tmp_path / "b.toml"), *words)
    assert done.returncode == 0 and "what they expect does not apply" in done.stderr, done.stderr
    (point,) = json.loads(done.stdout)["points"]
    assert point["variant"] == "tcp" and point["jobs"][0]["transfers"][0]["transport"]["chosen"] == "tcp"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert mission("run", str(empty)).returncode == 2


QUICK = """
version = 1
[topology]
hosts = 2
[workload]
size = "1 MiB"
partitions = 2
[study]
repeat = 3
vary = { "workload.partitions" = [2, 3, 4] }
quick = { "workload.partitions" = [2], "topology.hosts" = 1 }
point_takes = "90 min"
compare = [{ name = "a" }, { name = "b", ratio_max = 0.0001, set = { "topology.hosts" = 3 } }]
"""


def test_a_quick_run_has_fewer_points_and_says_before_how_long_it_takes(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(QUICK)
    done = mission("run", str(file), "--results", str(tmp_path / "results"), "--quick")
    assert done.returncode == 0, done.stderr
    assert "2 points to measure (reduced by --quick): about 3.0 h on two cores" in done.stderr + done.stdout
    (folder,) = (tmp_path / "results").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert [(point["at"], point["repetition"]) for point in result["points"]] == [({"workload.partitions": 2}, 0)] * 2
    # It goes on as it began.
    assert mission("run", "--resume", str(folder), "--quick").returncode == 2
    done = mission("run", str(file), "--resume", str(folder))
    assert done.returncode == 2 and "began with --quick: go on in the same way" in done.stderr, done.stderr
    assert mission("run", "--resume", str(folder)).returncode == 0
    # Its changes apply to all variants; one run does not test a ratio.
    quick = scenario_of(str(file)).quick
    assert quick.topology.hosts == 1
    assert [(one.set, one.ratio_max) for one in quick.study.compare] == [({}, None)] * 2
    # A study with an empty quick runs each variant once.
    file.write_text(QUICK.replace("quick =", "# quick ="))
    assert scenario_of(str(file)).quick.study.repeat == 1


def test_scenarios_side_by_side_take_as_long_as_the_longest_or_their_part_of_all():
    incast = scenario_of("incast")
    expecting = incast.expect.model_copy(update={"goodput_of_one_flow_min": 0.9})
    scenarios = {"a": incast, "b": incast, "c": incast, "alone": incast.model_copy(update={"expect": expecting})}
    takes = {"a": 60.0, "b": 1.0, "c": 3.0, "alone": 10.0}
    for labs, seconds in ((1, 74), (2, 70), (8, 70)):
        assert parallel.together_s(scenarios, takes, Conditions(labs=labs)) == seconds
    assert parallel.together_s(scenarios, {**takes, "b": 61.0, "c": 61.0}, Conditions(labs=2)) == 101


@pytest.mark.parametrize(
    ("quick", "why"),
    [
        ('{ "workload.partitions" = 2 }', "workload.partitions varies: write a list of its values"),
        ('{ "workload.partitions" = [] }', "workload.partitions varies: write a list of its values"),
        ("{ workload.partitions = [2] }", "workload: write a key with its table, in quotes"),
        ('{ "study.vary" = {} }', "of the study, quick changes study.repeat and study.point_takes alone"),
        ('{ "topology.hosts" = 0 }', "study.quick: topology.hosts"),
        ('{ "topology.hosst" = 1 }', "there is no such key: topology.hosst"),
    ],
)
def test_what_does_not_fit_a_quick_run_is_said_when_the_scenario_is_read(quick, why, tmp_path):
    lines = [f"quick = {quick}" if line.startswith("quick") else line for line in QUICK.splitlines()]
    (tmp_path / "a.toml").write_text("\n".join(lines))
    with pytest.raises(BadInput, match=r"a\.toml, line \d+: ") as refused:
        scenario_of(str(tmp_path / "a.toml"))
    assert why in str(refused.value)


def test_an_interrupted_run_goes_on_by_its_folder_alone(tmp_path):
    words = [sys.executable, "-m", "mission_control", "run"]
    asked = [*words, "sort", *WORDS, "--repeat", "3", "--json", "--results", str(tmp_path)]
    running = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    until(lambda: list(tmp_path.glob("*/runs/*-2")), "the second run has begun", seconds=120)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
    result = json.loads(out)
    assert running.returncode == 130 and result["interrupted"] and not result["ok"]
    (folder,) = tmp_path.iterdir()
    journal = folder / "points.jsonl"
    first, *_ = journal.read_text().splitlines()
    kept = {**json.loads(first), "commit": "before", "environment": {"kernel": "another"}}
    # An incomplete line, as after a power failure, is dropped.
    journal.write_text(json.dumps(kept) + "\n" + first[: len(first) // 2])
    done = mission("run", "--resume", str(folder), "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and len(result["points"]) == 3 and result["summary"][0]["runs"] == 3, done.stderr
    before, *later = result["points"]
    assert before["commit"] == "before" and before["environment"] == {"kernel": "another"}, "it keeps what it had"
    assert before["measures"] == kept["measures"], "it was not measured again"
    assert all(point["commit"] != "before" and point["environment"]["cores"] for point in later)
    other = mission("run", "sort", *WORDS, "--repeat", "3", "--seed", "2", "--resume", str(folder))
    assert other.returncode == 2 and "was made from another scenario" in other.stderr
    assert mission("run", "--resume", str(folder), "--seed", "2").returncode == 2
    assert len(load(folder).points) == 3, "what is refused changes nothing"


def test_the_model_draws_the_cure_as_the_cure(tmp_path):
    def goodput(*words: str) -> dict[int, float]:
        asked = ["--in", "model", "--set", "workload.senders=1,8,16,47", "--results", str(tmp_path), "--json"]
        done = mission("run", "scenarios/incast-64k.toml", *asked, *words)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        check_schema(result)
        assert all(point["measures"]["goodput"]["unit"] == "Mbit/s" for point in result["points"])
        return {point["senders"]: point["measures"]["goodput"]["value"] for point in result["points"]}

    everything, auto, two = goodput(), goodput("--flows-per-host", "auto"), goodput("--flows-per-host", "2")
    assert everything[16] < 0.5 * everything[1], "incast bites"
    assert min(auto.values()) >= 0.98 * auto[1] > 90
    assert two[47] == two[16] == two[8] < auto[8], "two at once, however many there are"


def test_a_grid_is_interrupted_and_goes_on(tmp_path):
    """Measured in this process: an observer that interrupts."""
    scenario = with_settings(scenario_of("incast"), ["workload.senders=1-6"])

    class Impatient(engine.Observer):
        def show(self, line: str, doing: str, status: Any) -> None:
            if line.startswith("[4/"):
                raise KeyboardInterrupt

    conditions = Conditions(("model",))
    first = engine.conduct({"s": scenario}, conditions, results=tmp_path, observer=Impatient())
    assert first.interrupted and len(first.points) == 3 and not first.ok
    again = engine.conduct(*engine.resumed(Path(first.results)), resume=Path(first.results))
    assert again.ok and len(again.points) == 6 and again.points[:3] == first.points


def test_a_run_goes_on_as_it_began_and_for_one_process_at_a_time(tmp_path):
    scenario = with_settings(scenario_of("incast"), ["workload.senders=1-3"])
    made = engine.conduct({"s": scenario}, Conditions(("model",)), results=tmp_path)
    folder = Path(made.results)
    with pytest.raises(BadInput, match="began without --scheduler"):
        engine.conduct({"s": scenario}, Conditions(("model",), scheduler="tcp://h:1"), resume=folder)
    more = with_settings(scenario, ["workload.senders=1-4"])
    with pytest.raises(BadInput, match="another scenario"):
        # Its lab has one more host, at all points.
        engine.conduct({"s": more}, Conditions(("model",)), resume=folder)
    with engine.held(folder), pytest.raises(BadInput, match="another process measures there"):
        engine.conduct({"s": scenario}, Conditions(("model",)), resume=folder)
    assert engine.conduct({"s": scenario}, Conditions(("model",)), resume=folder).points == made.points
    done = mission("run", "--resume", str(folder), "--repeat", "2")
    assert done.returncode == 2 and "--repeat: --resume alone goes on as the run began" in done.stderr


def test_what_a_running_cluster_would_not_do_is_not_compared():
    variants = [{"name": name, "set": {"control.policy": name}} for name in ("fair", "shortest-first")]
    scenario = validate({"version": 1, "study": {"compare": variants}})
    with pytest.raises(BadInput, match=r"control.policy is the cluster's own.*--install-policy"):
        engine.refuse_not_in_force({"s": scenario}, Conditions(scheduler="tcp://h:1"))
    engine.refuse_not_in_force({"s": scenario}, Conditions(scheduler="tcp://h:1", install_policy=True))
    engine.refuse_not_in_force({"s": scenario}, Conditions())


def test_slow_motion_is_undone_by_unit():
    units = {unit: compare.undilated(unit, 10) for unit in ("Mbit/s", "ms", "", "packets")}
    assert units == {"Mbit/s": 10, "ms": 0.1, "": 1, "packets": 1}


def test_a_block_that_did_not_end_counts_as_far_as_it_came():
    run = {"blocks": [0.01], "ended": "the deadline of 60 s has passed", "seconds": 60.0, "bytes": 150_000, "flows": []}
    found = statistics.summary([run], 100_000)
    assert found["goodput_mbit"] == pytest.approx(0.02) and found["interval95"] is None
    whole = {**run, "ended": None, "blocks": [0.01] * 9}
    assert statistics.summary([whole], 100_000)["goodput_mbit"] == pytest.approx(80)


# --- a user's cluster -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared():
    """A cluster with the policy fair, two flows for each host, and a job that has run."""
    with LocalCluster(n_workers=2, threads_per_worker=2, memory_limit="1GiB", dashboard_address=":0") as cluster:
        with Client(cluster, set_as_default=False) as client:
            mission_control.install(client, policy="fair", flows_per_host=2)
            until(lambda: len(status(client)["workers"]) == 2, "both data planes are up")
            with mission_control.job("sort", client=client):
                made = client.submit(mission_control.put, [b"x" * 1000], pure=False)
                assert client.submit(lambda own: len(mission_control.fetch(own)[0]), made, pure=False).result() == 1000
        yield cluster


def on(address: str, tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    asked = ["run", "sort", "--size", "16MiB", "--partitions", "4", "--scheduler", address, "--json"]
    done = mission(*asked, "--results", str(tmp_path / "results"), "--data", str(tmp_path / "data"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def test_two_users_at_once_each_see_their_own_job_and_change_nothing(shared, tmp_path):
    found: dict[str, Any] = {}

    def user(name: str) -> None:
        (tmp_path / name).mkdir()
        found[name] = on(shared.scheduler_address, tmp_path / name, "--transport", "tcp")

    users = [threading.Thread(target=user, args=(name,)) for name in ("one", "other")]
    with Client(shared, set_as_default=False) as client, mission_control.job("sort", client=client):
        # A third user's job has the name, so that neither gets it.
        for thread in users:
            thread.start()
        for thread in users:
            thread.join()
        assert status(client)["policy"] == "fair"
    names = set()
    for result, said in found.values():
        check_schema(result)
        (job,) = result["jobs"]
        names.add(job["admitted"])
        assert job["name"] == "sort" and job["admitted"].startswith("sort@")
        (transfer,) = job["transfers"]
        assert transfer["bytes"] == (16 << 20) // 100 * 100
        records = [json.loads(line) for line in Path(result["results"], "records.jsonl").read_text().splitlines()]
        assert {record["job"] for record in records if "job" in record} == {job["admitted"]}
        weights = [record for record in records if record.get("command") == "weights"]
        assert {entry["job"] for one in weights for entry in one["transfers"]} <= {job["admitted"]}
        assert result["policy"] == "fair"
        assert any("control.policy = performance-centric is not in force" in note for note in result["notes"])
        assert any("flows_per_host = 10 is not in force: the cluster has 2" in note for note in result["notes"])
        assert "note: control.policy" in said
    assert len(names) == 2


def test_a_policy_is_installed_only_where_it_is_asked_for(shared, tmp_path):
    result, said = on(shared.scheduler_address, tmp_path, "--policy", "fifo", "--install-policy")
    with Client(shared, set_as_default=False) as client:
        assert status(client)["policy"] == "fifo" == result["policy"]
    assert "policy fifo was installed for all jobs of this cluster, in place of fair" in said
    assert not any("control.policy" in note for note in result["notes"])


def test_a_scenario_of_each_workload_survives_being_written():
    for kind in WORKLOADS:
        scenario = scenario_of(kind)
        assert validate(plain(scenario)) == scenario and scenario.workload.kind == kind
