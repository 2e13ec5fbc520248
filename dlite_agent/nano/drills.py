"""Drills: many fixes in a row without a repository around them.

A whole trajectory holds one decision in a thousand tokens: which body a docstring asks for. A drill
holds one in sixty, in the same words.
"""

from __future__ import annotations

import random

from dlite_agent.nano.chatml import Conversation
from dlite_agent.nano.names import Split, pick_words
from dlite_agent.nano.oracle import Transcript
from dlite_agent.nano.tools import REPAIR_TOOLS
from dlite_agent.nano.world import Function, make_function

__all__ = ["drill_conversation"]

_EDIT_TOOL = REPAIR_TOOLS[-1]


def drill_conversation(rng: random.Random, *, split: Split) -> Conversation:
    """Write several fixes in a row, as edits or as plain lines.

    Args:
        rng: Source of every choice.
        split: Whose names to use.
    """
    is_edit = rng.random() < 0.3
    transcript = Transcript(thinking=is_edit and rng.random() < 0.5)
    for name in pick_words(rng, "word", split, rng.randint(3, 6 if is_edit else 14), 0.5):
        function, _ = make_function(rng, split, name, broken=True)
        if is_edit:
            _edit(rng, transcript, split, function)
        else:
            written = function.line(function.written)
            transcript.say("user", f"{name} is {function.doc}.\n{written}")
            transcript.answer(function.line(function.right), "")
    return Conversation(transcript.messages, (_EDIT_TOOL,) if is_edit else (), transcript.thinking)


def _edit(rng: random.Random, transcript: Transcript, split: Split, function: Function) -> None:
    project, stem = pick_words(rng, "word", split, 2, 0.5)
    path = f"{project}/{stem}.py"
    text = f"FAIL {path} {function.name} is {function.doc}."
    old, new = function.line(function.written), function.line(function.right)
    if not any(message["role"] == "user" for message in transcript.messages):
        transcript.say("user", f"{text}\n{old}")
    else:
        transcript.say("tool", f"{text}\n{old}")
    transcript.call(text, "edit_file", {"path": path, "old": old, "new": new})
