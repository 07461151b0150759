"""`mission bench`: what Mission Control gains, beside what others do in the same run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.cli.bounded import announce, bounded, gib
from mission_control.cli.options import Json, finite, make_folder

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compare Mission Control with the alternatives in one run. Samples of all variants alternate.",
)


said: list[str] = []
"""Progress lines of this process; an interrupted benchmark prints them with --json."""


def say(text: str) -> None:
    said.append(text)
    print(text, file=sys.stderr, flush=True)


def measured(as_json: bool, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Measure and return the result. For programs, print it and return ``None``.

    After an interrupt, programs get the progress lines, and the exit status is 130.
    """
    announce()
    try:
        result = measure()
    except KeyboardInterrupt:
        if as_json:
            print(json.dumps({"interrupted": True, "rows": [], "progress": said}))
        raise
    if not as_json:
        return result
    print(json.dumps(result))
    return None


@app.command()
@bounded(
    lambda o: 20 + o["rounds"] * len(o["transport"] or range(4)) * (5 * len(o["size"] or range(5)) + 12 * o["workers"]),
    rounds=2,
    size=["64MiB"],
    transport=["tcp", "tls"],
    workers=False,
)
def transfer(
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 5,
    size: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Size of the objects, e.g. 16MiB; repeatable [all]")
    ] = None,
    transport: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Transport to measure, e.g. tcp; repeatable [all]")
    ] = None,
    workers: Annotated[bool, typer.Option(help="Measure between workers of Dask clusters, too")] = True,
    as_json: Json = False,
) -> None:
    """Compare transfers of one object over loopback.

    Variants: iperf3, a C receiver, a rustls loop, Dask's comms, Mission Control's fetch. --size, --transport and
    --no-workers select a part. An interrupt prints what was measured until then.
    """
    from mission_control.bench.transfer import OBJECTS, TRANSPORTS, measure

    known = {_native.format_bytes(own).replace(".0", ""): own for own in OBJECTS}
    sizes = tuple(bytes_of(text, "--size") for text in size or ()) or OBJECTS
    one_of("--size", sizes, known.values(), list(known))
    transports = tuple(transport or TRANSPORTS)
    one_of("--transport", transports, TRANSPORTS, TRANSPORTS)
    announce()
    result = measure(rounds, sizes, transports, workers, say)
    if as_json:
        print(json.dumps(result))
    else:
        print_transfer(result)
    if result["interrupted"]:
        raise KeyboardInterrupt


def one_of(option: str, given: Iterable[Any], known: Iterable[Any], names: Iterable[str]) -> None:
    from mission_control.scenario import BadInput

    if unknown := set(given) - set(known):
        raise BadInput(f"{option} {min(unknown)}: unknown; use one of {', '.join(names)}")


def print_transfer(result: dict[str, Any]) -> None:
    rounds = result["rounds"]
    print(f"congestion control {result['congestion_control']}, iperf3 {result['iperf3']}, {rounds} rounds")
    print(f"{'what':<24}{'transport':<10}{'flows':>5}{'object':>12}{'MiB/s':>8}{'CPU-s/GiB':>11}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        size = _native.format_bytes(row["object_bytes"])
        print(
            f"{row['what']:<24}{row['transport']:<10}{row['flows']:>5}{size:>12}{row['mib_per_s']:>8.0f}"
            f"{row['cpu_s_per_gib']:>11.2f}  {low:.0f} to {high:.0f}"
        )
    print_ratios(result)


@app.command()
@bounded(lambda o: 20 + o["rounds"] * 220 * gib(o["size"]), size="256MiB", rounds=1)
def sort(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the input, e.g. 256MiB")] = "1GiB",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Worker processes")] = 4,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 3,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder for input and output")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Compare sorts of files: Dask's sort_values, and ours without and with Mission Control."""
    from mission_control.bench.sort import measure

    make_folder("--data", data)
    result = measured(as_json, lambda: measure(bytes_of(size, "--size"), workers, rounds, data, say=say))
    if result is None:
        return
    print(f"{size} from files to files, {workers} workers, {rounds} rounds")
    print(f"{'what':<44}{'seconds':>8}{'MiB/s':>8}{'CPU-s/GiB':>11}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(
            f"{row['what']:<44}{row['seconds']:>8.2f}{row['mib_per_s']:>8.0f}{row['cpu_s_per_gib']:>11.2f}"
            f"  {low:.2f} to {high:.2f} s"
        )
    print_ratios(result)


def threads_of_a_worker(default: str) -> Any:
    """The option --threads; `default` in words."""
    return typer.Option("--threads", metavar="N", min=1, help=f"Threads of a worker; repeat it  [default: {default}]")


@app.command()
@bounded(
    lambda o: len(o["threads"] or [1]) * len(o["case"] or range(7)) * (25 + 110 * (o["rounds"] + 1) * gib(o["size"])),
    size="256MiB",
    rounds=1,
    case=["shuffle", "merge"],
)
def dask(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the data, e.g. 256MiB")] = "1GiB",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 5,
    case: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Case to measure, e.g. shuffle; repeatable [all]")
    ] = None,
    threads: Annotated[list[int] | None, threads_of_a_worker("1")] = None,
    as_json: Json = False,
) -> None:
    """Compare unchanged Dask programs with and without Mission Control.

    Cases: shuffles, merges, groupbys, sorts and rechunks; --case, --size and --rounds select a part. The results of all
    modes are compared by content. Without --case, cases that need more data than --size are left out.
    """
    from mission_control.bench.dask import CASES, fits, measure
    from mission_control.bench.interleaved import for_threads

    nbytes = bytes_of(size, "--size")
    known = [own.name for own in CASES]
    names = tuple(case or [own.name for own in CASES if fits(own, nbytes)])
    one_of("--case", names, known, known)
    result = measured(
        as_json, lambda: for_threads(threads or [1], lambda count: measure(nbytes, rounds, names, count, say))
    )
    if result is None:
        return
    print(f"{size}, 4 workers, {rounds} rounds; the last of three runs, and the first, with cold memory")
    measured_of = f"{'seconds':>8}{'CPU-s/GiB':>11}{'first, s':>10}{'CPU-s/GiB':>11}"
    print(f"{'threads':<9}{'what':<34}{'mode':<18}{measured_of}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(
            f"{row['threads']:<9}{row['what']:<34}{row['mode']:<18}{row['wall_s']:>8.2f}{row['cpu_s_per_gib']:>11.2f}"
            f"{row['first_wall_s']:>10.2f}{row['first_cpu_s_per_gib']:>11.2f}  {low:.2f} to {high:.2f} s"
        )
    print_ratios(result)
    print("of all bytes between processes Mission Control carried:")
    for name, part in result["carried"].items():
        print(f"  {name:<32}{part:>8.2%}")


@app.command()
@bounded(
    lambda o: 30 + 25 * len(o["query"] or range(8)) * (o["rounds"] + 1) * (0.1 + o["scale"]),
    scale=0.05,
    rounds=1,
)
def queries(
    scale: Annotated[
        float, typer.Option(metavar="X", min=0.001, callback=finite, help="Scale: 1 is 6,000,000 line items, 0.6 GiB")
    ] = 0.5,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 3,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each of the four workers, e.g. 2GiB")] = "4GiB",
    in_memory: Annotated[bool, typer.Option(help="Workers hold the tables, or generate them for each query")] = True,
    query: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Query to measure, e.g. q3; repeatable [all]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare database queries with and without Mission Control.

    Joins and aggregations of TPC-H and of the public database benchmark. Each result is compared with that of pandas.
    """
    from mission_control.bench.queries import QUERIES, measure

    names = tuple(query or QUERIES)
    one_of("--query", names, QUERIES, QUERIES)
    given = (scale, rounds, bytes_of(memory, "--memory"), in_memory, names)
    if (result := measured(as_json, lambda: measure(*given, say))) is None:
        return
    print(f"scale {scale}, 4 workers of one thread, {rounds} rounds")
    print(f"{'query':<16}{'Dask, s':>9}{'ours, s':>9}{'ratio':>7}  as pandas")
    for row in result["rows"]:
        equal = "yes" if row["equal"] else "NO"
        print(f"{row['query']:<16}{row['stock_s']:>9.2f}{row['ours_s']:>9.2f}{row['ratio']:>7.2f}  {equal}")
    if not all(row["equal"] for row in result["rows"]):
        raise typer.Exit(1)


@app.command()
@bounded(lambda o: 45 * o["rounds"] * len(o["threads"] or range(3)), rounds=2)
def overhead(
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Pairs of samples")] = 30,
    threads: Annotated[list[int] | None, threads_of_a_worker("1, 4, 8")] = None,
    as_json: Json = False,
) -> None:
    """Measure the overhead for programs that shuffle nothing: pairs of Dask alone and Dask with Mission Control."""
    from mission_control.bench.overhead import THREADS, measure

    if (result := measured(as_json, lambda: measure(rounds, tuple(threads or THREADS), say))) is None:
        return
    print(f"{rounds} rounds; ratios to Dask alone, round by round")
    print(f"{'threads':<9}{'program':<10}{'mode':<33}{'measured':<15}{'median':>8}  95 % interval")
    for row in result["ratios"]:
        print(
            f"{row['threads']:<9}{row['program']:<10}{row['mode']:<33}{row['measured']:<15}{row['median']:>8.3f}"
            f"  {row['low']:.3f} to {row['high']:.3f}"
        )


@app.command()
@bounded(lambda o: len(o["threads"] or range(3)) * (20 + 25 * (o["rounds"] + 1)), rounds=1)
def messages(
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 5,
    threads: Annotated[list[int] | None, threads_of_a_worker("1, 4, 8")] = None,
    as_json: Json = False,
) -> None:
    """Compare results between Dask workers over tcp:// and mission://.

    Both are measured plain and encrypted.
    """
    from mission_control.bench.interleaved import for_threads
    from mission_control.bench.messages import measure
    from mission_control.bench.overhead import THREADS

    call = partial(measure, rounds, say=say)
    if (result := measured(as_json, lambda: for_threads(threads or THREADS, call))) is None:
        return
    print(f"{'threads':<9}{'what':<32}{'protocol':<12}{'ms':>10}{'MiB/s':>8}{'CPU-s/GiB':>11}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        rate = f"{row['mib_per_s']:>8.0f}{row['cpu_s_per_gib']:>11.2f}" if row["mib_per_s"] else " " * 19
        print(
            f"{row['threads']:<9}{row['what']:<32}{row['mode']:<12}{row['wall_s'] * 1e3:>10.2f}{rate}"
            f"  {low * 1e3:.2f} to {high * 1e3:.2f} ms"
        )
    print_ratios(result)


@app.command()
@bounded(
    lambda o: len(o["threads"] or [1]) * (20 + (o["rounds"] + 1) * (20 + 60 * gib(o["size"]))), size="128MiB", rounds=1
)
def streams(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes to carry, e.g. 256MiB")] = "1GiB",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 5,
    threads: Annotated[list[int] | None, threads_of_a_worker("1")] = None,
    as_json: Json = False,
) -> None:
    """Compare streams with put and fetch.

    Throughput, latency of small writes, and two stages that run at the same time.
    """
    from mission_control.bench.interleaved import for_threads
    from mission_control.bench.streams import measure

    call = partial(measure, bytes_of(size, "--size"), rounds, say=say)
    if (result := measured(as_json, lambda: for_threads(threads or [1], call))) is None:
        return
    print(f"{'threads':<9}{'what':<40}{'mode':<28}{'transport':<11}{'seconds':>9}{'CPU-s':>8}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(
            f"{row['threads']:<9}{row['what']:<40}{row['mode']:<28}{row['transport']:<11}{row['wall_s']:>9.2f}{row['cpu_s']:>8.2f}"
            f"  {low:.2f} to {high:.2f} s"
        )
    for transport, own in result["latency_ms"].items():
        print(f"a small write to its reader, {transport}: p50 {own['p50']:.2f} ms, p99 {own['p99']:.2f} ms")
    print_ratios(result)


@app.command()
@bounded(lambda o: 20 + (o["rounds"] + 1) * (10 + o["steps"] / 20), steps=100, rounds=2)
def delegates(
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Calls of each chain")] = 1000,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 5,
    as_json: Json = False,
) -> None:
    """Compare chains of delegated calls with chains of submitted tasks.

    Also k-means without and with a driver.
    """
    from mission_control.bench.delegates import measure

    if (result := measured(as_json, lambda: measure(steps, rounds, say))) is None:
        return
    print(f"{'what':<28}{'mode':<42}{'seconds':>9}{'CPU-s':>8}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(f"{row['what']:<28}{row['mode']:<42}{row['wall_s']:>9.2f}{row['cpu_s']:>8.2f}  {low:.2f} to {high:.2f} s")
    print_ratios(result)


@app.command()
@bounded(lambda o: 20 + (o["rounds"] + 1) * (5 + 100 * gib(o["size"])), size="64MiB", rounds=1)
def mapreduce(
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the text and of the records, e.g. 256MiB")
    ] = "1GiB",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Worker processes")] = 4,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 5,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder for input and output")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Compare map_reduce with Dask's bag and with a sort by hand."""
    from mission_control.bench.mapreduce import measure

    make_folder("--data", data)
    result = measured(as_json, lambda: measure(bytes_of(size, "--size"), workers, rounds, data, say))
    if result is None:
        return
    print(f"{'what':<14}{'mode':<48}{'seconds':>9}{'CPU-s':>8}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(f"{row['what']:<14}{row['mode']:<48}{row['wall_s']:>9.2f}{row['cpu_s']:>8.2f}  {low:.2f} to {high:.2f} s")
    print_ratios(result)


@app.command()
@bounded(
    lambda o: (
        10 + o["receivers"] + o["rounds"] * 3 * o["receivers"] * gib(o["size"]) * 2**33 / rate_of(o["rate"], "--rate")
    ),
    receivers=8,
    rounds=1,
)
def broadcast(
    receivers: Annotated[int, typer.Option(metavar="N", min=1, help="Receiving processes")] = 32,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the object, e.g. 8MiB")] = "32MiB",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Rate of every sender, e.g. 100Mbit/s")] = "256Mbit/s",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 3,
    as_json: Json = False,
) -> None:
    """Compare broadcasts from the owner alone and from receivers, too.

    All senders have one rate.
    """
    from mission_control.bench.broadcast import measure

    result = measured(
        as_json, lambda: measure(receivers, bytes_of(size, "--size"), rate_of(rate, "--rate"), rounds, say=say)
    )
    if result is None:
        return
    print(f"{size} object, every sender at {rate}, {rounds} rounds")
    print(f"{'what':<34}{'receivers':>10}{'seconds':>9}{'CPU-s/GiB':>11}{'from owner':>12}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(
            f"{row['what']:<34}{row['receivers']:>10}{row['seconds']:>9.2f}{row['cpu_s_per_gib']:>11.2f}"
            f"{row['owner_copies']:>12.2f}  {low:.2f} to {high:.2f} s"
        )
    print_ratios(result)


@app.command()
@bounded(lambda o: 15 + o["rounds"] * (5 + 20 * gib(o["size"])), size="256MiB", objects=16, rounds=1)
def retirement(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of all objects together, e.g. 256MiB")] = "1GiB",
    objects: Annotated[int, typer.Option(metavar="N", min=1, help="Number of objects")] = 64,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 3,
    as_json: Json = False,
) -> None:
    """Compare the time to move a retiring worker's objects with a fetch of them."""
    from mission_control.bench.retirement import measure

    result = measured(as_json, lambda: measure(bytes_of(size, "--size"), objects, rounds, say=say))
    if result is None:
        return
    print(
        f"{size} in {objects} objects, tcp between two workers, {rounds} rounds; {result['recomputed']} computed again"
    )
    print(f"{'what':<48}{'seconds':>9}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(f"{row['what']:<48}{row['seconds']:>9.2f}  {low:.2f} to {high:.2f} s")
    print_ratios(result)


@app.command()
@bounded(
    lambda o: 20 + 4 * o["pairs"] + o["rounds"] * 3 * gib(o["size"]) * 2**33 / rate_of(o["rate"], "--rate"),
    pairs=2,
    rounds=2,
)
def paths(
    pairs: Annotated[int, typer.Option(metavar="N", min=2, help="Pairs of hosts with two paths")] = 4,
    single: Annotated[int, typer.Option(metavar="N", min=0, help="Hosts with one path")] = 1,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes that each host reads, e.g. 8MiB")] = "16MiB",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Rate of every link, e.g. 50Mbit/s")] = "20Mbit/s",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 5,
    as_json: Json = False,
) -> None:
    """Compare one path with the chosen transport between hosts with two paths (needs root)."""
    from mission_control.bench.paths import measure

    result = measured(
        as_json, lambda: measure(pairs, single, bytes_of(size, "--size"), rate_of(rate, "--rate"), rounds, say=say)
    )
    if result is None:
        return
    print(f"{size} for each of {2 * pairs} hosts with two paths, {single} with one, links of {rate}, {rounds} rounds")
    print(f"{'what':<30}{'seconds':>9}  spread; bytes by transport")
    for row in result["rows"]:
        low, high = row["spread"]
        carried = ", ".join(f"{name} {_native.format_bytes(count)}" for name, count in row["transports"].items())
        print(f"{row['what']:<30}{row['seconds']:>9.2f}  {low:.2f} to {high:.2f} s; {carried}")
    print_ratios(result)


@app.command()
@bounded(lambda o: o["rounds"] * 2 * (10 + 3 * o["hosts"] + o["seconds"]), seconds=5.0, rounds=1)
def idle(
    hosts: Annotated[int, typer.Option(metavar="N", min=2, help="Hosts of the lab")] = 4,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, max=86_400, callback=finite, help="Seconds of each sample")
    ] = 20,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of each variant; prints medians")] = 3,
    as_json: Json = False,
) -> None:
    """Measure the messages of an idle cluster with and without Mission Control (needs root)."""
    from mission_control.bench.idle import measure

    result = measured(as_json, lambda: measure(hosts, seconds, rounds, say=say))
    if result is None:
        return
    print(f"{hosts} hosts at rest, {seconds:g} s each, {rounds} rounds")
    print(f"{'what':<24}{'bytes a host and second':>24}  spread")
    for row in result["rows"]:
        low, high = row["spread"]
        print(f"{row['what']:<24}{row['bytes_per_second']:>24.0f}  {low:.0f} to {high:.0f}")
    print(f"Mission Control adds {result['more']:.0f}")


@app.command()
@bounded(lambda o: 60 + 100 * len(o["members"] or range(3)) + 5 * o["rounds"], members=[10], rounds=5)
def service(
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Updates of each variant; prints medians")] = 20,
    members: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, max=1000, help="Members, e.g. 10; repeatable [10, 100, 1000]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how soon members of a control service have an update, with each store that is installed."""
    from mission_control.bench.service import MEMBERS, measure, table

    result = measured(as_json, lambda: measure(rounds, tuple(members or MEMBERS), say=say))
    if result is not None:
        print(table(result))


@app.command()
@bounded(lambda o: 15 + 2 * o["rounds"], rounds=10)
def served(
    rounds: Annotated[int, typer.Option(metavar="N", min=5, help="Pairs of samples; prints medians")] = 30,
    as_json: Json = False,
) -> None:
    """Compare a shuffle with and without a control service."""
    from mission_control.bench.served import measure

    result = measured(as_json, lambda: measure(rounds, say=say))
    if result is not None:
        ratio = result["ratio"]
        print(f"with the service {result['with_s']:.2f} s, without {result['without_s']:.2f} s")
        print(f"ratio {ratio['median']:.3f} (95 %: {ratio['low']:.3f} to {ratio['high']:.3f}), {result['pairs']} pairs")


@app.command()
@bounded(lambda o: 30 + 3 * o["rounds"], rounds=10)
def sessions(
    rounds: Annotated[int, typer.Option(metavar="N", min=5, help="Shuffles of each variant; prints medians")] = 30,
    as_json: Json = False,
) -> None:
    """Compare one session per host with one per process.

    Messages, bytes, and the CPU time of the scheduler.
    """
    from mission_control.bench.sessions import measure, table

    result = measured(as_json, lambda: measure(rounds, say=say))
    if result is not None:
        print(table(result))


@app.command()
@bounded(lambda o: 70)
def console(
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures of the page to this folder [off]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the CPU time of the live page with 10,000 active transfers.

    That of the service, and that of a browser (Chromium).
    """
    from mission_control.bench.console import measure

    if pictures is not None:
        make_folder("--pictures", pictures)
    result = measured(as_json, lambda: measure(pictures, say=say))
    if result is not None:
        print(f"{result['transfers']} transfers that all move each second; parts of a core:")
        for what in ("service_alone", "service_watched", "browser"):
            print(f"{what.replace('_', ' '):<18}{result[what]:>8.3f}")


@app.command()
@bounded(lambda o: 60)
def decisions(as_json: Json = False) -> None:
    """Measure the time of decisions.

    A round of weights, a chunk from request to grant, and the classification of a graph.
    """
    from mission_control.bench.decisions import measure

    result = measured(as_json, measure)
    if result is None:
        return
    for row in result["rows"]:
        seconds = row["seconds"]
        shown = f"{seconds * 1e3:>10.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:>10.2f} us"
        print(f"{row['what']:<70}{shown}")


def bytes_of(text: str, option: str) -> int:
    return _parsed(_native.parse_bytes, text, option)


def rate_of(text: str, option: str) -> int:
    return _parsed(_native.parse_rate, text, option)


def _parsed(parse: Callable[[str], int], text: str, option: str) -> int:
    from mission_control.scenario import BadInput

    try:
        return parse(text)
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from None


def print_ratios(result: dict[str, Any]) -> None:
    print("\nratios of medians:")
    for name, ratio in result["ratios"].items():
        print(f"{ratio:8.2f}  {name}")


@app.command()
@bounded(lambda o: 150 * o["settings"], settings=1)
def incast(
    settings: Annotated[int, typer.Option(metavar="N", min=1, help="Random settings to measure")] = 10,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the settings")] = 1,
    as_json: Json = False,
) -> None:
    """Compare the predicted onset of incast with the lab (needs root)."""
    from mission_control.bench.incast import bench, summary

    result = measured(as_json, lambda: bench(settings, seed, say))
    if result is None:
        return
    print("\n".join(summary(result)))
    print(f"{result['inside']} of {settings} inside the model's interval; seed {seed}")


@app.command()
@bounded(lambda o: 200 * o["settings"], settings=1)
def advice(
    settings: Annotated[int, typer.Option(metavar="N", min=1, help="Random settings to measure, with incast")] = 5,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the settings")] = 1,
    as_json: Json = False,
) -> None:
    """Compare the goodput that mission incast advise expects with the lab (needs root)."""
    from mission_control.bench.advice import bench, summary

    if (result := measured(as_json, lambda: bench(settings, seed, say))) is not None:
        print("\n".join(summary(result)))


@app.command()
@bounded(lambda o: 60 * report_minutes(o["only"]), only=["fetch", "share"])
def report(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Measure this number alone, e.g. share; repeatable [all]")
    ] = None,
    as_json: Json = False,
) -> None:
    """The front page of docs/measurements.md, measured again on this machine: eleven numbers with their commands.

    What needs root, a checkout or another program says so where it is missing.
    """
    from mission_control.bench.report import ROWS, measure

    names = [row.name for row in ROWS]
    for name in only or ():
        one_of("--only", [name], names, names)
    announce()
    result = measure(only or names, say)
    if as_json:
        print(json.dumps(result))
    else:
        print_report(result)
    if result["interrupted"]:
        raise KeyboardInterrupt


def report_minutes(only: list[str] | None) -> float:
    """Return the minutes that the commands of these rows take."""
    from mission_control.bench.report import ROWS

    commands = {row.command: row.takes for row in ROWS if not only or row.name in only}
    return sum(float(takes.removesuffix(" min")) for takes in commands.values())


def print_report(result: dict[str, Any]) -> None:
    """Print the rows as the table of the front page."""
    print("| question | value | lowest | highest | unit | command |")
    print("|---|---|---|---|---|---|")
    for row in result["rows"]:
        if "why" in row:
            cells = [f"not measured: {row['why']}", "", ""]
        else:
            cells = ["" if row[name] is None else f"{row[name]:.3g}" for name in ("value", "lowest", "highest")]
        print("|", " | ".join([row["question"], *cells, row["unit"], f"`{row['command']}`"]), "|")
