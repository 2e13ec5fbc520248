from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from dlite_agent.process.channel import Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    left, right = (Connection(end.detach()) for end in socket.socketpair())
    channels = Channel(left, "left"), Channel(right, "right")
    yield channels
    for channel in channels:
        channel.close()


def receive_in_thread(channel: Channel, handle: object) -> threading.Thread:
    thread = threading.Thread(target=channel.receive, args=(handle,))
    thread.start()
    return thread


def test_messages_arrive_once_and_in_order(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    got: list[object] = []
    back: list[object] = []
    readers = [receive_in_thread(right, got.append), receive_in_thread(left, back.append)]
    for number in range(500):
        left.send(number)
        right.send(-number)
    ends = time.perf_counter() + 10
    while (len(got) < 500 or len(back) < 500) and time.perf_counter() < ends:
        time.sleep(0.005)
    assert got == list(range(500))
    assert back == [-number for number in range(500)]
    left.close()
    right.close()
    for reader in readers:
        reader.join(10)


def test_a_slow_receiver_gets_fewer_and_larger_batches(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair
    sizes: list[int] = []
    send = left._connection.send

    def counted(batch: tuple[bool, list[bytes]]) -> None:
        sizes.append(len(batch[1]))
        send(batch)

    monkeypatch.setattr(left._connection, "send", counted)
    got: list[object] = []

    def handle(message: object) -> None:
        if message == 0:
            time.sleep(0.2)
        got.append(message)

    readers = [receive_in_thread(right, handle), receive_in_thread(left, got.append)]
    for number in range(100):
        left.send(number)
        time.sleep(0.001)
    ends = time.perf_counter() + 10
    while len(got) < 100 and time.perf_counter() < ends:
        time.sleep(0.005)
    assert got == list(range(100))
    assert max(sizes) > 20
    left.close()
    right.close()
    for reader in readers:
        reader.join(10)


def test_the_end_of_the_other_side_ends_receive(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    reader = receive_in_thread(right, print)
    left.close()
    reader.join(10)
    assert not reader.is_alive()
    right.send("nobody is there")


def test_an_orphan_ends(pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlite_agent.process.channel._POLL_S", 0.01)
    _, right = pair
    asked = iter([False, True])
    right.receive(print, lambda: next(asked))


def test_what_cannot_be_packed_is_refused_at_once(pair: tuple[Channel, Channel]) -> None:
    left, _ = pair
    with pytest.raises(Exception, match="pickle"):
        left.send(lambda: None)
