"""Some rounds of `tests/chaos`; 200 are for `make chaos`."""

from __future__ import annotations

import pytest

from tests.chaos.rounds import run

ROUNDS = 4


@pytest.mark.timeout(900)
def test_jobs_end_right_or_name_the_cause_whatever_goes_wrong():
    # Each round asserts its invariants.
    ended = run(ROUNDS)
    assert ended["right"] > 0, ended
