"""The workers of a cluster are known whenever they are asked for."""

from __future__ import annotations

import threading

from mission_control.workers import workers_of


def test_workers_are_known_while_the_client_refreshes_what_it_keeps(client):
    expected, ended = set(workers_of(client)), threading.Event()
    assert len(expected) > 1

    def refresh() -> None:
        while not ended.is_set():
            client.sync(client._update_scheduler_info)

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        assert all(set(workers_of(client)) == expected for _ in range(300))
    finally:
        ended.set()
        thread.join()
