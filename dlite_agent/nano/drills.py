"""Drills: many fixes in a row without a repository around them.

A whole trajectory holds one decision in a thousand tokens: which body a docstring asks for. A drill
holds one in sixty, in the same words. A module drill adds what makes it hard in a repository: the
function stands among many that look alike.
"""

from __future__ import annotations

import random

from dlite_agent.nano.chatml import Conversation
from dlite_agent.nano.names import Split, pick_words
from dlite_agent.nano.oracle import Transcript
from dlite_agent.nano.tools import REPAIR_TOOLS
from dlite_agent.nano.world import Function, make_function, module_source

__all__ = ["drill_conversation", "module_drill"]

_READ_TOOL, _EDIT_TOOL = REPAIR_TOOLS[-2:]


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


def module_drill(rng: random.Random, *, split: Split) -> Conversation:
    """Write the fixes of many functions of one module, which is read once.

    Args:
        rng: Source of every choice.
        split: Whose names to use.
    """
    transcript = Transcript(thinking=False)  # a user turn would strip the thoughts before it
    project, stem, *names = pick_words(rng, "word", split, rng.randint(6, 20), 0.5)
    path = f"{project}/{stem}.py"
    functions: dict[str, Function] = {}
    for name in names:
        is_broken = not functions or rng.random() < 0.7
        function, _ = make_function(rng, split, name, broken=is_broken)
        functions.setdefault(function.doc, function)
    wrong = [f for f in functions.values() if f.right != f.written]
    rng.shuffle(wrong)
    for index, function in enumerate(wrong[: rng.randint(4, 10)]):
        transcript.say("user", f"Fix {function.name} in {path}.")
        if index == 0:
            seen = f"FAIL {path} {function.name}. I read {path}."
            transcript.call(seen, "read_file", {"path": path})
            transcript.say("tool", module_source(path, list(functions.values())))
        old, new = function.line(function.written), function.line(function.right)
        text = f"FAIL {path} {function.name} is {function.doc}."
        transcript.call(text, "edit_file", {"path": path, "old": old, "new": new})
        transcript.say("tool", f"Edited {path}")
    return Conversation(transcript.messages[:-1], (_READ_TOOL, _EDIT_TOOL), transcript.thinking)


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
