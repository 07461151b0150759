"""Rounds of faults for the control service: real processes, each on its own host in a lab.

Three members of etcd, three replicas, two Dask clusters that share two hosts, three jobs that move bytes and check
each, and an operator who never stops changing things. A round injects a fault, waits, and removes it. Each round checks
that

- one replica leads in the end, and its epoch is above all earlier ones;
- every confirmed change of the operator is in force, and no earlier request takes effect later;
- a cluster never follows an older epoch than before;
- weights change again on both clusters, and follow the jobs' priorities;
- no job stalls for longer than its bound, and none fails.

    python -m tests.chaos_of_service --rounds 200        # as root
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from distributed import Client

import mission_control
from mission_control.bench.service import SERVE
from mission_control.dask.worker import HOST_TOKEN_FILE
from mission_control.errors import EnvironmentFailed
from mission_control.lab import Lab, namespaces
from mission_control.lab.topology import star
from mission_control.service import serving
from mission_control.service.asking import Asking
from mission_control.service.membership import CLUSTER, INSECURE, SERVICE, TOKEN_FILE
from mission_control.workers import workers_of

ETCDS = ("h1", "h2", "h3")
REPLICAS = ("h4", "h5", "h6")
WORKERS = ("h7", "h8")
MANAGERS = "h9"
"""Where schedulers, clients and the operator are."""
LINK_RATE = 100_000_000
JOBS = {"a/first": 4.0, "a/second": 2.0, "b/third": 3.0}
"""Priorities."""
PARTS, PART = 4, 256 << 10
"""Parts, and bytes of each, that one turn of a job moves from one host to the other."""
HEALED_S = 60.0
"""Seconds after the end of a fault within which all must be correct: 15 s until an isolated cluster is back, and
more."""
STANDS_S = 60.0
"""Longest stall of a job in seconds. Old weights move bytes, too."""
KEYS = 8
"""Number of hosts that the operator drains and restores: few, so that changes of the same host follow each other."""


class World:
    """All processes, and the invariants that are checked."""

    def __init__(self, lab: Lab, folder: Path, stack: ExitStack):
        self.lab, self.folder, self.stack = lab, folder, stack
        self.running: dict[str, subprocess.Popen[Any]] = {}
        self.tokens = serving.tokens_in(folder)
        self.at = {host: lab.host(host).address for host in (*ETCDS, *REPLICAS, *WORKERS, MANAGERS)}
        self.addresses = [f"http://{self.at[host]}:8790" for host in REPLICAS]
        self.environment = {**os.environ, SERVICE: ",".join(self.addresses), INSECURE: "1"}
        self.environment[TOKEN_FILE] = str(folder / "cluster.token")
        token = folder / "host.token"
        token.write_text("0123456789abcdef0123456789abcdef\n")
        token.chmod(0o600)
        self.environment[HOST_TOKEN_FILE] = str(token)
        self.epochs = {"a": 0, "b": 0}
        self.led = 0

    def spawn(self, host: str, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            own = self.lab.host(host).popen(command, stdout=log, stderr=log, env=environment or self.environment)
        self.running[name] = own

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        for process in self.running.values():
            with suppress(OSError):
                process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.running.values():
            process.wait()

    def etcd(self, host: str) -> None:
        """Start a member with the data on its disk."""
        whole = ",".join(f"{own}=http://{self.at[own]}:2380" for own in ETCDS)
        client, peer = f"http://{self.at[host]}:2379", f"http://{self.at[host]}:2380"
        command = ["etcd", "--name", host, "--data-dir", str(self.folder / f"etcd-{host}"), "--initial-cluster", whole]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--logger", "zap", "--log-level", "error"]
        self.spawn(host, f"etcd-{host}", command)

    def replica(self, host: str, hours: int = 0) -> None:
        """Start a replica whose monotonic clock is some hours ahead."""
        members = ",".join(f"{self.at[own]}:2379" for own in ETCDS)
        address = f"http://{self.at[host]}:8790"
        settings = {"name": "rounds", "listen": f"{self.at[host]}:8790", "address": address, "policy": "priority"}
        settings |= {"tokens": self.tokens, "store": f"etcd://{members}"}
        ahead = str(3600 * hours)
        command = ["unshare", "--time", "--monotonic", ahead, "--boottime", ahead, "--", "sh", "-c", 'exec "$@"', "sh"]
        self.spawn(host, f"replica-{host}", [*command, sys.executable, "-c", SERVE, json.dumps(settings)])

    def dask(self, host: str, cluster: str, what: str, words: list[str]) -> None:
        own = {**self.environment, CLUSTER: cluster, "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "10 minutes"}
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *words, "--preload", "mission_control.dask"]
        self.spawn(host, f"{what}-{cluster}-{host}", command, own)

    def asking(self) -> Asking:
        """Return the operator's client. The addresses belong to namespaces without other users."""
        os.environ[INSECURE] = "1"
        return Asking(",".join(self.addresses), self.folder / "operator.token")

    def leader(self) -> str | None:
        """Return the leader, of the replicas that can be reached."""
        status = self.of_leader()
        return REPLICAS[self.addresses.index(status["address"])] if status else None

    def of_leader(self) -> dict[str, Any] | None:
        """Return the status of the leader.

        Replicas are queried one after the other, so two may claim to lead: the one with the higher epoch does.
        """
        found = [own for own in self.statuses().values() if own["role"] == "leader"]
        return max(found, key=lambda own: own["epoch"]) if found else None

    def statuses(self) -> dict[str, dict[str, Any]]:
        found = {}
        for host, address in zip(REPLICAS, self.addresses, strict=True):
            asking = self.asking()
            asking.addresses = [address]
            status = asking.statuses()[address]
            if isinstance(status, dict):
                found[host] = status
        return found


def wait_for(what: str, found: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (got := found()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)
    return got


class Operator(threading.Thread):
    """Drains hosts and restores them; knows the expected state of each."""

    def __init__(self, world: World):
        super().__init__(name="operator", daemon=True)
        self.world = world
        self.may_be: dict[str, set[bool]] = {f"shelf-{number}": {False} for number in range(KEYS)}
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        with namespaces.entered(self.world.lab.namespace(MANAGERS)):
            asking = self.world.asking()
            turn = 0
            while not self.over.wait(0.1):
                turn += 1
                key = f"shelf-{turn % KEYS}"
                with self.lock:
                    drains = self.may_be[key] != {True}
                    # Until the answer arrives the state is unknown.
                    self.may_be[key].add(drains)
                    self.counts["asked"] += 1
                    try:
                        asking.change({"ask": "drain" if drains else "undrain", "host": key})
                        self.may_be[key] = {drains}
                        self.counts["answered"] += 1
                    except EnvironmentFailed as error:
                        self.counts[str(error).partition(": ")[2][:24]] += 1

    def check(self, status: dict[str, Any]) -> None:
        """The operator waits during this check."""
        drained = set(status["drained"])
        for key, may in self.may_be.items():
            assert (key in drained) in may, f"{key}: drained {key in drained}, answered as {may}"


class Job(threading.Thread):
    """Moves bytes from one host to the other, and checks each, until it is stopped."""

    def __init__(self, world: World, client: Client, name: str):
        super().__init__(name=name, daemon=True)
        self.world, self.client, self.job = world, client, name.partition("/")[2]
        self.priority = JOBS[name]
        self.over = threading.Event()
        self.moved_at = time.monotonic()
        self.longest = 0.0
        self.turns = 0
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            with namespaces.entered(self.world.lab.namespace(MANAGERS)):
                workers = sorted(workers_of(self.client))
                job = mission_control.job(self.job, priority=self.priority, transport="tcp", client=self.client)
                with job:
                    while not self.over.is_set():
                        held = self.client.submit(put, self.turns, workers=[workers[0]], pure=False)
                        got = self.client.submit(take, held, self.turns, workers=[workers[1]], pure=False)
                        assert got.result(timeout=120) == PARTS * PART
                        self.turns += 1
                        self.longest = max(self.longest, time.monotonic() - self.moved_at)
                        self.moved_at = time.monotonic()
        except BaseException as error:
            self.failed = error

    def check(self) -> None:
        assert self.failed is None, f"{self.name}: {self.failed!r}"
        stands = max(self.longest, time.monotonic() - self.moved_at)
        assert stands < STANDS_S, f"{self.name} stood still for {stands:.0f} s"
        self.longest = 0.0


def content(turn: int, part: int) -> bytes:
    return (turn * 1000 + part).to_bytes(8, "big") * (PART // 8)


def put(turn: int) -> Any:
    return mission_control.put([content(turn, part) for part in range(PARTS)])


def take(reference: Any, turn: int) -> int:
    size = 0
    for part in range(PARTS):
        (got,) = mission_control.fetch([reference], part=part)
        assert bytes(got) == content(turn, part)
        size += len(got)
    return size


# ---- faults: each injects one, and returns how long it has to last, and a function that removes it

Heals = Callable[[], None]
Fault = Callable[[World, random.Random], tuple[float, Heals]]


def kill_the_leader(world: World, draw: random.Random) -> tuple[float, Heals]:
    leader = wait_for("a leader", world.leader)
    world.kill(f"replica-{leader}")
    return draw.uniform(3, 6), lambda: world.replica(leader, hours=draw.choice([0, 1, 5]))


def kill_a_follower(world: World, draw: random.Random) -> tuple[float, Heals]:
    leader = wait_for("a leader", world.leader)
    host = draw.choice([own for own in REPLICAS if own != leader])
    world.kill(f"replica-{host}")
    return draw.uniform(0, 2), lambda: world.replica(host)


def stop_the_leader(world: World, draw: random.Random) -> tuple[float, Heals]:
    return stop(world, [f"replica-{wait_for('a leader', world.leader)}"], draw.uniform(0.5, 6))


def stop_a_member_of_etcd(world: World, draw: random.Random) -> tuple[float, Heals]:
    return stop(world, [f"etcd-{draw.choice(ETCDS)}"], draw.uniform(0.5, 6))


def stop_most_members_of_etcd(world: World, draw: random.Random) -> tuple[float, Heals]:
    return stop(world, [f"etcd-{host}" for host in draw.sample(ETCDS, 2)], draw.uniform(0.5, 5))


def stop_the_leader_and_a_member_of_etcd(world: World, draw: random.Random) -> tuple[float, Heals]:
    leader = wait_for("a leader", world.leader)
    return stop(world, [f"replica-{leader}", f"etcd-{draw.choice(ETCDS)}"], draw.uniform(0.5, 5))


def slow_etcd(world: World, draw: random.Random) -> tuple[float, Heals]:
    """Each member is stopped half of the time."""
    over = threading.Event()

    def pulse() -> None:
        while not over.is_set():
            for name in [f"etcd-{host}" for host in ETCDS]:
                world.running[name].send_signal(signal.SIGSTOP)
            over.wait(0.15)
            for name in [f"etcd-{host}" for host in ETCDS]:
                world.running[name].send_signal(signal.SIGCONT)
            over.wait(0.15)

    thread = threading.Thread(target=pulse)
    thread.start()

    def heal() -> None:
        over.set()
        thread.join()

    return draw.uniform(2, 5), heal


def kill_a_member_of_etcd(world: World, draw: random.Random) -> tuple[float, Heals]:
    host = draw.choice(ETCDS)
    world.kill(f"etcd-{host}")
    return draw.uniform(0.5, 4), lambda: world.etcd(host)


def cut_the_leader_off(world: World, draw: random.Random) -> tuple[float, Heals]:
    """Cut the leader off from all."""
    leader = wait_for("a leader", world.leader)
    world.lab.cut(leader)
    return draw.uniform(1, 6), lambda: world.lab.restore(leader)


def cut_the_leader_off_from_etcd(world: World, draw: random.Random) -> tuple[float, Heals]:
    return parted(world, wait_for("a leader", world.leader), ETCDS, draw.uniform(1, 6))


def cut_the_leader_off_from_clusters(world: World, draw: random.Random) -> tuple[float, Heals]:
    """It still leads, but no cluster receives its messages: clusters continue alone, and come back."""
    return parted(world, wait_for("a leader", world.leader), (MANAGERS,), draw.uniform(1, 6))


def cut_a_member_of_etcd_off(world: World, draw: random.Random) -> tuple[float, Heals]:
    host = draw.choice(ETCDS)
    world.lab.cut(host)
    return draw.uniform(1, 5), lambda: world.lab.restore(host)


def stop_a_scheduler(world: World, draw: random.Random) -> tuple[float, Heals]:
    return stop(world, [f"scheduler-{draw.choice('ab')}-{MANAGERS}"], draw.uniform(0.5, 5))


FAULTS: tuple[Fault, ...] = (
    kill_the_leader,
    kill_a_follower,
    stop_the_leader,
    stop_a_member_of_etcd,
    stop_most_members_of_etcd,
    stop_the_leader_and_a_member_of_etcd,
    slow_etcd,
    kill_a_member_of_etcd,
    cut_the_leader_off,
    cut_the_leader_off_from_etcd,
    cut_the_leader_off_from_clusters,
    cut_a_member_of_etcd_off,
    stop_a_scheduler,
)


def stop(world: World, names: list[str], seconds: float) -> tuple[float, Heals]:
    for name in names:
        world.running[name].send_signal(signal.SIGSTOP)

    def heal() -> None:
        for name in names:
            world.running[name].send_signal(signal.SIGCONT)

    return seconds, heal


def parted(world: World, host: str, others: tuple[str, ...], seconds: float) -> tuple[float, Heals]:
    """Block all packets between this host and the others."""

    def routes(what: str) -> None:
        for one, two in [pair for other in others for pair in ((host, other), (other, host))]:
            command = ["ip", "route", what, "blackhole", f"{world.at[two]}/32"]
            subprocess.run(["nsenter", f"--net={namespaces.FOLDER / world.lab.namespace(one)}", *command], check=True)

    routes("add")
    return seconds, lambda: routes("del")


# ---- rounds


def shares(client: Client) -> dict[str, float]:
    status = of_cluster(client)
    own = status["service"]["cluster"]
    return {f"{own}/{job['job']}": job["weight"] for job in status["jobs"] if job["weight"] is not None}


def of_cluster(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.run_on_scheduler(
        lambda dask_scheduler: dask_scheduler.plugins["mission-control"].status()
    )
    return found


def right(clients: list[Client], priorities: dict[str, float]) -> bool:
    """Whether both clusters have the service's weights for these priorities."""
    if not all(of_cluster(client)["service"]["guided"] for client in clients):
        return False
    now = {name: weight for client in clients for name, weight in shares(client).items()}
    whole = sum(priorities.values())
    return now.keys() == priorities.keys() and all(
        abs(weight - priorities[name] / whole) < 1e-6 for name, weight in now.items()
    )


def run(
    rounds: int, first_seed: int = 0, say: Callable[[str], None] = print, faults: tuple[Fault, ...] | None = None
) -> dict[str, Any]:
    """Run rounds, each with its own seed.

    Returns:
        ``changed_s``: seconds from each fault until weights had changed on both clusters, by what went wrong;
        ``operator``: outcomes of the operator's requests; ``turns``: turns of all jobs.

    Raises:
        AssertionError: A check failed; the text names the seed.
    """
    changed: dict[str, list[float]] = {}
    name = f"r{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix="mission-rounds-", ignore_cleanup_errors=True) as folder,
        Lab(star(hosts=9, link_rate=LINK_RATE), name) as lab,
        ExitStack() as stack,
    ):
        world = World(lab, Path(folder), stack)
        stack.callback(world.end)
        with namespaces.entered(lab.namespace(MANAGERS)):
            clients = start(world)
            operator = Operator(world)
            jobs = [Job(world, clients["ab".index(name[0])], name) for name in JOBS]
            for thread in (operator, *jobs):
                thread.start()
            try:
                wait_for("weights of the priorities", lambda: right(clients, JOBS))
                for seed in range(first_seed, first_seed + rounds):
                    draw = random.Random(seed)
                    fault = (faults or FAULTS)[seed % len(faults or FAULTS)]
                    try:
                        took = one(world, fault, draw, clients, operator, jobs)
                    except BaseException as error:
                        keep_logs(world, say)
                        raise AssertionError(f"round {seed}, {fault.__name__}: {error}") from error
                    changed.setdefault(fault.__name__, []).append(took)
                    say(f"round {seed}: {fault.__name__}, weights changed {took:.1f} s after it began")
            finally:
                operator.over.set()
                for job in jobs:
                    job.over.set()
                for thread in (operator, *jobs):
                    thread.join(60)
                for client in clients:
                    client.close(5)
        return {"changed_s": changed, "operator": dict(operator.counts), "turns": sum(job.turns for job in jobs)}


def start(world: World) -> list[Client]:
    for host in ETCDS:
        world.etcd(host)
    for hours, host in enumerate(REPLICAS):
        # All clocks differ.
        world.replica(host, hours)
    clients = []
    for number, cluster in enumerate("ab"):
        port = 8786 + 10 * number
        at = f"tcp://{world.at[MANAGERS]}:{port}"
        words = ["--host", world.at[MANAGERS], "--port", str(port), "--no-dashboard", "--mission-flows-per-host", "4"]
        world.dask(MANAGERS, cluster, "scheduler", words)
        for host in WORKERS:
            words = [at, "--no-nanny", "--nthreads", "4", "--no-dashboard", "--host", world.at[host], "--name", host]
            world.dask(host, cluster, "worker", [*words, "--local-directory", str(world.folder / f"{cluster}-{host}")])
        clients.append(world.stack.enter_context(Client(at, timeout=60, set_as_default=False)))
    for client in clients:
        client.wait_for_workers(len(WORKERS), timeout=60)
    wait_for("a leader", world.leader)
    for client in clients:
        wait_for("joined", lambda client=client: of_cluster(client)["service"]["joined"])
    return clients


def one(
    world: World,
    fault: Fault,
    draw: random.Random,
    clients: list[Client],
    operator: Operator,
    jobs: list[Job],
) -> float:
    """Run one round; return the seconds from the fault until weights had changed."""
    began = time.monotonic()
    lasts, heal = fault(world, draw)
    priority = float(draw.choice([own for own in range(1, 20) if own != JOBS["b/third"]]))
    healed_at = began + lasts
    asking = world.asking()
    asked = False
    took: float | None = None
    priorities = {**JOBS, "b/third": priority}
    while True:
        now = time.monotonic()
        if heal is not None and now >= healed_at:
            heal()
            heal = None  # type: ignore[assignment]
            healed_at = time.monotonic()
        if not asked:
            with suppress(EnvironmentFailed):
                change = {"ask": "change", "cluster": "b", "job": "third", "change": {"priority": priority}}
                asking.change(change)
                asked = True
        stopped = fault is stop_a_scheduler and heal is not None
        if asked and took is None and not stopped and right(clients, priorities):
            took = time.monotonic() - began
        if heal is None and took is not None:
            break
        assert heal is not None or now < healed_at + HEALED_S, (
            f"not right {HEALED_S:.0f} s after it was healed: asked {asked}, {[shares(own) for own in clients]}, "
            f"wanted {priorities}, {[of_cluster(own)['service'] for own in clients]}, {world.statuses()}"
        )
        time.sleep(0.05)
    with operator.lock:
        status = wait_for("a leader", world.of_leader, HEALED_S)
        assert status["epoch"] >= world.led, f"epoch {status['epoch']} after {world.led}"
        world.led = status["epoch"]
        operator.check(status)
    # All replicas have the same state in the end.
    wait_for("the same books", lambda: same_books(world), HEALED_S)
    for cluster, client in zip("ab", clients, strict=True):
        epoch = of_cluster(client)["service"]["epoch"]
        assert epoch >= world.epochs[cluster], f"{cluster} obeys epoch {epoch} after {world.epochs[cluster]}"
        world.epochs[cluster] = epoch
    for job in jobs:
        job.check()
    back = {"ask": "change", "cluster": "b", "job": "third", "change": {"priority": JOBS["b/third"]}}
    wait_for("the priority as it was", lambda: changes(asking, back), HEALED_S)
    wait_for("the weights as they were", lambda: right(clients, JOBS), HEALED_S)
    assert took is not None
    return took


def changes(asking: Asking, asked: dict[str, Any]) -> bool:
    with suppress(EnvironmentFailed):
        asking.change(asked)
        return True
    return False


def same_books(world: World) -> bool:
    statuses = list(world.statuses().values())
    books = [(own["policy"], [job["job"] for job in own["jobs"]], own["leader"]) for own in statuses]
    return len(statuses) == len(REPLICAS) and all(own == books[0] for own in books)


def keep_logs(world: World, say: Callable[[str], None]) -> None:
    for log in sorted(world.folder.glob("*.log")):
        if log.name.startswith(("replica", "scheduler")):
            say(f"{log.name}: " + "\n  ".join(log.read_text(errors="replace").splitlines()[-8:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    names = {fault.__name__: fault for fault in FAULTS}
    parser.add_argument("--only", choices=names, help="one fault alone")
    given = parser.parse_args()
    only = (names[given.only],) if given.only else None
    found = run(given.rounds, given.first_seed, lambda line: print(line, flush=True), only)
    for what, seconds in sorted(found["changed_s"].items()):
        print(f"{what}: {len(seconds)} rounds, median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s")
    print(found["operator"], f"{found['turns']} turns of jobs")
