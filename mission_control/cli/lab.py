"""`mission lab`: a data centre of network namespaces on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.cli.options import Json, JsonLines, finite, not_empty
from mission_control.lab import picture
from mission_control.lab.check import check as findings
from mission_control.lab.described import lab_of
from mission_control.lab.lab import Lab, down_all
from mission_control.lab.machine import require
from mission_control.lab.stack import PROFILES
from mission_control.lab.topology import KINDS
from mission_control.scenario import BadInput, PrerequisiteMissing, Scenario, load, with_changes

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build a data centre of network namespaces (needs root). Hosts and switches share the real kernel.",
)
COMMAND_MAX = 120
"""Most characters of a command line that are shown."""
RATE_MIN = 1_000_000
"""Lowest rate of a link in bits per second, as in scenarios."""
Name = Annotated[
    str | None, typer.Option(metavar="NAME", callback=not_empty, help="Name of the lab [the only one that is up]")
]


@app.command()
def up(
    topology: Annotated[
        str, typer.Argument(metavar="TOPOLOGY", help=f"{', '.join(KINDS)}, or a scenario file that ends in .toml")
    ],
    hosts: Annotated[int | None, typer.Option(metavar="N", help="Number of hosts [4, or from the file]")] = None,
    link_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of every host's link [auto: at most 100Mbit/s]")
    ] = None,
    buffer: Annotated[str | None, typer.Option(metavar="SIZE", help="Size of a switch port's queue [64KiB]")] = None,
    ecn_threshold: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Queue length that triggers ECN marks, e.g. 30KiB [off]")
    ] = None,
    shared_buffer: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Buffer that each 12 ports share, e.g. 768KiB [off: each port has its own]"),
    ] = None,
    switch: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model of the switches: plain, or paper-003, a 48-port switch [plain]"),
    ] = None,
    mtu: Annotated[int | None, typer.Option(metavar="BYTES", help="Largest packet, 576 to 9000 [1500]")] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"TCP settings of the hosts: {', '.join(PROFILES)} [modern]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", callback=not_empty, help="Name of the lab [its topology]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build a lab; it stays until mission lab down removes it."""
    if topology not in KINDS and not topology.endswith(".toml"):
        raise BadInput(f"there is no topology {topology!r}; use {', '.join(KINDS)}, or a file that ends in .toml")
    changes: dict[str, dict[str, Any]] = {
        "topology": {
            "kind": None if topology.endswith(".toml") else topology,
            "hosts": hosts,
            "link_rate": link_rate,
            "mtu": mtu,
        },
        "topology.port": {
            "switch": switch,
            "buffer": buffer,
            "ecn_threshold": ecn_threshold,
            "shared_buffer": shared_buffer,
        },
        "stack": {"profile": profile},
    }
    scenario = with_changes(load(topology) if topology.endswith(".toml") else Scenario(), changes)
    if scenario.topology.link_delay:
        raise BadInput("a delay line ends with its process: leave topology.link_delay out, or use mission run")
    began = time.monotonic()
    lab = lab_of(scenario, name=name)
    lab.up()
    if as_json:
        print(json.dumps({"name": lab.name, "topology": lab.topology.as_dict()}))
        return
    print(picture.draw(lab.topology))
    print(f"\nlab {lab.name} is up after {time.monotonic() - began:.2f} s: mission lab exec h1 -- COMMAND")


@app.command()
def down(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the lab [the only one that is up]")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every lab, and what a crash left [off]")] = False,
    as_json: Json = False,
) -> None:
    """Remove a lab: end its processes and delete its namespaces, also after a crash."""
    if everything:
        if name is not None:
            raise BadInput(f"down {name} --all: give a name or --all, not both")
        require()
        gone = down_all()
    else:
        lab = Lab.open(name)
        lab.down()
        gone = [lab.name]
    print(json.dumps({"down": gone}) if as_json else f"{', '.join(gone) or 'no lab'} taken down")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def exec(
    context: typer.Context,
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host, e.g. h3")],
    name: Name = None,
) -> None:
    """Run a command on a host of the lab; the exit status is the command's."""
    if not context.args:
        raise BadInput("which command? Use mission lab exec h3 -- COMMAND")
    if shutil.which(context.args[0]) is None:
        raise BadInput(f"{context.args[0]}: there is no such program; give its path, or a name that is on PATH")
    raise typer.Exit(Lab.open(name).host(host).run(context.args).returncode)


@app.command()
def link(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host, e.g. h3")],
    change: Annotated[str, typer.Argument(metavar="CHANGE", help="down (cut the link), up (restore it), or rate")],
    rate: Annotated[
        str | None, typer.Argument(metavar="[RATE]", help="After rate: the new rate, e.g. 10Mbit/s")
    ] = None,
    path: Annotated[int, typer.Option(metavar="N", min=0, help="Which of several parallel links")] = 0,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Cut, restore or slow a host's link while the lab runs."""
    lab = Lab.open(name)
    if change not in ("down", "up", "rate") or (change == "rate") != (rate is not None):
        raise BadInput(f"link {host} {change}: use down, up, or rate and a rate, e.g. rate 10Mbit/s")
    if rate is not None:
        lab.slow(host, rate_of(rate), path)
    elif change == "down":
        lab.cut(host, path)
    else:
        lab.restore(host, path)
    if as_json:
        print(json.dumps({"host": host, "path": path, "change": change, "rate": rate}))


def rate_of(text: str) -> int:
    """Parse the rate of a link.

    Raises:
        BadInput: It is no rate, or too low for a link.
    """
    try:
        rate = _native.parse_rate(text)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if rate < RATE_MIN:
        raise BadInput(f"rate {text}: use 1Mbit/s or more, or down to cut the link")
    return rate


@app.command()
def show(name: Name = None, as_json: Json = False) -> None:
    """Draw a lab: its hosts, switches, port counters and processes."""
    lab = Lab.open(name)
    ports, running = lab.ports(), lab.processes()
    if as_json:
        print(json.dumps({"name": lab.name, "topology": lab.topology.as_dict(), "ports": ports, "processes": running}))
        return
    print(f"lab {lab.name}, {picture.draw(lab.topology)}\n")
    print(picture.table(ports))
    for pid, node in sorted(running.items(), key=lambda entry: entry[1]):
        print(f"{node}: {pid} {command_of(pid)}")


def command_of(pid: int) -> str:
    """What a process was started with; empty where it has just ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:COMMAND_MAX]


@app.command()
def trace(
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, max=600, callback=finite, help="Duration in seconds")
    ] = 5.0,
    port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Print this port only, as mission lab show names it [all]")
    ] = None,
    name: Name = None,
    as_json: JsonLines = False,
) -> None:
    """Print the queue lengths of all ports as CSV.

    A port has a line when a packet comes, at most once in 100 us.
    """
    lab = Lab.open(name)
    known = [entry["port"] for entry in lab.ports()]
    if port is not None and port not in known:
        raise BadInput(f"--port {port}: lab {lab.name} has no such port; use one of {', '.join(known)}")
    columns = ("seconds", "switch", "port", "queue_bytes", "backlog_bytes")
    if not as_json:
        print(",".join(columns))
    for row in lab.trace(seconds):
        if port is None or row[2] == port:
            at, *others = row
            print(
                json.dumps(dict(zip(columns, row, strict=True)))
                if as_json
                else ",".join(map(str, (f"{at:.6f}", *others)))
            )


@app.command()
def check(as_json: Json = False) -> None:
    """Check what the lab needs on this machine, and say how to get what is missing.

    The exit status is 3 if something is missing.
    """
    found = findings()
    if as_json:
        print(json.dumps([entry.as_dict() for entry in found]))
    else:
        for entry in found:
            mark = "ok" if entry.there else "MISSING" if entry.needed else "no"
            print(f"{mark:>8}  {entry.what:<20}{entry.used}{f' ({entry.why})' if entry.why else ''}")
    lacking = [f"{entry.what}: {entry.why or 'not there'}" for entry in found if entry.needed and not entry.there]
    sys.stdout.flush()
    if lacking:
        raise PrerequisiteMissing("no lab here: " + "; ".join(lacking))
