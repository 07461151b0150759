"""`mission bench queries`: joins and aggregations of unchanged programs, by Dask and by Mission Control.

The tables are drawn after the TPC-H specification (revision 3, sections 1.4 and 4.2.3): the columns that these queries
need, with its sizes, keys and ranges. The `groupby` and `join` queries follow the tasks of the public database
benchmark (db-benchmark, questions of `groupby` and `join`). Each result is compared with that of pandas.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from mission_control.bench.dask import DISK, OURS, cluster_with, forgotten
from mission_control.bench.sort import timed
from mission_control.environment import describe
from mission_control.scenario import PrerequisiteMissing

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from distributed import Client

ROWS = {
    "lineitem": 6_000_000,
    "orders": 1_500_000,
    "customer": 150_000,
    "supplier": 10_000,
    "nation": 25,
    "x": 2_000_000,
}
"""Of scale 1; `nation` is the same at each scale. `x` is the database benchmark's."""
PARTITION_ROWS = 200_000
SEGMENTS = ("AUTOMOBILE", "BUILDING", "FURNITURE", "HOUSEHOLD", "MACHINERY")
MODES = ("AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK")
FIRST_DAY, DAYS = "1992-01-01", 2406
"""Of orders: to 1998-08-02."""
TOLERANCE = 1e-9
"""Of sums: their order is free."""

Tables = dict[str, Any]
"""Frames of pandas, or of Dask."""


def part(table: str, number: int, rows: int, scale: float) -> pd.DataFrame:
    """One partition of a table; keys count from 0 over all of them."""
    import numpy as np
    import pandas as pd

    chance = np.random.default_rng([number, *table.encode()])
    key = np.arange(rows) + number * PARTITION_ROWS
    of = {name: size_of(name, scale) for name in ROWS}
    if table == "nation":
        return pd.DataFrame({"n_nationkey": key, "n_name": [f"NATION {n}" for n in key], "n_regionkey": key % 5})
    if table == "supplier":
        return pd.DataFrame({"s_suppkey": key, "s_nationkey": chance.integers(0, 25, rows)})
    if table == "customer":
        segment = pd.array(np.array(SEGMENTS)[chance.integers(0, 5, rows)], dtype="str")
        return pd.DataFrame(
            {
                "c_custkey": key,
                "c_nationkey": chance.integers(0, 25, rows),
                "c_mktsegment": segment,
                "c_name": named(key),
            }
        )
    if table == "orders":
        date = pd.Timestamp(FIRST_DAY) + pd.to_timedelta(chance.integers(0, DAYS, rows), "D")
        # A third of the customers order nothing.
        customer = chance.integers(0, of["customer"], rows) // 3 * 3 % of["customer"]
        return pd.DataFrame({"o_orderkey": key, "o_custkey": customer, "o_orderdate": date, "o_shippriority": 0})
    if table == "lineitem":
        return pd.DataFrame(
            {
                "l_orderkey": chance.integers(0, of["orders"], rows),
                "l_suppkey": chance.integers(0, of["supplier"], rows),
                "l_quantity": chance.integers(1, 51, rows),
                "l_extendedprice": chance.integers(90_000, 10_494_951, rows) / 100,
                "l_discount": chance.integers(0, 11, rows) / 100,
                "l_tax": chance.integers(0, 9, rows) / 100,
                "l_returnflag": pd.array(np.array(["A", "N", "R"])[chance.integers(0, 3, rows)], dtype="str"),
                "l_linestatus": pd.array(np.array(["F", "O"])[chance.integers(0, 2, rows)], dtype="str"),
                "l_shipdate": pd.Timestamp(FIRST_DAY) + pd.to_timedelta(chance.integers(1, DAYS + 122, rows), "D"),
                "l_shipmode": pd.array(np.array(MODES)[chance.integers(0, 7, rows)], dtype="str"),
            }
        )
    # A hundred groups, as many as a hundredth of the rows, and their names.
    large = max(100, of["x"] // 100)
    return pd.DataFrame(
        {
            "id1": pd.array(np.char.add("id", chance.integers(0, 100, rows).astype(str)), dtype="str"),
            "id3": named(chance.integers(0, large, rows)),
            "id6": chance.integers(0, large, rows),
            "v1": chance.integers(1, 6, rows),
            "v3": chance.random(rows) * 100,
        }
    )


def named(keys: np.ndarray) -> Any:
    import numpy as np
    import pandas as pd

    return pd.array(np.char.add("name#", np.char.zfill(keys.astype(str), 9)), dtype="str")


def size_of(table: str, scale: float) -> int:
    return ROWS[table] if table == "nation" else max(1, int(ROWS[table] * scale))


# --- queries: they mean the same with pandas and with Dask ------------------------------------------------------------


def q1(t: Tables) -> Any:
    """TPC-H 1, pricing summary."""
    own = t["lineitem"][t["lineitem"]["l_shipdate"] <= "1998-09-02"]
    own = own.assign(net=own["l_extendedprice"] * (1 - own["l_discount"]))
    keys = ["l_returnflag", "l_linestatus"]
    return own.groupby(keys).agg({"l_quantity": "sum", "net": "sum", "l_discount": "mean"}).reset_index()


def q3(t: Tables) -> Any:
    """TPC-H 3, shipping priority; all rows."""
    customer = t["customer"][t["customer"]["c_mktsegment"] == "BUILDING"]
    orders = t["orders"][t["orders"]["o_orderdate"] < "1995-03-15"]
    items = t["lineitem"][t["lineitem"]["l_shipdate"] > "1995-03-15"]
    items = items.assign(revenue=items["l_extendedprice"] * (1 - items["l_discount"]))
    own = customer.merge(orders, left_on="c_custkey", right_on="o_custkey")
    own = own.merge(items, left_on="o_orderkey", right_on="l_orderkey")
    return own.groupby(["l_orderkey", "o_orderdate", "o_shippriority"])[["revenue"]].sum().reset_index()


def q5(t: Tables) -> Any:
    """TPC-H 5, local supplier volume, of one region."""
    nation = t["nation"][t["nation"]["n_regionkey"] == 2]
    own = t["customer"].merge(t["orders"], left_on="c_custkey", right_on="o_custkey")
    own = own.merge(t["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
    own = own.merge(t["supplier"], left_on=["l_suppkey", "c_nationkey"], right_on=["s_suppkey", "s_nationkey"])
    own = own.merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    own = own.assign(revenue=own["l_extendedprice"] * (1 - own["l_discount"]))
    return own.groupby("n_name")[["revenue"]].sum().reset_index()


def q10(t: Tables) -> Any:
    """TPC-H 10, returned items; all customers."""
    orders = t["orders"][(t["orders"]["o_orderdate"] >= "1993-10-01") & (t["orders"]["o_orderdate"] < "1994-01-01")]
    items = t["lineitem"][t["lineitem"]["l_returnflag"] == "R"]
    items = items.assign(revenue=items["l_extendedprice"] * (1 - items["l_discount"]))
    own = t["customer"].merge(orders, left_on="c_custkey", right_on="o_custkey")
    own = own.merge(items, left_on="o_orderkey", right_on="l_orderkey")
    return own.groupby(["c_custkey", "c_name"])[["revenue"]].sum().reset_index()


def q18(t: Tables) -> Any:
    """TPC-H 18, large volume customers: a group for each order."""
    volume = t["lineitem"].groupby("l_orderkey")[["l_quantity"]].sum().reset_index()
    return volume[volume["l_quantity"] > 300].merge(t["orders"], left_on="l_orderkey", right_on="o_orderkey")


def groupby_few(t: Tables) -> Any:
    """Database benchmark, groupby 1."""
    return t["x"].groupby("id1")[["v1"]].sum().reset_index()


def groupby_many(t: Tables) -> Any:
    """Database benchmark, groupby 3."""
    return t["x"].groupby("id3").agg({"v1": "sum", "v3": "mean"}).reset_index()


def join_large(t: Tables) -> Any:
    """Database benchmark, join 5: both sides are large; rows of the result by key."""
    left, right = t["orders"], t["lineitem"]
    own = left.merge(right, left_on="o_orderkey", right_on="l_orderkey", how="inner")
    return own.groupby("o_custkey")[["l_quantity"]].sum().reset_index()


QUERIES: dict[str, Callable[[Tables], Any]] = {
    "q1": q1,
    "q3": q3,
    "q5": q5,
    "q10": q10,
    "q18": q18,
    "groupby-few": groupby_few,
    "groupby-many": groupby_many,
    "join-large": join_large,
}


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    scale: float,
    rounds: int,
    memory: int,
    in_memory: bool,
    names: tuple[str, ...],
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the queries of these names, by Dask and by Mission Control in turn.

    Args:
        scale: 1 has 6,000,000 line items, about 0.6 GiB.
        memory: bytes of each of the four workers.
        in_memory: whether workers hold the tables; else they are made again for each query.

    Returns:
        ``rows``: query, stock_s, ours_s, ratio, spreads, and equal: whether all results are those of pandas.

    Raises:
        PrerequisiteMissing: Dask's data frames need pandas and pyarrow.
    """
    try:
        import dask.dataframe  # noqa: F401
        import pandas as pd
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise PrerequisiteMissing(f"{error.name} is needed: pip install '.[bench]' in the checkout") from None
    say("pandas computes what is expected")
    whole = {table: pd.concat(parts(table, scale), ignore_index=True) for table in ROWS}
    expected = {name: sorted_by_all(QUERIES[name](whole)) for name in names}
    del whole
    rows = []
    with ExitStack() as stack:
        clients = {mode: stack.enter_context(cluster_with(mode, memory)) for mode in (DISK, OURS)}
        tables = {mode: tables_on(client, scale, in_memory) for mode, client in clients.items()}
        for name in names:
            walls: dict[str, list[float]] = {mode: [] for mode in clients}
            equal = True
            for number in range(rounds + 1):
                for mode, client in clients.items():
                    say(f"{name}: {f'round {number} of {rounds}' if number else 'warm-up'}, {mode}")
                    known = len(client.cluster.scheduler.tasks)
                    got: list[Any] = []
                    with client.as_current():
                        wall, _ = timed(client, partial(compute, name, tables[mode], got))
                    if number:
                        walls[mode].append(wall)
                    equal &= same(got.pop(), expected[name])
                    forgotten(client, known)
            stock, own = (statistics.median(taken) for taken in walls.values())
            spreads = [[min(taken), max(taken)] for taken in walls.values()]
            found = {"stock_s": stock, "ours_s": own, "ratio": stock / own, "stock_spread": spreads[0]}
            rows.append({"query": name, **found, "ours_spread": spreads[1], "equal": equal})
    return {"rows": rows, "scale": scale, "rounds": rounds, "memory_bytes": memory, "environment": describe()}


def tables_on(client: Client, scale: float, in_memory: bool) -> Tables:
    import dask.dataframe as dd
    from distributed import wait

    tables: Tables = {}
    for table in ROWS:
        numbers, sizes = zip(*pieces(table, scale), strict=True)
        make = partial(part, table, scale=scale)
        tables[table] = dd.from_map(
            lambda n, r, make=make: make(n, r), numbers, sizes, meta=part(table, 0, 1, scale)[:0]
        )
    if in_memory:
        with client.as_current():
            tables = dict(zip(tables, client.persist(list(tables.values())), strict=True))
            wait(list(tables.values()))
    return tables


def compute(name: str, tables: Tables, got: list[Any]) -> None:
    got.append(QUERIES[name](tables).compute())


def pieces(table: str, scale: float) -> list[tuple[int, int]]:
    """Number and rows of each partition."""
    rows = size_of(table, scale)
    return [(n, min(PARTITION_ROWS, rows - n * PARTITION_ROWS)) for n in range(-(-rows // PARTITION_ROWS))]


def parts(table: str, scale: float) -> list[pd.DataFrame]:
    return [part(table, number, rows, scale) for number, rows in pieces(table, scale)]


def sorted_by_all(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in an order that does not depend on sums."""
    exact = [name for name in frame.columns if frame[name].dtype.kind != "f"]
    return frame.sort_values(exact or list(frame.columns)).reset_index(drop=True)


def same(got: pd.DataFrame, expected: pd.DataFrame) -> bool:
    import pandas as pd

    try:
        pd.testing.assert_frame_equal(
            sorted_by_all(got[list(expected.columns)]), expected, check_dtype=False, rtol=TOLERANCE, atol=1e-6
        )
    except (AssertionError, KeyError):
        return False
    return True
