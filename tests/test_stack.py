"""Stack profiles: their differences, and their settings in a host's kernel."""

from __future__ import annotations

import pytest

from mission_control.lab import PROFILES, Lab, star
from mission_control.lab.described import stack_of
from mission_control.scenario import BadInput, Scenario, with_settings
from tests.lab import NEEDS_LAB


def test_no_two_profiles_are_alike():
    assert len(set(PROFILES.values())) == len(PROFILES)
    papers = PROFILES["linux-2.6.28"]
    assert papers.sack and papers.congestion_control == "cubic" and not papers.tlp and not papers.rack
    assert PROFILES["sack"].sack and not PROFILES["newreno"].sack


def test_the_profile_of_the_papers_dilates_and_gives_way_to_single_settings():
    words = ["stack.profile=linux-2.6.28", "topology.dilation=10", "stack.rack=true", "stack.initial_window=1"]
    stack = stack_of(with_settings(Scenario(), words))
    assert (stack.rto_min_ms, stack.rack, stack.initial_window, stack.tlp) == (2000, True, 1, False)


@pytest.mark.parametrize("setting", ["stack.profile=reno", "stack.profile=cubic", "stack.rack=perhaps"])
def test_what_is_no_profile_is_refused_in_one_line(setting):
    with pytest.raises(BadInput) as refused:
        with_settings(Scenario(), [setting])
    assert "\n" not in str(refused.value) and "stack." in str(refused.value)


class TestInTheLab:
    pytestmark = NEEDS_LAB

    @pytest.mark.parametrize("profile", sorted(PROFILES))
    def test_a_host_has_what_its_profile_says(self, name, profile):
        stack = PROFILES[profile]
        names = ("congestion_control", "sack", "early_retrans", "recovery")
        words = ["sh", "-c", f"cat {' '.join(f'/proc/sys/net/ipv4/tcp_{name}' for name in names)}; ip route"]
        with Lab(star(hosts=2), name, stack) as lab:
            done = lab.host("h1").run(words, capture_output=True, text=True, check=True)
        control, sack, early, recovery, route = done.stdout.splitlines()
        assert (control, sack == "1", early != "0", recovery != "0") == (
            stack.congestion_control,
            stack.sack,
            stack.tlp,
            stack.rack,
        )
        window = stack.initial_window
        assert (f"initcwnd {window}" in route) == bool(window) and ("rto_min" in route) == bool(stack.rto_min_ms)
