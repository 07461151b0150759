"""Names that other people's programs chose do no harm where they are shown."""

from __future__ import annotations

import numpy as np
from distributed import Event, wait

import mission_control
from mission_control.printable import printable
from mission_control.workers import workers_of
from tests.conftest import mission, status, until

ESCAPES, TURNS = "\x1b]0;owned\x07\x1b[2J", "\u202e"


def put() -> mission_control.Reference:
    return mission_control.put([np.ones(1 << 20, np.uint8)])


def fetch(reference: mission_control.Reference, ended: str) -> None:
    mission_control.fetch(reference)
    assert Event(ended).wait(60)


def test_texts_of_an_answer_are_printable_and_the_rest_is_as_it_was():
    answer = {"a\x1bb": ["x\ny", ("z\u202e", 1.5, None, True)], "plain": "Übersicht 報告"}
    assert printable(answer) == {"a?b": ["x?y", ["z?", 1.5, None, True]], "plain": "Übersicht 報告"}


def test_keys_of_tasks_drive_no_terminal(client):
    ended = Event("the test of keys has ended", client)
    ended.clear()
    owner, reader = list(workers_of(client))[:2]
    try:
        with mission_control.job("odd keys", transport="tcp", client=client):
            reference = client.submit(put, key=f"put{ESCAPES}-1", workers=[owner])
            wait(reference)
            done = client.submit(fetch, reference, ended.name, key=f"fetch{TURNS}-1", workers=[reader])
        until(
            lambda: [own for job in status(client)["jobs"] for own in job["transfers"] if own["served_bytes"]],
            "something has moved",
        )
        for words in (["jobs"], ["explain", "odd keys"], ["top", "--count", "1"]):
            shown = mission(*words, "--scheduler", client.scheduler.address)
            text = shown.stdout + shown.stderr
            assert shown.returncode == 0 and "fetch?" in text and "put?]0;owned" in text, text
            assert "\x1b" not in text and "\x07" not in text and TURNS not in text
    finally:
        ended.set()
    wait(done)


def test_errors_drive_no_terminal_either(tmp_path):
    file = tmp_path / f"x{TURNS}.toml"
    file.write_text("version = " + "[" * 20_000)
    refused = mission("run", str(file))
    assert refused.returncode == 2 and "it nests too deep" in refused.stderr
    assert TURNS not in refused.stderr and len(refused.stderr.splitlines()) == 1
