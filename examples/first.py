"""A first program: eight objects of four parts, and four tasks that each take one part of all."""

from distributed import Client

import mission_control


def produce(i: int) -> mission_control.Reference:
    return mission_control.put([bytes([i, part]) * 1000 for part in range(4)])


def consume(references: list[mission_control.Reference], part: int) -> int:
    return sum(len(buffer) for buffer in mission_control.fetch(references, part=part))


if __name__ == "__main__":
    with Client() as client, mission_control.job("first", priority=2, client=client):
        references = client.map(produce, range(8))
        print(client.gather([client.submit(consume, references, part) for part in range(4)]))
