"""The interface for programs that submit work: jobs, install and uninstall."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

from mission_control import _native

if TYPE_CHECKING:
    from distributed import Client

    from mission_control.policies import Policy

UNNAMED = "unnamed"
"""Name of the job of tasks whose program names none."""
UNDEMANDING: dict[str, Any] = {"encrypt": "none", "transport": None}
"""Demands of such a job."""
ANNOTATION = "mission_control"
"""Name of the annotation of a job's tasks."""


def name_of_span(span: Any) -> str | None:
    """The name that an annotation of Dask's spans gives a part of a program; Dask gives every task a default one."""
    # Any code may have written it, and a class of its own may raise from any of its methods.
    name = dict.get(span, "name") if isinstance(span, dict) else None
    first = name[0] if isinstance(name, tuple | list) and name else None
    return first if isinstance(first, str) and first != "default" else None


def spec_in(annotations: Any) -> dict[str, Any]:
    """The job of a worker's task, as the scheduler or a span says it; any code may have written the annotations."""
    if not isinstance(annotations, dict):
        return {}
    spec = annotations.get(ANNOTATION)
    if isinstance(spec, dict):
        return spec
    span = name_of_span(annotations.get("span"))
    return {} if span is None else {"job": span}


class JobRejected(RuntimeError):
    """The job's demands cannot be met; no byte has moved. The text names what is missing."""


def specification(
    name: str,
    *,
    priority: float = 1,
    encrypt: bool | str = False,
    transport: str | None = None,
    user: str | None = None,
    job_class: str | None = None,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Make a job's specification as core reads it (`JobSpec`).

    Raises:
        ValueError: an argument is invalid; the text is one line with a fix.
    """
    encryption = {False: "none", True: "authenticated", "opportunistic": "opportunistic"}.get(encrypt)
    if encryption is None:
        raise ValueError(f'encrypt={encrypt!r}: use True, False or "opportunistic"')
    demands = {"encrypt": encryption, "transport": None if transport == "auto" else transport}
    spec = {"job": name, "priority": priority, "demands": demands, "machines": 0}
    spec |= {"user": user, "class": job_class, "deadline_secs": deadline}
    check(spec)
    return {**spec, "priority": float(priority), "deadline_secs": None if deadline is None else float(deadline)}


def check(spec: dict[str, Any]) -> None:
    """Validate a specification, independent of a cluster.

    Raises:
        ValueError: an argument is invalid; the text is one line with a fix.
    """
    name, priority, demands = spec["job"], spec["priority"], spec["demands"]
    if not (isinstance(name, str) and name and name.isprintable()):
        raise ValueError(f"job name {name!r}: use a str that is not empty and can be printed")
    try:
        _native.check_priority(name, priority)
    except (TypeError, OverflowError):
        raise ValueError(f"priority {priority!r} of job {name}: use a number such as 2.5") from None
    for what, word in (("user", spec.get("user")), ("job_class", spec.get("class"))):
        if word is not None and not (isinstance(word, str) and word and word.isprintable()):
            raise ValueError(f"{what} {word!r} of job {name}: use a str that is not empty and can be printed")
    deadline = spec.get("deadline_secs")
    if deadline is not None and not (isinstance(deadline, Real) and 0 < float(deadline) < math.inf):
        raise ValueError(f"deadline {deadline!r} of job {name}: use a number of seconds above 0")
    transport = demands["transport"]
    if transport is not None and transport not in _native.transports():
        raise ValueError(f"there is no transport {transport!r}: use auto, {', '.join(_native.transports())}")
    if why := _native.contradiction(json.dumps(demands)):
        raise ValueError(f"job {name}: {why}")


@contextmanager
def job(
    name: str,
    *,
    priority: float = 1,
    encrypt: bool | str = False,
    transport: str | None = None,
    user: str | None = None,
    job_class: str | None = None,
    deadline: float | None = None,
    client: Client | None = None,
) -> Iterator[str]:
    """Assign everything that is submitted inside to this job, including tasks that its tasks submit, and what threads
    submit that are started inside.

    Of other threads nobody can tell whether they belong to the job. While it demands encryption they are refused
    (`JobRejected`); where it makes another demand, the log says that they are outside. Inside `job` of its own a thread
    belongs to that one.

    Gives the name under which the job was admitted: another one if the cluster already has a job of this name.

    Args:
        name: name of the job in all output.
        priority: a number above 0, the weight of the job relative to others; read by the policies
            ``performance-centric``, ``priority`` and ``sincronia``.
        encrypt: ``True``: encrypted, with certificates of the cluster on both ends, or refused.
            ``"opportunistic"``: encrypted without identities.
        transport: demand one (``tcp``, ``tls``, ...) in place of Mission Control's choice.
        user: owner of the job, for custom policies.
        job_class: class of the job, for custom policies.
        deadline: seconds from now by which it should be done; read by the policy ``deadline``.
        client: the Dask client; by default the current one.

    Raises:
        JobRejected: a demand cannot be met; raised before anything is submitted.
        RuntimeError: the client is asynchronous, or was closed.
        TypeError: ``client`` is no client of Dask.
        ValueError: an argument is invalid; the text has a fix.
    """
    import dask
    from distributed import get_client

    from mission_control.dask.seams.follow import into_threads

    spec = specification(
        name,
        priority=priority,
        encrypt=encrypt,
        transport=transport,
        user=user,
        job_class=job_class,
        deadline=deadline,
    )
    client = get_client() if client is None else client
    install(client)  # refuses a client that it cannot use
    admitted = client.sync(client.scheduler.mission_control_admit, spec=spec, client=client.id)
    if admitted["refused"]:
        raise JobRejected(f"job {name}: {admitted['refused']}")
    spec["job"] = admitted["job"]
    try:
        with into_threads(client, spec), dask.annotate(**{ANNOTATION: spec}):
            yield spec["job"]
    finally:
        if client.status == "running":
            # Sent through the same ordered stream as the submitted tasks.
            client._send_to_scheduler({"op": "mission-control-leave", "job": spec["job"], "client": client.id})


def install(client: Client, *, policy: str | Policy | None = None, flows_per_host: int | str | None = None) -> None:
    """Install Mission Control on the client's cluster, unless it has it; ``--preload`` does the same.

    Args:
        policy: how jobs share the network; see ``mission weights --help``; or a function that takes the active jobs and
            their transfers and returns the weight of each, see :mod:`mission_control.policies`. If the cluster has
            Mission Control, this replaces its policy.
        flows_per_host: concurrent flows that every host receives, ``all`` or ``auto`` (found by trial). It is fixed
            when the cluster gets Mission Control.

    Raises:
        RuntimeError: the client is asynchronous.
        ValueError: a value is wrong, or the cluster has Mission Control with other flows per host.
    """
    from distributed.protocol import pickle

    from mission_control.dask.scheduler import MissionControlScheduler
    from mission_control.dask.worker import MissionControlWorker

    refuse_unusable(client)
    without = workers_without(client)
    if without is None:
        settings: dict[str, Any] = {"policy": policy} if policy else {}
        if flows_per_host is not None:
            settings["flows_per_host"] = flows_per_host
        client.register_plugin(MissionControlScheduler(**settings))
        client.register_plugin(MissionControlWorker())
        return
    if flows_per_host is not None:
        MissionControlScheduler(flows_per_host=flows_per_host)  # it refuses what is none
        has = client.sync(client.scheduler.mission_control_status, most=0)["flows_per_host"]
        if flows_per_host != has:
            raise ValueError(
                f"flows_per_host={flows_per_host!r}: this cluster has Mission Control with {has!r} already, and keeps "
                f"that while it runs. Leave flows_per_host out, or start the scheduler with "
                f"--mission-flows-per-host {flows_per_host}"
            )
    asked: set[str] = vars(client).setdefault("_mission_control_asked", set())
    if new := [worker for worker in without if worker not in asked]:
        # Once, and without waiting: a worker may be silent, or have no package. It stays without a data plane then, and
        # tasks wait a moment for one that is being set up.
        asked.update(new)
        add = client._run(_add_to_worker, workers=new, on_error="ignore")
        asyncio.run_coroutine_threadsafe(add, client.loop.asyncio_loop)
    if policy:
        wanted = policy if isinstance(policy, str) else pickle.dumps(policy)
        reply = client.sync(client.scheduler.mission_control_policy, policy=wanted)
        if reply["error"]:
            raise ValueError(reply["error"])


def uninstall(client: Client, *, timeout: float = 300.0) -> None:
    """Remove Mission Control from the client's cluster; programs continue with Dask alone.

    Shuffles on the data plane complete first. Workers and schedulers that were started with ``--preload`` have it again
    after a restart.

    Args:
        timeout: seconds to wait for running shuffles.

    Raises:
        RuntimeError: references that tasks put are in use, or shuffles still run: nothing was removed; or the client is
            asynchronous.
    """
    refuse_unusable(client)
    if not installed(client):
        return
    reply = client.sync(client.scheduler.mission_control_uninstall, timeout=timeout)
    if reply["error"]:
        raise RuntimeError(f"Mission Control was not removed: {reply['error']}")


def refuse_unusable(client: Client) -> None:
    """
    Raises:
        TypeError: This is no client of Dask.
        RuntimeError: The client is asynchronous, or was closed.
    """
    from distributed import Client

    if not isinstance(client, Client):
        raise TypeError(f"client={client!r}: give a client of Dask, as in distributed.Client('tcp://HOST:8786')")
    if client.status == "closed":
        raise RuntimeError(f"{client} was closed: connect another one")
    if client.asynchronous:
        raise RuntimeError(
            "Client(asynchronous=True) is not supported by mission_control.job, install, uninstall and mapreduce: "
            "use a Client without asynchronous=True, in a function that asyncio.to_thread runs"
        )


def installed(client: Client) -> bool:
    """Whether the client's cluster has Mission Control."""
    return workers_without(client) is not None


def workers_without(client: Client) -> list[str] | None:
    """Return workers that have not joined: only the scheduler was preloaded, or they have just started, or failed.

    ``None``: the scheduler has no Mission Control.
    """
    try:
        return client.sync(client.run_on_scheduler, _workers_without)
    except ValueError as error:
        if "disallowed" not in str(error):
            raise
        # The scheduler does not run functions (its `blocked-handlers`). It sends no answer to operations without a
        # handler.
        return [] if isinstance(client.sync(client.scheduler.mission_control_status, most=0), dict) else None


def _workers_without(dask_scheduler: Any) -> list[str] | None:
    plugin = dask_scheduler.plugins.get("mission-control")
    return None if plugin is None else plugin.workers_without()


async def _add_to_worker(dask_worker: Any) -> None:
    from mission_control.dask.worker import MissionControlWorker

    # Not on a worker where the setup is in progress or has failed; that worker's log has the reason.
    if MissionControlWorker.name not in dask_worker.plugins:
        await dask_worker.plugin_add(MissionControlWorker())
