"""Malicious workers that know the token: they can slow others down, but not deceive them."""

from __future__ import annotations

import json

from tests.conftest import data, tally
from tests.member import Member

LEN = 16 << 20
ALL = "Mission-Has: " + "ff" * 8
DEMANDS = json.dumps({"encrypt": "none", "transport": "tcp"})


def broadcast(reader, name: str, address: str) -> bytes:
    """Fetch a whole object, as one of many readers."""
    transfer = {"job": "job", "from": "map", "to": "all"}
    reader.command(json.dumps({"command": "broadcast", "transfer": transfer}))
    parts, _, _ = reader.fetch("job", "map", "all", DEMANDS, [(name, 0, LEN, [address])], False, True)
    return bytes(parts[0])


def test_a_receiver_serves_from_the_address_that_it_asks_from(endpoint):
    own = endpoint()
    name, _ = own.put([data(LEN)], "job", DEMANDS)
    with Member(own.address) as member:
        assert " 403 " in member.ask(f"{name}/0/source", "Mission-Serves: 192.0.2.1:80", ALL)
    with Member(own.address) as member:
        assert " 204 " in member.ask(f"{name}/0/source", "Mission-Serves: 127.0.0.1:9", ALL)


def test_receivers_that_never_were_are_asked_a_few_times_and_then_never(endpoint):
    own, reader = endpoint(), endpoint()
    name, _ = own.put([data(LEN)], "job", DEMANDS)
    with Member(own.address) as member:
        for port in range(1, 301):
            assert " 204 " in member.ask(f"{name}/0/source", f"Mission-Serves: 127.0.0.1:{port}", ALL)
    assert broadcast(reader, name, own.address) == data(LEN).tobytes()
    # Four of a host are named, each once; two lanes may be sent to one at the same time.
    assert tally(reader)["resumed"] <= 8, tally(reader)
