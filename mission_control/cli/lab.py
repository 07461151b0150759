"""`mission lab`: a data centre of network namespaces on this machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.cli.jobs import Json
from mission_control.lab import picture
from mission_control.lab.check import check as findings
from mission_control.lab.described import lab_of
from mission_control.lab.lab import Lab, down_all
from mission_control.lab.stack import PROFILES
from mission_control.lab.topology import KINDS
from mission_control.scenario import BadInput, PrerequisiteMissing, Scenario, load, with_changes

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A data centre in one machine: hosts and switches are network namespaces with a real kernel. Needs root.",
)
COMMAND_MAX = 120
"""Of what is shown of a command line."""
Name = Annotated[str | None, typer.Option(help="of the lab; by default its kind, or the only one that is up")]


@app.command()
def up(
    topology: Annotated[str, typer.Argument(help=f"{', '.join(KINDS)}, or a scenario's file that ends in .toml")],
    hosts: Annotated[int | None, typer.Option(help="how many; 4 unless a file says")] = None,
    link_rate: Annotated[str | None, typer.Option(help="of every host's link, as in 100Mbit/s")] = None,
    buffer: Annotated[str | None, typer.Option(help="most that a switch port may hold, as in 64KiB")] = None,
    ecn_threshold: Annotated[str | None, typer.Option(help="packets that find more are marked")] = None,
    shared_buffer: Annotated[str | None, typer.Option(help="of each 12 ports together")] = None,
    switch: Annotated[str | None, typer.Option(help="plain, or paper-003: the 48-port switch of that paper")] = None,
    mtu: Annotated[int | None, typer.Option(help="bytes of a packet")] = None,
    profile: Annotated[
        str | None, typer.Option(help=f"what the hosts' kernels do with TCP: {', '.join(PROFILES)}")
    ] = None,
    name: Name = None,
) -> None:
    """Builds a lab, which stays until it is taken down."""
    if topology not in KINDS and not topology.endswith(".toml"):
        raise BadInput(f"there is no topology {topology!r}: use {', '.join(KINDS)}, or a file that ends in .toml")
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
    print(picture.draw(lab.topology))
    print(f"\nlab {lab.name} is up after {time.monotonic() - began:.2f} s: mission lab exec h1 -- COMMAND")


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="by default the only one that is up")] = None,
    everything: Annotated[bool, typer.Option("--all", help="every lab of ours, and what a crash left")] = False,
) -> None:
    """Takes a lab down: ends what runs in it and removes it, also after a crash."""
    if everything:
        gone = down_all()
        print(f"{', '.join(gone) or 'no lab'} taken down")
        return
    lab = Lab.open(name)
    lab.down()
    print(f"{lab.name} taken down")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def exec(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="as in h3")],
    name: Name = None,
) -> None:
    """Runs a command on a host of the lab; its status is the command's."""
    if not context.args:
        raise BadInput("which command? mission lab exec h3 -- COMMAND")
    raise typer.Exit(Lab.open(name).host(host).run(context.args).returncode)


@app.command()
def link(
    host: Annotated[str, typer.Argument(help="as in h3")],
    change: Annotated[str, typer.Argument(help="down, up, or rate")],
    rate: Annotated[str | None, typer.Argument(help="as in 10mbit, after rate")] = None,
    path: Annotated[int, typer.Option(min=0, help="of several parallel ones")] = 0,
    name: Name = None,
) -> None:
    """Cut, restore or slow a host's link while the lab runs."""
    lab = Lab.open(name)
    if change not in ("down", "up", "rate") or (change == "rate") != (rate is not None):
        raise BadInput(f"link {host} {change}: write down, up, or rate and a rate, as in rate 10mbit")
    if rate is not None:
        try:
            lab.slow(host, _native.parse_rate(rate), path)
        except ValueError as error:
            raise BadInput(str(error)) from None
    elif change == "down":
        lab.cut(host, path)
    else:
        lab.restore(host, path)


@app.command()
def show(name: Name = None, as_json: Json = False) -> None:
    """Draws a lab: its hosts and switches, what its ports have counted, and what runs where."""
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
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="how long")] = 5.0,
    port: Annotated[str | None, typer.Option(help="only this one, as show names it")] = None,
    name: Name = None,
) -> None:
    """Prints how long the queue of every port was while packets came, at most once in 100 us, as CSV."""
    lab = Lab.open(name)
    print("seconds,switch,port,queue_bytes,backlog_bytes")
    for at, switch, entry, queue, backlog in lab.trace(seconds):
        if port is None or entry == port:
            print(f"{at:.6f},{switch},{entry},{queue},{backlog}")


@app.command()
def check(as_json: Json = False) -> None:
    """Says what this machine offers to the lab, what falls back to what, and how to get what is missing."""
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
