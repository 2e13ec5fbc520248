"""A hundred thousand random and mutated streams through the parser."""

from __future__ import annotations

import pytest

from tests.chat.random_streams import check_stream

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def test_no_exception_no_lost_byte_no_invented_call() -> None:
    assert sum(check_stream(seed) for seed in range(100_000)) > 20_000
