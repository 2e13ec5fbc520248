from __future__ import annotations

import pytest

from dlite_agent.chat.messages import Message, ToolCall
from dlite_agent.chat.openai_format import messages_from_openai
from dlite_agent.chat.turn_handles import HandleSigner, TurnHandle, TurnHandles

SECRET = b"s" * 32


def test_a_handle_names_its_session_after_a_restart() -> None:
    handle = HandleSigner(SECRET).sign("a_session")
    assert HandleSigner(SECRET).session_of(handle) == "a_session"
    assert HandleSigner(SECRET).sign("a_session") != handle, "each turn has its own"


@pytest.mark.parametrize(
    "handle", ["", "turn", "turn_a", "turn_a_b", "turn_a_b_c", "turn_a_b_ü", "call_a_b_c"]
)
def test_a_text_that_we_did_not_sign_names_nothing(handle: str) -> None:
    assert HandleSigner(SECRET).session_of(handle) is None


def test_a_handle_is_worth_nothing_to_others_and_when_it_was_changed() -> None:
    handle = HandleSigner(SECRET, "us").sign("0123")
    assert HandleSigner(SECRET, "them").session_of(handle) is None
    assert HandleSigner(b"t" * 32, "us").session_of(handle) is None
    assert HandleSigner(SECRET, "us").session_of(handle.replace("0123", "0124")) is None


def test_the_session_of_a_message_is_that_of_its_handle_or_of_its_calls() -> None:
    handles = TurnHandles(signer=HandleSigner(SECRET))
    handles.remember(["call_1", "turn_1"], TurnHandle("s", (), b""))
    for message in (
        Message("assistant", turn="turn_1"),
        Message("assistant", tool_calls=(ToolCall("f", {}, id="call_1"),)),
        Message("tool", tool_call_id="call_1"),
    ):
        assert handles.session_of(message) == "s"
    assert handles.session_of(Message("assistant", turn=handles.sign("t"))) == "t"
    assert handles.session_of(Message("assistant", turn="forged")) is None
    assert handles.session_of(Message("assistant")) is None
    assert TurnHandles().sign("s") == "", "nobody signs"
    assert TurnHandles().session_of(Message("assistant", turn=handles.sign("t"))) is None


@pytest.mark.parametrize(
    ("fields", "turn"),
    [
        ({"dlite": {"turn": "turn_x"}}, "turn_x"),
        ({"provider_specific_fields": {"dlite": {"turn": "turn_x"}}}, "turn_x"),
        ({"dlite": "?"}, None),
        ({"dlite": {"turn": 1}}, None),
        ({"dlite": {"dlite": 1}}, None),
    ],
)
def test_a_handle_comes_back_beside_the_message(fields: dict[str, object], turn: str) -> None:
    assert messages_from_openai([{"role": "assistant", **fields}])[0].turn == turn
