"""What this machine, and a Dask cluster, offer to Mission Control; and what to do where something is missing.

Each check is a function that returns findings. A finding of a machine says what works there; one of a cluster is about
all of its processes.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import dask

from mission_control import _native
from mission_control.errors import BadInput
from mission_control.workers import workers_of

State = Literal["ok", "warn", "fail"]
DESCRIPTORS = 4096
"""A worker has connections to all others, and a descriptor for each segment that it maps."""
DAYS = 14
"""A certificate that ends within these days is worth a word."""
CONNECT_S = 2.0
PEERS = 20
"""Workers whose data ports each worker tries: with all of a large cluster there would be the square."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do (empty: nothing)."""

    what: str
    state: State
    found: str
    do: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return it for ``--json``."""
        return asdict(self)


def machine(environment: Mapping[str, str]) -> list[Finding]:
    """Return what this machine offers.

    Args:
        environment: As of a scheduler or a worker that would be started here.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        versions,
        kernel,
        limits,
        configuration,
        certificates,
        lambda: host_token(environment),
        lambda: service(environment),
        optional,
    )
    return [finding for check in checks for finding in check()]


def versions() -> Iterator[Finding]:
    """Python, Dask, and the protocol that `mission://` is."""
    from packaging.requirements import Requirement

    own = version("mission-control")
    yield Finding("Mission Control", "ok", f"{own}, protocol {_native.PROTOCOL}")
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", "ok", python)
    wanted = {found.name: found for found in map(Requirement, requires("mission-control") or ())}
    for name in ("dask", "distributed"):
        try:
            there = version(name)
        except PackageNotFoundError:
            yield Finding(name, "fail", "not installed", f"pip install '{wanted[name]}'")
            continue
        fits = wanted[name].specifier.contains(there)
        do = "" if fits else f"pip install '{wanted[name]}': other versions were not tried, and private parts are used"
        yield Finding(name, "ok" if fits else "fail", there, do)
    try:
        from distributed.comm.registry import get_backend

        get_backend("mission")
        yield Finding("mission://", "ok", "Dask knows it")
    except ValueError:
        yield Finding(
            "mission://", "fail", "Dask does not know it", "install the package anew: pip install --force-reinstall"
        )


def kernel() -> Iterator[Finding]:
    """What the kernel can do for transports."""
    carriers = _native.carriers()
    yield Finding("transports", "ok", ", ".join(carriers))
    if "mptcp" not in carriers:
        do = "sysctl -w net.mptcp.enabled=1, where the kernel has it; needed only for hosts with two paths"
        yield Finding("mptcp", "warn", "this kernel has none, or it is turned off", do)
    allowed = read("/proc/sys/net/ipv4/tcp_allowed_congestion_control").split()
    if "dctcp" in allowed:
        yield Finding("dctcp", "ok", "allowed")
    else:
        do = "modprobe tcp_dctcp; sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic dctcp'"
        yield Finding("dctcp", "warn", "processes without privileges may not use it", f"{do}; only where switches mark")
    rate = _native.link_rate()
    if rate is None:
        do = (
            "export MISSION_LINK_RATE=10Gbit/s for workers; without it TCP divides a full uplink of a sender, by flows "
            "and not by shares. On one host it does not matter"
        )
        yield Finding("link rate", "warn", "the driver does not say", do)
    else:
        yield Finding("link rate", "ok", f"{rate / 1e6:g} Mbit/s")


def limits() -> Iterator[Finding]:
    """Descriptors, and memory for shared segments."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < DESCRIPTORS
    found = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}"
    yield Finding("descriptors", "warn" if few else "ok", found, f"ulimit -Hn {DESCRIPTORS}" if few else "")


def configuration() -> Iterator[Finding]:
    """The ports for data in Dask's configuration."""
    from mission_control.dask.worker import data_ports

    try:
        ports = data_ports()
    except ValueError as error:
        yield Finding("data port", "fail", str(error), "")
        return
    if ports == [0]:
        do = "behind a firewall set DASK_MISSION_CONTROL__PORT=9900:9999"
        yield Finding("data port", "ok", f"workers that this shell starts take any free port; {do}")
        return
    free = [port for port in ports[:PEERS] if is_free(port)]
    named = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
    if free:
        yield Finding("data port", "ok", f"{named}; {free[0]} is free")
    else:
        do = "name a range with one free port for each worker of the host: DASK_MISSION_CONTROL__PORT=9900:9999"
        yield Finding("data port", "warn", f"{named}: taken, as far as was looked", do)


def certificates() -> Iterator[Finding]:
    """Certificates in Dask's configuration, if there are some."""
    from cryptography import x509

    ca = dask.config.get("distributed.comm.tls.ca-file", default=None)
    if ca is None:
        do = "encrypt=True needs them: distributed.comm.tls in Dask's configuration"
        yield Finding("certificates", "ok", f"none configured; {do}")
        return
    for role in ("scheduler", "worker", "client"):
        own = dask.config.get(f"distributed.comm.tls.{role}.cert", default=None)
        key = dask.config.get(f"distributed.comm.tls.{role}.key", default=None) or own
        if own is None:
            yield Finding(f"certificate, {role}", "warn", "none", f"set distributed.comm.tls.{role}.cert and .key")
            continue
        try:
            ssl.create_default_context(cafile=ca).load_cert_chain(own, key)
            parsed = x509.load_pem_x509_certificate(Path(own).read_bytes())
        except (OSError, ValueError) as error:
            do = f"look at {own}, {key} and {ca}: PEM files, and the key of this certificate"
            yield Finding(f"certificate, {role}", "fail", one_line(error), do)
            continue
        left = days_left(parsed)
        if left < 0:
            yield Finding(f"certificate, {role}", "fail", f"ended {-left} days ago", f"issue {own} anew")
        else:
            state: State = "warn" if left < DAYS else "ok"
            yield Finding(
                f"certificate, {role}", state, f"{left} days left", f"issue {own} anew" if left < DAYS else ""
            )


def host_token(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The secret of clusters that share a host, where one is named."""
    from mission_control.dask.worker import HOST_TOKEN_FILE
    from mission_control.dask.worker import host_token as read_host_token

    if environment.get(HOST_TOKEN_FILE):
        try:
            read_host_token()
            yield Finding("host token", "ok", environment[HOST_TOKEN_FILE])
        except RuntimeError as error:
            yield Finding("host token", "fail", str(error))


def service(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The control service, where one is named."""
    from mission_control.service.membership import SERVICE, Service

    try:
        named = Service.of(environment, "here")
    except BadInput as error:
        yield Finding("control service", "fail", str(error))
        return
    for address in named.addresses if named is not None else ():
        host, _, port = address.partition("://")[2].rpartition(":")
        problem = connects(host.strip("[]"), int(port))
        do = f"start it (mission serve), or correct {SERVICE}" if problem else ""
        yield Finding("control service", "fail" if problem else "ok", problem or f"{address} answers", do)


def optional() -> Iterator[Finding]:
    """What only some need."""
    for what, program, of in (
        ("Java", "java", "tasks in Java"),
        ("etcd", "etcd", "replicas of a service on this host"),
    ):
        there = shutil.which(program) is not None
        yield Finding(what, "ok" if there else "warn", "there" if there else f"not there: needed only for {of}")
    root, built = os.geteuid() == 0, hasattr(_native, "Switch")
    if root and built:
        yield Finding("lab", "ok", "mission lab check says more")
    else:
        do = (
            "run it as root"
            if built
            else "apt install clang libelf-dev zlib1g-dev pkg-config, then make kernel; and run it as root"
        )
        yield Finding("lab", "warn", "not for this user, or not built; needed only for mission lab", do)


# --- a cluster --------------------------------------------------------------------------------------------------------


def of_cluster(client: Any) -> list[Finding]:
    """Return what a cluster's scheduler and workers have.

    Args:
        client: A Dask client that is connected to it.
    """
    from mission_control.jobs import installed

    workers = list(workers_of(client))
    found = [Finding("scheduler", "ok", f"{client.scheduler.address}, {len(workers)} workers")]
    if not workers:
        found.append(
            Finding("workers", "warn", "none", f"dask worker --preload mission_control.dask {client.scheduler.address}")
        )
    if not installed(client):
        do = "start it with --preload mission_control.dask, or mission_control.install(client)"
        return [*found, Finding("plug-in", "fail", "the scheduler has none", do)]
    found += alike(client)
    status = client.sync(client.scheduler.mission_control_status, most=0)
    for worker, why in status["without"].items():
        found.append(Finding(worker, "fail", f"no data plane: {why}"))
    limited = {worker: own["problems"] for worker, own in status["workers"].items() if own["problems"]}
    for worker, problems in limited.items():
        found += [Finding(worker, "warn", problem) for problem in problems]
    for own in status["off"]:
        what = f"off, Dask goes on without it: {own['part']}: {own['why']}"
        found.append(Finding(own["where"], "warn", what, "its log has more; report it, it is a bug or an unknown Dask"))
    planes = len(status["workers"])
    if workers:
        state: State = "ok" if planes == len(workers) else "fail"
        found.append(Finding("data planes", state, f"{planes} of {len(workers)} workers"))
    if status["policy_error"]:
        found.append(Finding("policy", "fail", status["policy_error"]))
    if (member := status.get("service")) is not None and not member["guided"]:
        found.append(Finding("control service", "warn", str(member.get("why") or "not heard: own weights hold")))
    return found + ports(client, status["workers"])


def alike(client: Any) -> Iterator[Finding]:
    """Whether all processes of a cluster have the versions of this one."""
    own = {name: version(name) for name in ("mission-control", "distributed")}
    others = client.run(versions_there, on_error="return") | {
        client.scheduler.address: client.run_on_scheduler(versions_there)
    }
    for name, there in own.items():
        differ = {address: got[name] for address, got in others.items() if isinstance(got, dict) and got[name] != there}
        if differ:
            shown = ", ".join(f"{address}: {got}" for address, got in sorted(differ.items())[:3])
            do = "install the same version everywhere, and start those processes again"
            yield Finding(name, "fail", f"here {there}; {shown}{' ...' if len(differ) > 3 else ''}", do)
        else:
            yield Finding(name, "ok", f"{there} everywhere")


def ports(client: Any, workers: Mapping[str, Any]) -> list[Finding]:
    """Whether workers reach each other's data ports."""
    addresses = {worker: own["address"] for worker, own in workers.items()}
    if len(addresses) < 2:
        return []
    tried = dict(list(addresses.items())[:PEERS])
    answers = client.run(unreachable, tried, workers=list(addresses), on_error="return")
    failing = {worker: got for worker, got in answers.items() if not isinstance(got, dict) or got}
    if not failing:
        listening = ", ".join(sorted({address.rpartition(":")[2] for address in tried.values()}))
        found = f"each worker reaches those of {len(tried)} workers: {listening}"
        return [Finding("data ports", "ok", found)]
    worker, got = next(iter(failing.items()))
    shown = "; ".join(f"{address}: {why}" for address, why in got.items()) if isinstance(got, dict) else one_line(got)
    do = "open them in the firewall; DASK_MISSION_CONTROL__PORT=9900:9999 gives workers a range"
    return [Finding("data ports", "fail", f"{len(failing)} workers do not reach others; {worker} to {shown}", do)]


def versions_there() -> dict[str, str]:
    """In a process of the cluster."""
    from importlib.metadata import version

    return {name: version(name) for name in ("mission-control", "distributed")}


def unreachable(addresses: Mapping[str, str]) -> dict[str, str]:
    """In a worker: data ports that do not answer, and why."""
    found = {}
    for address in addresses.values():
        host, _, port = address.rpartition(":")
        if problem := connects(host.strip("[]"), int(port)):
            found[address] = problem
    return found


# --- parts ------------------------------------------------------------------------------------------------------------


def connects(host: str, port: int) -> str:
    """Return why nobody answers there; empty: somebody does."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    return ""


def is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError:
            return False
    return True


def days_left(certificate: Any) -> int:
    from datetime import UTC, datetime

    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__
