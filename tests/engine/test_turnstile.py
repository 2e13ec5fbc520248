"""Who waits is let in in order; who gives up leaves no place taken."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from dlite_agent.engine.turnstile import Turnstile


def test_who_does_not_wait_goes_in_beyond_the_limit() -> None:
    turnstile = Turnstile(1)
    for _ in range(3):
        turnstile.enter(1, waits=False)
    turnstile.leave(3)
    turnstile.enter(1, waits=True)


def test_threads_are_never_more_than_the_limit() -> None:
    turnstile = Turnstile(3)
    inside: list[int] = []
    most: list[int] = []

    def visit(number: int) -> None:
        turnstile.enter(1, waits=True)
        inside.append(number)
        most.append(len(inside))
        time.sleep(0.001)
        inside.remove(number)
        turnstile.leave(1)

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(most) == 20
    assert max(most) <= 3


async def test_tasks_go_in_in_the_order_in_which_they_came() -> None:
    turnstile = Turnstile(2)
    order: list[int] = []

    async def visit(number: int, count: int) -> None:
        await turnstile.aenter(count, waits=True)
        order.append(number)
        await asyncio.sleep(0)
        turnstile.leave(count)

    # 9 is more than the limit: it goes in alone, and nobody overtakes it
    await asyncio.gather(*(visit(i, count) for i, count in enumerate([1, 2, 1, 9, 1, 1])))
    assert order == [0, 1, 2, 3, 4, 5]


async def test_a_cancelled_waiter_takes_no_place() -> None:
    turnstile = Turnstile(1)
    await turnstile.aenter(1, waits=True)
    tasks = [asyncio.create_task(turnstile.aenter(1, waits=True)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    turnstile.leave(1)  # lets the second one in ...
    tasks[1].cancel()  # ... which is cancelled before it hears of it
    await asyncio.wait_for(tasks[2], 5)
    for task in tasks[:2]:
        with pytest.raises(asyncio.CancelledError):
            await task
    turnstile.leave(1)
    await asyncio.wait_for(turnstile.aenter(1, waits=True), 5)


def test_a_loop_that_was_closed_holds_up_nobody() -> None:
    turnstile = Turnstile(1)
    turnstile.enter(1, waits=True)
    loop = asyncio.new_event_loop()
    task = loop.create_task(turnstile.aenter(1, waits=True))
    loop.run_until_complete(asyncio.sleep(0))
    loop.call_soon(task.cancel)
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    turnstile.leave(1)
    turnstile.enter(1, waits=True)
