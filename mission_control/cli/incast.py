"""`mission incast`: where many senders answer one receiver at once."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native, interrupts
from mission_control.cli.jobs import Json
from mission_control.incast import advice, fitting, model, quantities, reads, statistics
from mission_control.scenario import BadInput, PrerequisiteMissing

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Incast: many senders answer one receiver at once, a switch port overflows, and the link waits for timeouts.",
)
Option = typer.Option
SERVED_PORT = 7001
TokenFile = Annotated[Path | None, Option(help="file with a secret that both ends know; needed beyond this host")]


@app.command()
def predict(
    senders: Annotated[str, Option(help="how many, as in 1-48 or 1,2,4,8-16")] = "1-48",
    fragment: Annotated[str | None, Option(help="bytes of each sender for a block, as in 16kB,64kB")] = None,
    total: Annotated[str | None, Option(help="or of all together, as in 1MB")] = None,
    link: Annotated[str, Option(help="rate of the receiver's link")] = "1Gbit",
    rtt: Annotated[str, Option(help="round trip without queues")] = "1ms",
    buffer: Annotated[
        str, Option(help="of the port before the receiver; or paper-003, the switch of that paper")
    ] = "64KiB",
    rto: Annotated[str, Option(help="minimum retransmission timeout")] = "200ms",
    mss: Annotated[str, Option(help="payload of a full segment")] = "1448B",
    initial_window: Annotated[str | None, Option(help="paper: what a connection sends at first; ten segments")] = None,
    sack: Annotated[bool, Option(help="modern: selective acknowledgments and tail loss probes")] = True,
    equations: Annotated[str, Option("--model", help=model.MODELS)] = "modern",
    without: Annotated[str, Option(help=f"modern: terms that are left out, of {', '.join(model.TERMS)}")] = "",
    alpha: Annotated[float, Option(help="part of an RTO in which the link is idle in a block (equation 4)")] = 1.0,
    wait: Annotated[str, Option(help="before each packet of a sender (paper 003's inter-packet wait)")] = "0ms",
    as_json: Json = False,
) -> None:
    """Goodput for each number of senders, and from how many on it collapses."""
    if (fragment is None) == (total is None):
        raise BadInput("what is sent? Use --fragment 64kB (of each sender) or --total 1MB (of all)")
    segment = quantities.quantity(_native.parse_bytes, mss)
    window = 10 * segment if initial_window is None else quantities.quantity(_native.parse_bytes, initial_window)
    answer = model.predict(
        path=model.path(
            link=quantities.quantity(_native.parse_rate, link),
            rtt_s=quantities.quantity(_native.parse_duration, rtt),
            rto_s=quantities.quantity(_native.parse_duration, rto),
            buffer=buffer if buffer == model.PAPER_003 else quantities.quantity(_native.parse_bytes, buffer),
            mss=segment,
            initial_window=window,
            sack=sack,
        ),
        fragments=quantities.sizes(fragment) if fragment else (),
        totals=quantities.sizes(total) if total else (),
        senders=quantities.senders(senders),
        equations=equations,
        alpha=alpha,
        wait_s=quantities.quantity(_native.parse_duration, wait),
        without=[word.strip() for word in without.split(",") if word.strip()],
    )
    if as_json:
        typed = [word.strip() for word in (fragment or total or "").split(",")]
        result = {
            word: {key: entry[key] for key in ("value", "low", "high")}
            for word, entry in zip(typed, answer["onset"], strict=True)
        }
        print(json.dumps({"rows": answer["rows"], "onset": result}))
        return
    print_prediction(answer, (fragment or total or "").split(","))


def one_line(text: str) -> None:
    """Show progress in place of what was shown before."""
    # A line that is wider than the terminal would not be taken back.
    columns = os.get_terminal_size(sys.stderr.fileno()).columns
    print(f"\r{text[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)


def quiet(_: str) -> None:
    """Nobody looks."""


def print_prediction(answer: dict[str, Any], typed: list[str]) -> None:
    """A column for each fragment, a row for each number of senders; what has collapsed is marked."""
    per = len(answer["rows"]) // len(typed)
    columns = [answer["rows"][at * per : (at + 1) * per] for at in range(len(typed))]
    width = max(10, *(len(word) + 2 for word in typed))
    print("goodput in Mbit/s; * after the onset of incast")
    print("senders" + "".join(f"{word.strip():>{width}} " for word in typed))
    for rows in zip(*columns, strict=True):
        cells = (f"{row['goodput_mbit']:{width}.1f}{'*' if row['regime'] == 'collapsed' else ' '}" for row in rows)
        print(f"{rows[0]['senders']:7}" + "".join(cells))
    for word, entry in zip(typed, answer["onset"], strict=True):
        if entry["value"] is None:
            print(f"{word.strip()}: the median block is never late by half a timeout")
            continue
        print(
            f"{word.strip()}: collapses from {entry['value']} senders on (between {entry['low']} and {entry['high']})"
        )


@app.command()
def advise(
    senders: Annotated[int | None, Option(min=1, max=quantities.SENDERS_MAX, help="that answer at once")] = None,
    fragment: Annotated[str | None, Option(help="bytes of each sender for a block")] = None,
    total: Annotated[str | None, Option(help="or of all together")] = None,
    link: Annotated[str, Option(help="rate of the receiver's link")] = "10Gbit",
    rtt: Annotated[str, Option(help="round trip without queues")] = "100us",
    buffer: Annotated[str, Option(help="of the port before the receiver; or paper-003")] = "512KiB",
    rto: Annotated[str, Option(help="minimum retransmission timeout")] = "200ms",
    mss: Annotated[str, Option(help="payload of a full segment")] = "1448B",
    sack: Annotated[bool, Option(help="selective acknowledgments and tail loss probes")] = True,
    from_run: Annotated[Path | None, Option(help="results/ID of a run: its hosts, links and shuffles")] = None,
    as_json: Json = False,
) -> None:
    """Whether incast bites, from how many senders on, what each remedy gives, and the lines to type."""
    if from_run is not None:
        case = advice.of_run(from_run)
    elif senders is None or (fragment is None) == (total is None):
        raise BadInput(
            "what is sent by how many? Use --senders 40 --fragment 256kB (or --total), or --from-run results/ID"
        )
    else:
        (size,) = quantities.sizes(fragment or total or "")[:1]
        case = advice.Case(
            senders=senders,
            bytes=size,
            total=fragment is None,
            path=model.path(
                link=quantities.quantity(_native.parse_rate, link),
                rtt_s=quantities.quantity(_native.parse_duration, rtt),
                rto_s=quantities.quantity(_native.parse_duration, rto),
                buffer=buffer if buffer == model.PAPER_003 else quantities.quantity(_native.parse_bytes, buffer),
                mss=quantities.quantity(_native.parse_bytes, mss),
                sack=sack,
            ),
        )
    result = advice.advise(case)
    if as_json:
        print(json.dumps(result))
    else:
        print_advice(case, result)


def print_advice(case: advice.Case, result: dict[str, Any]) -> None:
    """First whether it bites; then each remedy with what it is worth; then what to type."""
    goodput, ideal = result["goodput_mbit"], result["ideal_mbit"]
    verdict = "Incast bites" if result["bites"] else "Incast does not bite"
    size = quantities.size(case.bytes)
    print(f"{verdict}: {case.senders} senders of {size} get some {goodput:.0f} of {ideal:.0f} Mbit/s.")
    onset = result["onset"]
    if onset["value"] is not None:
        print(f"It begins at {onset['value']} senders (between {onset['low']} and {onset['high']}).")
    for warning in result["warnings"]:
        print(f"Note: {warning}")
    if not result["bites"]:
        return
    for remedy in result["remedies"]:
        promised = f"nothing can be promised: {remedy['unknown']}" if "unknown" in remedy else ""
        if not promised:
            low, high = remedy["interval"]
            promised = f"{remedy['expected_goodput_mbit']:.0f} Mbit/s ({low:.0f} to {high:.0f})"
        print(f"\n{remedy['what']}: {promised}")
        for line in remedy["lines"]:
            print(f"    {line}")
            if line in remedy["refused_here"]:
                print(f"      not on this machine: {remedy['refused_here'][line]}")


@app.command()
def fit(folder: Annotated[Path, typer.Argument(help="of an incast run: results/<id>")], as_json: Json = False) -> None:
    """Of a run that was measured: alpha, RTO, round trip, onset; and where the model is not to be trusted."""
    result = fitting.fit(folder)
    if as_json:
        print(json.dumps(result))
        return
    for curve in result["curves"]:
        rto = "-" if curve["rto_s"] is None else f"{curve['rto_s'] * 1e3:.0f} ms"
        trip = f"round trip {curve['rtt_s'] * 1e3:.2f} ms"
        name = f"{curve['variant']} {quantities.size(curve['asked_bytes'])}".strip()
        print(f"{name}: onset {curve['onset'] or 'none of these'}, effective RTO {rto}, {trip}")
        print(
            f"  {'senders':>7} {'alpha':>6} {'95 %':>14} {'stalled':>8} {'model':>8} {'measured':>9} {'off':>6}  regime"
        )
        for point in curve["points"]:
            off = f"{point['residual']:+.0%}"
            ends = "{:.2f} to {:.2f}".format(*point["alpha95"]) if point["alpha95"] else "-"
            print(
                f"  {point['senders']:7} {point['alpha']:6.2f} {ends:>14} {point['stalled']:8.0%} "
                f"{point['model_mbit']:8.1f} {point['goodput_mbit']:9.1f} {off:>6}  {point['regime']}"
            )


@app.command()
def serve(
    bind: Annotated[str, Option(help="address to listen at; only this host reaches the default")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free")] = SERVED_PORT,
    rate: Annotated[str | None, Option(help="most that each connection gets, as in 1Gbit")] = None,
    token_file: TokenFile = None,
) -> None:
    """Serves bytes that mean nothing to `mission incast measure`, until interrupted."""
    token = token_of(token_file, [bind])
    pace = None if rate is None else quantities.quantity(_native.parse_rate, rate)
    try:
        server, own = reads.serve(bind, port, token, pace)
    except OSError as error:
        raise BadInput(f"{bind}:{port} cannot be listened at ({error}): choose --bind and --port") from None
    print(f"serves at {bind}:{own}; end with Ctrl-C", file=sys.stderr, flush=True)
    try:
        while True:
            interrupts.check()
            signal.sigtimedwait([], 0.25)
    finally:
        server.close()


@app.command()
def measure(
    senders: Annotated[str, Option("--from", help="where `mission incast serve` runs, as in h1:7001,h2:7001")],
    fragment: Annotated[str | None, Option(help="bytes of each sender for a block; 64kB")] = None,
    total: Annotated[str | None, Option(help="or of all together, as in 1MB")] = None,
    blocks: Annotated[int, Option(min=1, max=10**6, help="that count")] = 100,
    warm_up: Annotated[int, Option(min=0, max=10**6, help="blocks before them")] = 10,
    repeat: Annotated[int, Option(min=1, help="times, each over new connections")] = 1,
    concurrent: Annotated[
        str, Option(help="senders that are asked at once: a number, all, or auto: found by trial")
    ] = "all",
    congestion_control: Annotated[str | None, Option(help="of the senders' sockets")] = None,
    rto_min: Annotated[str | None, Option(help="of the senders' sockets, as in 5ms")] = None,
    ictcp: Annotated[
        str | None, Option(help="rate of the receiver's link: its windows follow what is left of it (ICTCP)")
    ] = None,
    jitter: Annotated[str, Option(help="requests are put off by a random time of up to this")] = "0ms",
    deadline: Annotated[str, Option(help="it ends after this, with what was measured")] = "60s",
    seed: Annotated[int, Option(min=0, help="of what is random")] = 1,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> int:
    """Reads blocks from all senders at once, as a job does that waits for the last of them."""
    addresses = [word.strip() for word in senders.split(",") if word.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BadInput(f"{address!r} is no sender: write HOST:PORT, as in h1:{SERVED_PORT}")
    if not addresses or (fragment and total):
        raise BadInput("use at least one sender, and --fragment or --total, not both")
    (size, *more) = quantities.sizes(fragment or total or "64kB")
    if more:
        raise BadInput("one measurement is of one size: use one --fragment or --total")
    if total:
        size = -(-size // len(addresses))
    token = token_of(token_file, [address.rpartition(":")[0] for address in addresses])
    asked = reads.Reads(
        fragment=size,
        blocks=blocks,
        warm_up=warm_up,
        concurrent=concurrent_of(concurrent),
        jitter_us=round(quantities.quantity(_native.parse_duration, jitter) * 1e6),
        seed=seed,
        deadline_s=quantities.quantity(_native.parse_duration, deadline),
        congestion_control=congestion_control,
        rto_min_us=None if rto_min is None else round(quantities.quantity(_native.parse_duration, rto_min) * 1e6),
        ictcp_link=None if ictcp is None else quantities.quantity(_native.parse_rate, ictcp),
    )
    try:
        result = statistics.repeated(addresses, asked, token, repeat, one_line if sys.stderr.isatty() else quiet)
    except ConnectionError as error:
        raise PrerequisiteMissing(f"{error}: is `mission incast serve` running there?") from None
    if as_json:
        print(json.dumps(result))
    else:
        print_measured(result, asked)
    if result["interrupted"]:
        return 130
    return 0 if result["ended"] is None and result["valid"] else 5 if result["ended"] is None else 1


def concurrent_of(text: str) -> int | Any:
    """
    Raises:
        BadInput: it is none.
    """
    if text in ("all", "auto"):
        return text
    if not text.isdecimal() or int(text) == 0:
        raise BadInput(f"--concurrent {text}: use a number above 0, all, or auto")
    return int(text)


def print_measured(result: dict[str, Any], asked: reads.Reads) -> None:
    """What a person wants to know first: the rate, how far it can be trusted, and what the senders' kernels did."""
    low, high = result["interval95"]
    if result["goodput_mbit"] is None:
        print("nothing was measured")
    else:
        print(f"goodput  {result['goodput_mbit']:.1f} Mbit/s ({low:.1f} to {high:.1f}), {len(result['blocks'])} blocks")
    if times := result.get("block_ms"):
        print(f"block    median {times['median']:.2f} ms, 95 % within {times['p95']:.2f} ms")
    heads = f"{'sender':<22} {'bytes':>10} {'sent again':>10} {'timeouts':>8} {'marks':>6} {'cwnd':>5} {'srtt':>9}"
    print(f"{heads}  congestion control")
    for flow in result["flows"]:
        size, rtt = _native.format_bytes(flow["bytes"]), f"{flow['srtt_us'] / 1e3:.2f} ms"
        counts = f"{flow['retransmits']:10} {flow['timeouts']:8} {flow['marks']:6} {flow['cwnd']:5}"
        print(f"{flow['sender']:<22} {size:>10} {counts} {rtt:>9}  {flow['congestion_control']}")
    if asked.rto_min_us and result["flows"] and result["flows"][0]["rto_min_us"] != asked.rto_min_us:
        print(f"minimum RTO: {asked.rto_min_us} us asked, {result['flows'][0]['rto_min_us']} us given")
    for why in result["invalid_because"]:
        print(f"INVALID  {why}")
    if result["ended"]:
        print(f"ended early: {result['ended']}")


def token_of(file: Path | None, hosts: list[str]) -> bytes:
    """The secret; none is needed within this host.

    Raises:
        BadInput: it is needed, or cannot be read.
    """
    if file is not None:
        try:
            if secret := file.read_bytes().strip():
                return secret
        except OSError as error:
            raise BadInput(f"--token-file {file} cannot be read ({error.strerror})") from None
        raise BadInput(f"--token-file {file} is empty: write a secret into it, as by `openssl rand -hex 32`")
    beyond = [host for host in hosts if host not in ("127.0.0.1", "localhost", "::1")]
    if beyond:
        raise BadInput(f"{beyond[0]} is beyond this host: give both ends the same --token-file")
    return b""
