"""Benchmarks of unchanged Dask programs: they run, and their results are those of pandas."""

from __future__ import annotations

import json

import pytest

from tests.conftest import mission


@pytest.mark.parametrize("query", ("q3", pytest.param("groupby-many", marks=pytest.mark.long)))
def test_queries_bring_what_pandas_brings(query):
    words = ["--scale", "0.02", "--rounds", "1", "--memory", "1GiB", "--query", query]
    done = mission("bench", "queries", *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["query"], row["equal"]) for row in result["rows"]] == [(query, True)]
    assert all(row["ratio"] == row["stock_s"] / row["ours_s"] for row in result["rows"])


@pytest.mark.long
def test_each_mode_of_a_shuffle_is_a_row():
    done = mission("bench", "dask", "--size", "16MiB", "--rounds", "1", "--case", "shuffle", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["mode"] for row in result["rows"]] == ["Dask, on disk", "Dask, in memory", "Mission Control"]
    assert {row["what"] for row in result["rows"]} == {"shuffle, numeric columns"}
    assert 0.5 < result["carried"]["shuffle"] < 1.0
    assert all(row["first_wall_s"] > 0 and row["cpu_s_per_gib"] > 0 for row in result["rows"])


def test_a_query_nobody_knows_is_refused_in_one_line():
    done = mission("bench", "queries", "--query", "q99")
    assert done.returncode == 2 and done.stderr.startswith("mission: --query q99: unknown; use one of q1,")
