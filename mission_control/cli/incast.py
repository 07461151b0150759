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
from mission_control.cli.options import Json, JsonLines, finite, not_empty
from mission_control.incast import advice, fitting, model, quantities, reads, statistics
from mission_control.scenario import BadInput, PrerequisiteMissing

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Predict, measure and mitigate incast. Many senders answer one receiver at once, a switch port overflows, and "
    "the link waits for retransmission timeouts.",
)
Option = typer.Option
SERVED_PORT = 7001
TokenFile = Annotated[
    Path | None,
    Option(metavar="FILE", help="File with a secret that both ends share; required beyond this host [none]"),
]


Fragment = Annotated[
    str | None,
    Option(metavar="SIZE", callback=not_empty, help="Bytes of each sender for a block, e.g. 64kB; or --total"),
]
Total = Annotated[
    str | None,
    Option(metavar="SIZE", callback=not_empty, help="Bytes of all senders for a block, e.g. 1MB"),
]
Link = Annotated[str, Option(metavar="RATE", help="Rate of the receiver's link")]
Rtt = Annotated[str, Option(metavar="TIME", help="Round-trip time without queues")]
Buffer = Annotated[
    str, Option(metavar="SIZE", help="Queue of the switch port before the receiver; or paper-003, that paper's switch")
]
Rto = Annotated[str, Option(metavar="TIME", help="Minimum retransmission timeout of the senders")]
Mss = Annotated[str, Option(metavar="SIZE", help="Payload of a full segment")]


@app.command()
def predict(
    senders: Annotated[
        str, Option(metavar="LIST", help="Numbers of senders to predict, e.g. 1-48 or 1,2,4,8-16")
    ] = "1-48",
    fragment: Annotated[
        str | None,
        Option(
            metavar="LIST",
            callback=not_empty,
            help="Bytes of each sender for a block, e.g. 16kB,64kB; or give --total",
        ),
    ] = None,
    total: Annotated[
        str | None,
        Option(metavar="LIST", callback=not_empty, help="Bytes of all senders for a block, e.g. 1MB,4MB"),
    ] = None,
    link: Link = "1Gbit/s",
    rtt: Rtt = "1ms",
    buffer: Buffer = "64KiB",
    rto: Rto = "200ms",
    mss: Mss = "1448B",
    initial_window: Annotated[
        str | None, Option(metavar="SIZE", help="Model paper: initial window, e.g. 14480B [ten segments]")
    ] = None,
    sack: Annotated[bool, Option(help="Model modern: selective acknowledgments and tail loss probes")] = True,
    equations: Annotated[str, Option("--model", metavar="NAME", help=f"Equations. {model.MODELS}")] = "modern",
    without: Annotated[
        str, Option(metavar="LIST", help=f"Model modern: terms to leave out, of {', '.join(model.TERMS)} [none]")
    ] = "",
    alpha: Annotated[
        float,
        Option(
            metavar="X", callback=finite, help="Fraction of an RTO in which the link is idle in a block (equation 4)"
        ),
    ] = 1.0,
    wait: Annotated[
        str, Option(metavar="TIME", help="Wait before each packet of a sender (paper 003), e.g. 1ms")
    ] = "0ms",
    as_json: Json = False,
) -> None:
    """Predict goodput for each number of senders, and where it collapses."""
    if equations not in ("modern", "paper"):
        raise BadInput(f"--model {equations}: unknown; use modern or paper")
    if (fragment is None) == (total is None):
        raise BadInput("what is sent? Use --fragment 64kB (of each sender) or --total 1MB (of all), not both")
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
    """Overwrite the line of progress on the terminal."""
    # A line that is wider than the terminal would not be taken back.
    columns = os.get_terminal_size(sys.stderr.fileno()).columns
    print(f"\r{text[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)


def redraws() -> bool:
    """Return whether stderr is a terminal that can overwrite a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def quiet(_: str) -> None:
    """Take the place of :func:`one_line` where no terminal shows it."""


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
    senders: Annotated[
        int | None, Option(metavar="N", min=1, max=quantities.SENDERS_MAX, help="Senders that answer at once, e.g. 40")
    ] = None,
    fragment: Fragment = None,
    total: Total = None,
    link: Link = "10Gbit/s",
    rtt: Rtt = "100us",
    buffer: Buffer = "512KiB",
    rto: Rto = "200ms",
    mss: Mss = "1448B",
    sack: Annotated[bool, Option(help="Senders have selective acknowledgments and tail loss probes")] = True,
    from_run: Annotated[
        Path | None, Option(metavar="DIR", help="Take hosts, links and shuffles from a run, e.g. results/ID [off]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict whether incast happens, and what each mitigation gives.

    Print from how many senders on goodput collapses, the expected goodput with each mitigation, and the lines to type.
    """
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
    """Print whether incast happens; then each mitigation with its expected goodput, and what to type."""
    goodput, ideal, onset = result["goodput_mbit"], result["ideal_mbit"], result["onset"]
    size = quantities.size(case.bytes)
    of = "in all" if case.total else "each"
    got = f"{case.senders} senders of {size} {of} get about {goodput:.0f} of {ideal:.0f} Mbit/s"
    begins = ""
    if onset["value"] is not None:
        begins = f"goodput collapses from {onset['value']} senders on (between {onset['low']} and {onset['high']})"
    if result["bites"]:
        print(f"Incast happens: {begins or got}.")
        if begins:
            print(f"{got[0].upper()}{got[1:]}.")
    else:
        print(f"No incast: {got}.")
        if begins:
            print(f"{begins[0].upper()}{begins[1:]}.")
    for warning in result["warnings"]:
        print(f"Note: {warning}")
    if not result["bites"]:
        return
    for remedy in result["remedies"]:
        if "unknown" in remedy:
            expected = f"no prediction: {remedy['unknown']}"
        else:
            low, high = remedy["interval"]
            expected = f"expected {remedy['expected_goodput_mbit']:.0f} Mbit/s ({low:.0f} to {high:.0f})"
        print(f"\n{remedy['what']}: {expected}")
        for line in remedy["lines"]:
            print(f"    {line}")
            if line in remedy["refused_here"]:
                print(f"      not on this machine: {remedy['refused_here'][line]}")


@app.command()
def fit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an incast run, e.g. results/ID")],
    as_json: Json = False,
) -> None:
    """Fit the model to a measured run.

    Print alpha, RTO, round-trip time and onset, and where model and measurement differ.
    """
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
    bind: Annotated[
        str, Option(metavar="ADDRESS", help="Address to listen at; only this host reaches 127.0.0.1")
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(metavar="N", min=0, max=65535, help="Port to listen at; 0: any free port")
    ] = SERVED_PORT,
    rate: Annotated[
        str | None, Option(metavar="RATE", help="Highest rate of each connection, e.g. 1Gbit/s [no limit]")
    ] = None,
    token_file: TokenFile = None,
    as_json: JsonLines = False,
) -> None:
    """Serve synthetic data to mission incast measure until interrupted.

    With --json print one line with the address and the port.
    """
    token = token_of(token_file, [bind])
    pace = None if rate is None else quantities.quantity(_native.parse_rate, rate)
    try:
        server, own = reads.serve(bind, port, token, pace)
    except OSError as error:
        raise BadInput(f"{bind}:{port}: cannot listen there ({error}); choose another --bind or --port") from None
    if as_json:
        print(json.dumps({"address": bind, "port": own}), flush=True)
    print(f"serves at {bind}:{own}; end with Ctrl-C", file=sys.stderr, flush=True)
    try:
        while True:
            interrupts.check()
            signal.sigtimedwait([], 0.25)
    finally:
        server.close()


@app.command()
def measure(
    senders: Annotated[
        str, Option("--from", metavar="LIST", help="Addresses of mission incast serve, e.g. h1:7001,h2:7001")
    ],
    fragment: Annotated[
        str | None, Option(metavar="SIZE", callback=not_empty, help="Bytes of each sender for a block [64kB]")
    ] = None,
    total: Total = None,
    blocks: Annotated[int, Option(metavar="N", min=1, max=10**6, help="Blocks to measure")] = 100,
    warm_up: Annotated[
        int, Option(metavar="N", min=0, max=10**6, help="Blocks to read first, which do not count")
    ] = 10,
    repeat: Annotated[int, Option(metavar="N", min=1, help="Repetitions, each over new connections")] = 1,
    concurrent: Annotated[
        str, Option(metavar="N", help="Senders to read from at once: N, all, or auto (found by trial)")
    ] = "all",
    congestion_control: Annotated[
        str | None, Option(metavar="NAME", help="Congestion control of the senders, e.g. cubic [their default]")
    ] = None,
    rto_min: Annotated[
        str | None, Option(metavar="TIME", help="Minimum RTO of the senders, e.g. 5ms [their default]")
    ] = None,
    ictcp: Annotated[
        str | None,
        Option(metavar="RATE", help="Control receive windows (ICTCP) for a link of this rate, e.g. 1Gbit/s [off]"),
    ] = None,
    jitter: Annotated[str, Option(metavar="TIME", help="Largest random delay of each request, e.g. 1ms")] = "0ms",
    deadline: Annotated[str, Option(metavar="TIME", help="End after this time with what was measured")] = "60s",
    seed: Annotated[int, Option(metavar="N", min=0, max=2**32 - 1, help="Seed of --jitter")] = 1,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> int:
    """Read blocks from all senders at once; print goodput and timeouts."""
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
        result = statistics.repeated(addresses, asked, token, repeat, one_line if redraws() else quiet)
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
    """Parse ``--concurrent``.

    Raises:
        BadInput: The text is not all, auto or a positive integer.
    """
    if text in ("all", "auto"):
        return text
    if not text.isdecimal() or int(text) == 0:
        raise BadInput(f"--concurrent {text}: use a number above 0, all, or auto")
    return int(text)


def print_measured(result: dict[str, Any], asked: reads.Reads) -> None:
    """Print goodput with its interval, block times, and the counters of the senders' kernels."""
    low, high = result["interval95"]
    if result["goodput_mbit"] is None:
        print("nothing was measured")
    else:
        print(f"goodput  {result['goodput_mbit']:.1f} Mbit/s ({low:.1f} to {high:.1f}), {len(result['blocks'])} blocks")
    if times := result.get("block_ms"):
        print(f"block    median {times['median']:.2f} ms, 95 % within {times['p95']:.2f} ms")
    heads = f"{'sender':<22} {'bytes':>10} {'retransmits':>11} {'timeouts':>8} {'marks':>6} {'cwnd':>5} {'srtt':>9}"
    print(f"{heads}  congestion control")
    for flow in result["flows"]:
        size, rtt = _native.format_bytes(flow["bytes"]), f"{flow['srtt_us'] / 1e3:.2f} ms"
        counts = f"{flow['retransmits']:11} {flow['timeouts']:8} {flow['marks']:6} {flow['cwnd']:5}"
        print(f"{flow['sender']:<22} {size:>10} {counts} {rtt:>9}  {flow['congestion_control']}")
    if asked.rto_min_us and result["flows"] and result["flows"][0]["rto_min_us"] != asked.rto_min_us:
        print(f"minimum RTO: {asked.rto_min_us} us requested, {result['flows'][0]['rto_min_us']} us in effect")
    for why in result["invalid_because"]:
        print(f"INVALID  {why}")
    if result["ended"]:
        print(f"ended early: {result['ended']}")


def token_of(file: Path | None, hosts: list[str]) -> bytes:
    """Return the shared secret; within this host none is needed.

    Raises:
        BadInput: It is needed, or cannot be read.
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
