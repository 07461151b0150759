"""The specification of a job, validated without a cluster."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mission_control.jobs import specification


def test_a_specification_has_all_that_policies_read():
    spec = specification("etl", priority=2, user="ann", job_class="nightly", deadline=Fraction(5, 2))
    assert spec["priority"] == 2.0 and spec["deadline_secs"] == 2.5
    assert (spec["user"], spec["class"], spec["machines"]) == ("ann", "nightly", 0)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"deadline": 0}, "seconds above 0"),
        ({"deadline": float("nan")}, "seconds above 0"),
        ({"deadline": "soon"}, "seconds above 0"),
        ({"user": ""}, "not empty"),
        ({"user": 5}, "use a str"),
        ({"job_class": "a\nb"}, "can be printed"),
        ({"priority": 0}, "above 0"),
        ({"transport": "pigeon"}, "use auto"),
    ],
)
def test_what_makes_no_sense_is_refused_with_one_line(wrong, hint):
    with pytest.raises(ValueError, match=hint) as refused:
        specification("etl", **wrong)
    assert "\n" not in str(refused.value)
