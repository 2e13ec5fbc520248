"""A thousand random and mutated streams through the parser; `make soak` has more."""

from __future__ import annotations

from tests.chat.random_streams import check_stream


def test_no_exception_no_lost_byte_no_invented_call() -> None:
    assert sum(check_stream(seed) for seed in range(1000)) > 200
