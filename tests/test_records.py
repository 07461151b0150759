"""Records are numbered, and kept up to a number of bytes."""

from __future__ import annotations

from mission_control.records import Log, records_since


def test_who_reads_now_and_then_gets_each_record_once():
    log = Log()
    assert log.since(0) == (0, [])
    for number in range(5):
        log.add({"kind": "job", "job": f"job-{number}"})
    seen, new = log.since(0)
    assert seen == 5 and [own["number"] for own in new] == [0, 1, 2, 3, 4]
    assert log.since(seen) == (5, [])
    log.add({"kind": "job", "job": "another"})
    seen, (own,) = log.since(seen)
    assert seen == 6 and own["job"] == "another" and own["time"] > 0


def test_the_oldest_are_forgotten_by_bytes_and_not_by_number():
    log = Log(most_bytes=10_000)
    for number in range(1_000):
        log.add({"kind": "text", "text": "x" * (number % 7) * 100})
        assert log.bytes <= 10_000 and log.bytes == sum(map(len, log.kept))
    seen, new = log.since(0)
    assert seen == 1_000 and new[-1]["number"] == 999
    assert [own["number"] for own in new] == list(range(1_000 - len(new), 1_000))
    assert log.since(998)[1] == new[-2:]
    assert log.since(2_000)[1] == [], "what another scheduler has said"


def test_the_last_record_of_a_kind_is_found_while_it_is_kept():
    log = Log(most_bytes=2_000)
    for number in range(3):
        log.add({"kind": "job-ended", "job": f"job-{number % 2}", "bytes": number})
        log.add({"kind": "text", "text": '"job-ended"', "job": "job-0"})
    assert (log.last("job-ended", job="job-0") or {})["bytes"] == 2
    assert (log.last("job-ended", job="job-1") or {})["bytes"] == 1
    assert log.last("job-ended", job="job-2") is None
    for _ in range(100):
        log.add({"kind": "text", "text": "x" * 100})
    assert log.last("job-ended", job="job-0") is None


def test_records_of_a_kind_are_found_the_newest_first():
    log = Log()
    for number in range(3):
        log.add({"kind": "job-ended", "job": f"job-{number}"})
        log.add({"kind": "text", "text": "job-ended"})
    assert [own["job"] for own in log.newest("job-ended")] == ["job-2", "job-1", "job-0"]


def test_a_scheduler_sends_them_as_text(client):
    """Nothing is parsed in its event loop: 64 MiB of records took it 1.4 s."""
    for number in range(3):
        client.run_on_scheduler(
            lambda dask_scheduler, number=number: dask_scheduler.plugins["mission-control"].log.add(
                {"kind": "test", "text": f"line\n{number}\u2028"}
            )
        )
    seen, new = records_since(client, 0)
    assert [own["text"] for own in new if own["kind"] == "test"] == [f"line\n{number}\u2028" for number in range(3)]
    assert records_since(client, seen) == (seen, [])
    assert isinstance(client.sync(client.scheduler.mission_control_since, seen=0)[1], str)
