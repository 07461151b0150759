"""The README's first program: eight objects of two parts, and a task that takes the first part of each."""

from distributed import Client

from mission_control import Reference, fetch, job, put


def produce(i: int) -> Reference:
    return put([bytes(1000), bytes(2000)])


def consume(refs: list[Reference]) -> int:
    return sum(map(len, fetch(refs, part=0)))


if __name__ == "__main__":
    with Client() as client, job("first", client=client):
        refs = client.map(produce, range(8))
        print(client.submit(consume, refs).result())  # 8000
