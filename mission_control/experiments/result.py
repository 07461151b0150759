"""The type of results: `mission run --json` prints it, `result.json` contains it, `mission schema result` describes
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, create_model

from mission_control.errors import BadInput

RESULT, POINTS = "result.json", "points.jsonl"
"""Files in a run's folder: the result, from which its report is generated; and each measured point, one a line."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Quantity(Model):
    value: float
    unit: str = Field(description="as in s, Mbit/s, B; empty for a plain number")


class Transfer(Model):
    """All flows between two stages of a job."""

    from_: str = Field(alias="from")
    to: str
    pattern: str
    evidence: str = Field(description="how the pattern was recognised")
    weight: float | None = Field(None, description="while most transfers of this run were active")
    flows: int | None = None
    share: float | None = Field(None, description="fraction of the bytes while all transfers of this run were active")
    fairness: float | None = Field(None, description="Jain's index of its receivers' rates")
    flow_fairness: float | None = Field(
        None, description="Jain's index of its flows' rates; a flow is a fetch from one worker"
    )
    bytes: int
    local_bytes: int = Field(description="bytes that never left their worker")
    peer_bytes: int = Field(description="bytes served by other receivers of a broadcast")
    seconds: float | None
    started: float | None
    flows_peak: int
    refetches: int
    resumed: int
    transport: dict[str, Any] | None


class JobResult(Model):
    name: str
    admitted: str | None = Field(None, description="the name under which the cluster admitted it")
    weight: float | None
    flows: int | None
    share: float | None
    seconds: float | None
    phases: dict[str, float]
    recomputed: int
    transfers: list[Transfer]
    submitted_s: float | None = Field(None, description="replay: when it was due, since the replay began")
    started_s: float | None = Field(None, description="replay: when it was submitted; later than due: it was late")
    ended_s: float | None = None
    bytes: dict[str, int] = Field(default={}, description="replay: bytes of input, shuffle, output")
    trace_bytes: dict[str, int] = Field(default={}, description="replay: the same in the trace, before scaling")


class Placed(Model):
    study: str = Field(description="name of the scenario")
    world: str
    at: dict[str, Any] = Field(default={}, description="keys of the scenario that vary, and their values here")
    variant: str = Field("", description="empty where nothing is compared")

    @property
    def place(self) -> tuple[str, str, str]:
        """Equal for points that differ only in variant and repetition."""
        return self.study, self.world, json.dumps(self.at, sort_keys=True)


class Point(Placed):
    """One measurement of one variant at one place of the grid."""

    repetition: int = Field(0, description="number of the repetition, from 0")
    measures: dict[str, Quantity] = Field(default={})
    valid: bool = Field(True, description="the network, and not the machine, set the pace")
    invalid_because: list[str] = []
    ok: bool = Field(False, description="every check and expectation held, nothing failed, nothing was interrupted")
    checks: dict[str, bool] = Field(default={}, description="whether the job's result is correct, by check")
    expectations: dict[str, bool] = Field(
        default={}, description="whether the scenario's [expect] was met, by expectation"
    )
    errors: dict[str, str] = Field(default={}, description="errors by job; run: the point could not be measured")
    notes: list[str] = Field(default=[], description="settings of the scenario that were not in force")
    interrupted: bool = False
    seconds: float | None = Field(None, description="from the start of the jobs to the end of the last")
    took_s: float = Field(0.0, description="time to measure it, with all attempts and the setup of its world")
    commit: str | None = Field(None, description="commit of this program when the point was measured")
    environment: dict[str, Any] = Field(default={}, description="where it was measured")
    scenario: str = Field("", description="fingerprint of the point's scenario")
    folder: str | None = Field(None, description="folder of its files, relative to the run's")
    policy: str | None = Field(None, description="policy in force while it was measured")
    jobs: list[JobResult] = []
    ports: list[dict[str, Any]] = Field(default=[], description="lab: counters of each switch port")
    samples: dict[str, Any] = Field(default={}, description="lab: CPUs, links and queues, every 125 ms")
    processor_seconds: float | None = None
    delay: dict[str, Any] | None = Field(None, description="lab: counters and lateness of the links' delay lines")

    @property
    def counts(self) -> bool:
        """Whether it counts in medians: a point that missed an expectation counts, a wrong or invalid one does not."""
        return self.valid and not self.errors and not self.interrupted and all(self.checks.values())

    def interval_of(self, measure: str) -> tuple[float, float] | None:
        """The 95 % interval from this point alone, without the spread between runs; ``None``: it has none."""
        return None

    def label(self) -> str:
        """Its name in words: world, place, variant, repetition."""
        again = f"repetition {self.repetition + 1}" if self.repetition else ""
        return ", ".join(filter(None, [self.study, self.world, at_in_words(self.at), self.variant, again]))

    def wrong(self) -> list[str]:
        """Why it does not count, or missed an expectation; empty: neither."""
        failed = [check for check, held in {**self.checks, **self.expectations}.items() if not held]
        why = [*self.errors.values(), *self.invalid_because, *failed]
        return why or ([] if self.ok and self.valid else ["interrupted" if self.interrupted else "not right"])


class Summary(Placed):
    """The median of a measure over repetitions, and its interval."""

    measure: str
    unit: str
    median: float | None
    low: float | None
    high: float | None
    coverage: float | None = Field(description="probability that the interval has the true median")
    runs: int
    of: str = Field(
        "runs", description="source of the interval. runs: the spread between runs; blocks: the blocks of one run"
    )


class Comparison(Summary):
    """The median of the ratios of a variant to the first one, repetition by repetition, and its interval."""

    to: str
    expected: str = Field(description="expected ratio in words; empty: none")
    held: bool | None


class Overhead(Summary):
    """Equation 5 of paper 000: how much longer a job takes with a variant's minimum RTO than with one of 1 ms, as a
    fraction of the latter, repetition by repetition."""

    to: str = Field(description="the variant with a minimum RTO of 1 ms that differs in nothing else")
    job_seconds: float = Field(description="median of the variant")
    job_seconds_1ms: float = Field(description="median of the other")


class Onset(Placed):
    """Number of senders from which a curve has collapsed."""

    asked_bytes: int
    senders: int | None = Field(
        description="smallest number whose median block takes half an RTO longer than the ideal one; none: no "
        "measured number"
    )
    of_goodput: int | None = Field(None, description="smallest number whose goodput is at most half of the ideal")


class Difference(Placed):
    """The model against another world, at one place."""

    measure: str
    part: float = Field(description="difference relative to the other world's value: 0.1 is 10 % more")


class Result(Model):
    """The measurements of a run, and their summary."""

    version: int = 1
    ok: bool
    valid: bool
    interrupted: bool
    invalid_because: list[str]
    world: str = Field(description="one name, or several with commas")
    points: list[SerializeAsAny[Point]]
    summary: list[Summary]
    comparisons: list[Comparison]
    onset: list[Onset] = []
    overheads: list[Overhead] = Field(
        default=[], description="incast overhead of jobs, if variants differ only in stack.rto_min"
    )
    differences: list[Difference] = Field(
        default=[], description="differences between worlds that measured the same place"
    )
    checks: dict[str, bool] = Field(description="checks of all points, with the point's name if there are several")
    errors: dict[str, str]
    notes: list[str] = Field(description="settings of the scenario that were not in force")
    studies: dict[str, dict[str, Any]] = Field(description="the scenarios' texts, by name")
    environment: dict[str, Any] = Field(description="environment of the last session that measured something")
    results: str = Field(description="the folder")
    folder: str = Field(description="the same")
    jobs: list[JobResult] = Field(description="jobs of the only point; empty if there are several")
    seconds: float | None = None
    policy: str | None = None
    ports: list[dict[str, Any]] = []
    samples: dict[str, Any] = {}
    processor_seconds: float | None = None
    delay: dict[str, Any] | None = None
    job_time_s: dict[str, float] = Field(default={}, description="replay: quantiles, of the only point")
    late_s: dict[str, float] = {}
    distortion: dict[str, Any] = {}

    def dumped(self) -> dict[str, Any]:
        """Convert to JSON, without fields that a world or a workload does not have."""
        return self.model_dump(by_alias=True, exclude_unset=True, mode="json")


def at_in_words(at: dict[str, Any]) -> str:
    return ", ".join(f"{path.rpartition('.')[2].replace('_', ' ')} {value}" for path, value in at.items())


def load(folder: Path) -> Result:
    """Read the result of a run.

    Raises:
        BadInput: there is none, or it has another version.
    """
    from mission_control.workloads import WORKLOADS

    try:
        raw = json.loads((folder / RESULT).read_text())
        kinds = {name: WORKLOADS[study["kind"]] for name, study in raw["studies"].items()}
        points = [kinds[entry["study"]].point.model_validate(entry) for entry in raw["points"]]
        return Result.model_validate({**raw, "points": points})
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = "of another version" if isinstance(error, ValidationError | KeyError | TypeError) else error
        raise BadInput(f"{folder} has no result to read: name a folder results/<id> ({why})") from None


def schema() -> dict[str, Any]:
    """JSON Schema of `mission run --json`."""
    from mission_control.workloads import WORKLOADS

    kinds = tuple(dict.fromkeys(workload.point for workload in WORKLOADS.values()))
    of_points: Any = kinds[0]
    for kind in kinds[1:]:
        of_points = of_points | kind
    made = create_model("Result", __base__=Result, __doc__=Result.__doc__, points=(list[of_points], ...))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made.model_json_schema(by_alias=True)}
