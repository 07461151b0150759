"""The workload `frames`: an unchanged program, whose shuffle is compared with its input."""

from __future__ import annotations

import mission_control
from mission_control.workloads.frames import Frames, FramesSettings
from tests.conftest import status


def test_an_unchanged_program_runs_as_a_job_and_a_row_that_is_gone_is_noticed(client, tmp_path):
    frames = Frames(FramesSettings(size="4 MiB", partitions=6), 0, tmp_path, workers=2)
    with mission_control.job("frames", client=client):
        frames.prepare(client, lambda _: None)
        frames.run(client, lambda _: None)
        (job,) = [job for job in status(client)["jobs"] if job["job"] == "frames"]
        assert [own["engine"] for own in job["shuffles"]] == ["mission"]
        before, after = frames.frame, frames.shuffled
        assert frames.check(client, lambda _: None) == {"rows": True, "each key in one partition": True}
        frames.frame, frames.shuffled = before, after.partitions[1:].persist()
        assert not frames.check(client, lambda _: None)["rows"]
