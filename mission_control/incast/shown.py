"""Sections that only the report of synchronized reads has: traced senders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mission_control.experiments import charts
from mission_control.experiments.pieces import Piece, drawn, table, text
from mission_control.incast import synchrony
from mission_control.incast.variables import STRONG

TRACED_S = 3.0
"""Seconds of a trace that are plotted: enough for some stalls, and few enough to see each."""


def pieces(points: Sequence[Any]) -> list[Piece]:
    found = []
    for point in points:
        if point.trace:
            found += [text(stood_still(point)), drawn(trace(point))]
        if point.correlations:
            found += correlated(point)
    return found


def stood_still(point: Any) -> str:
    """Describe whether the first two traced senders stalled together (paper 003, slide 14)."""
    found = synchrony.synchrony(point.trace, point.fragment_bytes, point.rto_s)
    return (
        f"{point.label()}: the first two stalled {found['stalls']} times, {found['together']} of these together, "
        f"and resumed together in {found['at_once']} of them."
    )


def trace(point: Any) -> str:
    """Plot the arrivals from each traced sender over time."""
    figure, (axes,) = charts.figure(2.2, ylabel="MB from it")
    for sender in sorted({int(row[1]) for row in point.trace}):
        rows = [row for row in point.trace if row[1] == sender and row[0] <= TRACED_S]
        given: dict[str, Any] = {"color": charts.colour(sender), "label": f"sender {sender + 1}"}
        axes.plot([row[0] for row in rows], [row[2] / 1e6 for row in rows], ".-", **given)
    charts.legend(axes)
    return charts.svg(figure)


def correlated(point: Any) -> list[Piece]:
    """Describe which TCP variables correlate over time (paper 003, slide 17)."""
    found = point.correlations
    words = (
        f"{point.label()}: of {found['pairs']} pairs of variables of TCP {len(found['strong'])} correlate strongly "
        f"over time (rank correlation of at least {STRONG} either way; {found['looks']} samples)."
    )
    rows = [(one["of"], one["with"], one["rank"]) for one in found["strong"]]
    return [text(words), drawn(matrix(found)), table(("variable", "with", "rank correlation"), rows)]


def matrix(found: dict[str, Any]) -> str:
    names, shown = found["variables"], [[float("nan") if one is None else one for one in row] for row in found["rank"]]
    figure, (axes,) = charts.figure(4.2, xlabel="")
    image = axes.imshow(shown, vmin=-1, vmax=1, cmap="RdBu")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    figure.colorbar(image, ax=axes, label="rank correlation")
    return charts.svg(figure)
