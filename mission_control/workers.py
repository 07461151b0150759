"""The workers of a cluster, as its scheduler has them now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """Ask the scheduler for its workers: facts of each by its address.

    ``Client.scheduler_info`` may have none of them: it returns what lies in the client, which the client itself
    replaces every two seconds by an answer without workers (``Client._update_scheduler_info``, Dask 2026.8).
    """
    workers: dict[str, dict[str, Any]] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers
