"""Results of benchmarks with several numbers of threads are put together."""

from __future__ import annotations

from typing import Any

from mission_control.bench.interleaved import for_threads


def measured(threads: int) -> dict[str, Any]:
    return {
        "rows": [{"what": "shuffle", "wall_s": 1 / threads}],
        "ratios": {"shuffle: wall": threads / 2},
        "environment": {"cores": 2},
        "rounds": 3,
    }


def test_one_number_of_threads_leaves_the_names_as_they_are():
    result = for_threads([4], measured)
    assert result["ratios"] == {"shuffle: wall": 2.0}
    assert result["rows"] == [{"threads": 4, "what": "shuffle", "wall_s": 0.25}]


def test_several_are_told_apart():
    result = for_threads([1, 8], measured)
    assert result["ratios"] == {"1 threads, shuffle: wall": 0.5, "8 threads, shuffle: wall": 4.0}
    assert [row["threads"] for row in result["rows"]] == [1, 8]
    assert result["environment"] == {"cores": 2} and result["rounds"] == 3 and result["threads"] == [1, 8]
