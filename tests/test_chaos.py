"""Twenty rounds of `tests/chaos.py`; the rest is for `make chaos`."""

from __future__ import annotations

import pytest

from tests.chaos import run


@pytest.mark.timeout(900)
def test_jobs_end_right_or_name_the_cause_whatever_goes_wrong():
    ended = run(20)
    assert ended["right"] >= sum(ended.values()) / 2, ended
