"""A join equals pandas' for each pair of key types, whatever the types of its two sides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed import Client, LocalCluster
from distributed.shuffle._exceptions import P2PConsistencyError

import mission_control
from mission_control.dask.p2p.keys import NAT, Keys, common_kinds, in_unit
from mission_control.dask.seams import shuffles
from tests.conftest import status

ROWS = 60
ints = pd.Series(np.arange(ROWS))
hours = pd.Series(pd.date_range("2026-03-28", periods=ROWS, freq="h"))
spans = hours - hours[0]
texts = [f"text {i}" for i in range(ROWS)]
decimals = [Decimal(i) for i in range(ROWS)]
dates = [(hours[0] + timedelta(days=i)).date() for i in range(ROWS)]
utc = hours.dt.tz_localize("UTC")

KEYS: dict[str, dict[str, pd.Series]] = {
    "numbers": {
        **{str(own): ints.astype(own) for own in ("int8", "int32", "int64", "uint64", "float32", "float64")},
        **{own: ints.astype(own) for own in ("Int8", "Int64", "Float64", "int64[pyarrow]", "double[pyarrow]")},
        **{own: (ints % 2 == 0).astype(own) for own in ("bool", "boolean", "bool[pyarrow]")},
        "category of ints": ints.astype("category"),
        "decimals": pd.Series(decimals, dtype=object),
        "decimal128": pd.Series(decimals, dtype=pd.ArrowDtype(pa.decimal128(10, 2))),
    },
    "times": {
        **{own: hours.dt.as_unit(own) for own in ("s", "ms", "us", "ns")},
        **{f"Arrow {own}": hours.astype(f"timestamp[{own}][pyarrow]") for own in ("s", "us", "ns")},
        "category of us": hours.dt.as_unit("us").astype("category"),
    },
    "times with a zone": {
        **{f"UTC {own}": utc.dt.as_unit(own) for own in ("s", "us", "ns")},
        **{f"Berlin {own}": utc.dt.as_unit(own).dt.tz_convert("Europe/Berlin") for own in ("us", "ns")},
        "Arrow us": utc.astype("timestamp[us, tz=UTC][pyarrow]"),
    },
    "spans": {
        **{own: spans.dt.as_unit(own) for own in ("s", "us", "ns")},
        "Arrow us": spans.astype("duration[us][pyarrow]"),
    },
    "texts": {
        "str": pd.Series(texts, dtype="str"),
        "string[python]": pd.Series(texts, dtype="string[python]"),
        "string[pyarrow]": pd.Series(texts, dtype="string[pyarrow]"),
        "object": pd.Series(texts, dtype=object),
        "Arrow": pd.Series(texts, dtype=pd.ArrowDtype(pa.string())),
        "category": pd.Series(texts, dtype="str").astype("category"),
        "category of objects": pd.Series(texts, dtype=object).astype("category"),
        "category in another order": pd.Series(pd.Categorical(texts, categories=texts[::-1])),
    },
    "bytes": {
        "object": pd.Series([own.encode() for own in texts], dtype=object),
        "Arrow": pd.Series([own.encode() for own in texts], dtype=pd.ArrowDtype(pa.binary())),
    },
    "dates": {
        "object": pd.Series(dates, dtype=object),
        "Arrow": pd.Series(dates, dtype=pd.ArrowDtype(pa.date32())),
        "period": pd.Series(pd.period_range("2026-03-28", periods=ROWS, freq="D")),
    },
}
PAIRS = [
    (kind, one, other) for kind, own in KEYS.items() for one, other in itertools.combinations_with_replacement(own, 2)
]
LOST = [
    *(("times", one, other) for one, other in itertools.combinations(("s", "ms", "us", "ns"), 2)),
    ("times", "Arrow us", "Arrow ns"),
    ("times with a zone", "UTC us", "Berlin ns"),
    ("spans", "s", "us"),
    *(("numbers", own, "bool[pyarrow]") for own in ("int64", "bool", "Float64", "category of ints")),
    ("numbers", "bool[pyarrow]", "bool[pyarrow]"),
    ("numbers", "bool", "decimals"),
    ("numbers", "category of ints", "decimals"),
]
"""Pairs of which Dask 2026 loses rows; of two Arrow truth values where some are missing."""
HOWS = ("inner", "left", "outer")


@pytest.fixture(scope="module")
def here() -> Iterator[Client]:
    """A cluster in this process: a join of a few rows is over sooner."""
    with (
        dask.config.set({"dataframe.convert-string": False}),
        LocalCluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        mission_control.install(client)
        yield client


def sides(kind: str, one: str, other: str, missing: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    left = pd.DataFrame({"key": KEYS[kind][one], "left": np.arange(ROWS)})
    right = pd.DataFrame({"key": KEYS[kind][other], "right": np.arange(ROWS)}).iloc[::-1].reset_index(drop=True)
    if missing:
        left.loc[3, "key"] = right.loc[5, "key"] = None
    return left, right


def joined(left: pd.DataFrame, right: pd.DataFrame, **options: Any) -> Any:
    parts = dd.from_pandas(left, npartitions=3, sort=False), dd.from_pandas(right, npartitions=4, sort=False)
    return parts[0].merge(parts[1], broadcast=False, shuffle_method="p2p", **options)


def rows(frame: pd.DataFrame) -> list[tuple[int, int]]:
    return sorted(map(tuple, frame[["left", "right"]].fillna(-1).astype(int).to_numpy().tolist()))


def differing(pairs: list[tuple[str, str, str]]) -> list[str]:
    """Join each pair by Dask and by pandas, and return those whose rows differ."""
    made: dict[str, tuple[Any, Any]] = {}
    for number, (kind, one, other) in enumerate(pairs):
        for missing in (False, True):
            for how in (HOWS[(number + missing) % len(HOWS)], "inner"):
                try:
                    frames = sides(kind, one, other, missing)
                    wanted = frames[0].merge(frames[1], on="key", how=how)
                    result = joined(*frames, on="key", how=how)[["left", "right"]]
                except (TypeError, ValueError):
                    # pandas does not join them, a type has no missing value; or Dask refuses: it tries the join on two
                    # made-up rows first, and those of an object column are texts.
                    continue
                made[f"{kind}: {one} and {other}, {how}, missing {missing}"] = wanted, result
                break
    assert len(made) >= len(pairs) / 2
    results = dask.compute(*(own for _, own in made.values()))
    return [name for name, own in zip(made, results, strict=True) if rows(own) != rows(made[name][0])]


@pytest.mark.filterwarnings("ignore:Merging dataframes")
def test_a_join_equals_pandas_for_pairs_of_key_types(here):
    assert not differing([*LOST, *random.sample(PAIRS, 40)])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Merging dataframes")
@pytest.mark.parametrize("kind", KEYS)
def test_a_join_equals_pandas_for_each_pair_of_key_types(here, kind):
    assert not differing([own for own in PAIRS if own[0] == kind])


def test_keys_of_the_index_and_of_several_columns(here):
    left, right = sides("times", "us", "ns", False)
    by_index = joined(left.set_index("key"), right.set_index("key"), left_index=True, right_index=True, how="outer")
    by_one = joined(left, right.set_index("key"), left_on="key", right_index=True)
    left["other"], right["another"] = left["left"] % 7, (ROWS - 1 - right["right"]) % 7
    by_two = joined(left, right, left_on=["other", "key"], right_on=["another", "key"], how="left")
    by_two_wanted = left.merge(right, left_on=["other", "key"], right_on=["another", "key"], how="left")
    same = [(number, number) for number in range(ROWS)]
    results = dask.compute(*(own[["left", "right"]] for own in (by_index, by_one, by_two)))
    assert [rows(own) for own in results] == [same, same, rows(by_two_wanted)]


@pytest.mark.parametrize(
    ("kind", "one", "other", "how"),
    [
        *(
            ("times", *pair, how)
            for pair in (("us", "s"), ("s", "us"), ("us", "ns"), ("Arrow us", "Arrow ns"))
            for how in ("inner", "left", "right")
        ),
        # pandas joins the result of the other kinds with no column of numbers.
        ("numbers", "bool[pyarrow]", "int64", "inner"),
        ("numbers", "bool[pyarrow]", "int64", "left"),
    ],
)
def test_a_third_frame_joins_what_was_placed_by_the_common_type(here, kind, one, other, how):
    """Dask does not move the first join's result again: it relies on where its rows are."""
    left, right = sides(kind, one, other, False)
    key = right["key"] if how == "right" else left["key"]
    third = pd.DataFrame({"key": key.drop_duplicates(), "third": np.arange(key.nunique())})
    parts = [dd.from_pandas(own, npartitions=4, sort=False) for own in (left, right, third)]
    first = parts[0].merge(parts[1], broadcast=False, on="key", how=how)
    both = first.merge(parts[2], broadcast=False, on="key", how="left").compute()
    wanted = left.merge(right, on="key", how=how).merge(third, on="key", how="left")
    columns = ["left", "right", "third"]
    as_rows = [sorted(map(tuple, own[columns].fillna(-1).astype(int).to_numpy().tolist())) for own in (both, wanted)]
    assert as_rows[0] == as_rows[1]


def test_a_third_frame_joins_the_left_key_where_the_two_have_other_names(here):
    left = pd.DataFrame({"key": hours.dt.as_unit("us"), "left": np.arange(ROWS)})
    right = pd.DataFrame({"other": (hours + timedelta(hours=ROWS // 2)).dt.as_unit("ns"), "right": np.arange(ROWS)})
    third = pd.DataFrame({"key": hours.dt.as_unit("us"), "third": np.arange(ROWS)})
    parts = [dd.from_pandas(own, npartitions=4, sort=False) for own in (left, right, third)]
    first = parts[0].merge(parts[1], broadcast=False, left_on="key", right_on="other", how="outer")
    both = first.merge(parts[2], broadcast=False, on="key").compute()
    wanted = left.merge(right, left_on="key", right_on="other", how="outer").merge(third, on="key")
    columns = ["left", "right", "third"]
    as_rows = [sorted(map(tuple, own[columns].fillna(-1).astype(int).to_numpy().tolist())) for own in (both, wanted)]
    assert as_rows[0] == as_rows[1]


def test_a_partition_that_is_not_as_its_meta_says(here):
    """It is in a finer unit."""
    times = hours.dt.as_unit("s")
    frames = [
        pd.DataFrame({"key": times[:20], "left": np.arange(20)}),
        pd.DataFrame({"key": times[20:].dt.as_unit("ns"), "left": np.arange(20, ROWS)}),
    ]
    meta = frames[0].iloc[:0]
    left = dd.from_map(lambda at: frames[at], range(2), meta=meta)
    right = pd.DataFrame({"key": times.dt.as_unit("us"), "right": np.arange(ROWS)})
    got = left.merge(dd.from_pandas(right, npartitions=3, sort=False), on="key", broadcast=False, shuffle_method="p2p")
    assert sorted(got["right"].compute()) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore:Dask annotations")
def test_explain_says_how_keys_are_compared(here):
    with mission_control.job("explained", client=here) as name:
        joined(*sides("times", "s", "ms", False), on="key").compute()
        (own,) = [job for job in status(here)["jobs"] if job["job"] == name]
    assert len(own["shuffles"]) == 2 and all("compares as s" in shuffle["why"] for shuffle in own["shuffles"])


def test_sides_that_are_carried_by_two_engines_are_refused(here, monkeypatch):
    """The second side begins after its carrier has changed."""
    began: list[Any] = []
    why_not = shuffles.why_not

    def refuses_the_second(plugin: Any, spec: Any) -> str | None:
        began.append(spec.id)
        # The first side looks at both, and then the second begins.
        return "it was switched off" if len(began) > 2 else why_not(plugin, spec)

    monkeypatch.setattr(shuffles, "why_not", refuses_the_second)
    with pytest.raises(P2PConsistencyError, match="unlike rules"):
        joined(*sides("times", "s", "ns", False), on="key").compute()


def test_times_far_from_1970_stay_in_their_places():
    far = pd.Series(np.array(["3000-01-01", "NaT", "1969-12-31"], dtype="M8[s]"))
    placed = in_unit(far, "ns")
    assert placed[1] == NAT and placed[2] == -86_400 * 10**9 and placed[0] != NAT
    assert list(in_unit(pd.Series([np.nan, np.nan]), "us")) == [NAT, NAT]
    with pytest.raises(ValueError, match="key 'at' has"):
        in_unit(pd.Series([{"no": "time"}], name="at"), "us")
    assert list(in_unit(pd.Series(np.array([1_500, 2_000, "NaT"], dtype="M8[ms]")), "s")) == [NAT, 2, NAT]
    assert (in_unit(far.dt.as_unit("us"), "ns") == placed).all()


def test_like_types_stay_where_dask_places_them():
    like = [(ints.dtype, ints.astype(float).dtype), (pd.Series(texts).dtype, np.dtype(object))]
    like += [(KEYS["times with a zone"]["UTC us"].dtype, KEYS["times with a zone"]["Berlin us"].dtype)]
    for one, other in like:
        assert common_kinds([one], [other]) is None
    assert common_kinds([ints.dtype, hours.dt.as_unit("us").dtype], [ints.dtype, hours.dt.as_unit("s").dtype]) == (
        "dask",
        "us",
    )
    assert "as us" in str(Keys(("a", "b"), ("dask", "us")))
