"""Settings in Dask's configuration, and errors that processes without Mission Control can unpickle."""

from __future__ import annotations

import logging
import pickle

import dask
import pytest
from distributed.shuffle._exceptions import P2PConsistencyError

from mission_control.dask.p2p.run import Incomplete
from mission_control.dask.seams import wanted


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), ("on", True), ("YES", True), (1, True), (False, False), ("off", False), ("No", False), (0, False)],
)
def test_a_part_is_turned_on_and_off_by_any_usual_word(value, expected, caplog):
    with dask.config.set({"mission-control.p2p": value}):
        assert wanted("p2p") is expected
    assert not caplog.records


def test_what_is_neither_on_nor_off_counts_as_the_default_and_is_named(caplog):
    with caplog.at_level(logging.WARNING), dask.config.set({"mission-control.p2p": "disabled"}):
        assert wanted("p2p") is True
    assert "mission-control.p2p is 'disabled' in Dask's configuration: write true or false" in caplog.text


def test_a_client_without_mission_control_can_read_the_error_of_a_shuffle():
    pickled = pickle.dumps(Incomplete("shuffle 1: output partition 2 has 3 rows, but 4 went in"))
    assert b"mission_control" not in pickled
    read = pickle.loads(pickled)
    assert type(read) is P2PConsistencyError
    assert str(read) == "shuffle 1: output partition 2 has 3 rows, but 4 went in"
