"""A request of a wrong type is refused where it is made, by the field's name."""

from __future__ import annotations

import re

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "END"),
        ("stop", None),
        ("session_hint", ["thread"]),
        ("tenant", 1),
        ("template_kwargs", None),
        ("history", "raw"),
        ("output", "required"),
        ("sampling", None),
        ("num_choices", "2"),
        ("when_full", "drop"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(
        RequestError, match=rf"^ChatRequest.{re.escape(f'{field} is {value!r}; use')}"
    ):
        ChatRequest((Message("user", "Hello"),), **{field: value})  # type: ignore[arg-type]  # the point of the test
