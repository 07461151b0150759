"""Scenarios: files that are read, and files that are refused with the line."""

from __future__ import annotations

import pytest

from mission_control.scenario import BadInput, Scenario, load, plain, validate, with_changes


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return write


def test_the_built_in_sort_is_one_gibibyte():
    assert load("sort").workload.size == 1 << 30


def test_units_are_read_and_written_back():
    scenario = validate({"workload": {"size": "16 kB"}, "topology": {"memory_limit": "1 GiB"}})
    assert (scenario.workload.size, scenario.topology.memory_limit) == (16_000, 1 << 30)
    assert validate(plain(scenario)) == scenario


SECOND = "[[study.compare]]\nname = 'a'\nset = {}\n\n[[study.compare]]\nname = 'b'\n"
"""A scenario's lines up to those of its second variant."""


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("version = 2\n", 1, "version"),
        ('version = 1\n[workload]\nsize = "5 XB"\n', 3, "use one of B, kB"),
        ("version = 1\n\n[workload]\nsize = 5\n", 4, "no unit"),
        ("[topology]\nhosts = 0\n", 2, "hosts"),
        ("[topologie]\nhosts = 1\n", 1, "no such key"),
        ("[control]\nflows_per_host = 10\npacing = 3\n", 3, "no such key"),
        (f"{SECOND}set = {{ 'control.transport' = 'pigeon' }}\n", 5, "study.compare 'b': there is no transport"),
        (f"{SECOND}colour = 'red'\n", 7, "no such key: study.compare.1.colour"),
        (f"{SECOND}[study.compare.set]\n'stack.sack' = 3\n", 5, "study.compare 'b': stack.sack"),
        (
            "[[study.compare]]\nname = 'a'\n[[study.compare]]\nratio_min = 1\n",
            3,
            "study.compare.1.name: it is missing",
        ),
        ("[topology.port]\nalpha = inf\n", 2, "finite"),
        ("[topology]\nmtu = 0\nhosts = 0\n", 3, "topology.hosts: write at least 1, not 0"),
        ("[topology]\nlink-rate = '1 Mbit/s'\n", 2, "no such key: topology.link-rate"),
        ("[workload]\njobs = 0\nsize = 0\n", 2, "workload.jobs: write at least 1, not 0"),
        ("[workload]\npartitions = 'many'\n", 2, "workload.partitions: write a whole number or auto, not 'many'"),
        ("[workload]\nkind = 'incast'\nfragment = 65536\n", 3, "workload.fragment: write a list, not 65536"),
        ("[workload]\nkind = 'incast'\nfragment = []\n", 3, "workload.fragment: write at least 1 of them"),
        ("version = '1'\n", 1, "version: write 1, not '1'"),
        ("[topology]\nhosts = 0x1" + 4000 * "0" + "\n", 2, "topology.hosts: .*, not a number so large"),
        ("[control]\nflows_per_host = 4294967296\n", 2, "write at most 4294967295, all or auto"),
        ("[topology]\nhosts = 100000\n", 2, "10001"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(file, text, line, hint):
    with pytest.raises(BadInput, match=f"line {line}: .*{hint}"):
        load(file(text))


def test_broken_toml_is_refused_with_its_place(file):
    with pytest.raises(BadInput, match=r"mine\.toml.*line 2"):
        load(file("version = 1\nsize == 3\n"))


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"control": {"encrypt": True, "transport": "shm"}}, "not encrypted"),
        ({"control": {"policy": "unfair"}}, "use one of"),
        ({"control": {"priorities": (1.0, 0.0)}, "workload": {"jobs": 2}}, "above 0"),
    ],
)
def test_contradictions_name_the_fix(changes, hint):
    with pytest.raises(BadInput, match=hint):
        with_changes(Scenario(), changes)


def test_an_event_of_an_older_file_that_says_mend_is_read_as_restore():
    event = {"after": "1 s", "do": "mend", "host": "h2"}
    scenario = validate({"world": "lab", "topology": {"events": [event]}})
    assert scenario.topology.events[0].do == "restore"
    assert plain(scenario)["topology"]["events"][0]["do"] == "restore"
