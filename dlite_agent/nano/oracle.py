"""The oracle of the repair dialect: it solves a task with the four tools and writes down how.

Every turn is one short step for a small model: what to do follows from the last result, and what
to write is copied from it. A failing run names file and function; the edit starts at the `def`
line of that function.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from dlite_agent.nano.chatml import Conversation
from dlite_agent.nano.names import Split
from dlite_agent.nano.tools import REPAIR_TOOLS, SimulatedTools
from dlite_agent.nano.world import Function, Size, make_task

__all__ = [
    "Transcript",
    "draw_num_bugs",
    "first_failure",
    "repair_conversation",
    "varied_tools",
]

_SYSTEM_PROMPTS = (
    "You fix bugs.",
    "You are a coding agent.",
    "You are a helpful coding assistant.",
    "You repair small Python repositories with the tools you have.",
    "You are an agent that repairs Python code. Use the tools.",
    "You are a careful programmer. Use your tools to find the bug, fix it and run the tests again.",
    "Work step by step: list the files, run the tests, read, edit, run the tests again.",
)


@dataclass(slots=True)
class Transcript:
    """Messages as they grow.

    Attributes:
        thinking: Whether the text before a call is a thought or the content.
        messages: OpenAI-style messages.
        unlearned: Indices of assistant turns that must not be imitated.
    """

    thinking: bool
    messages: list[dict[str, object]] = field(default_factory=list)
    unlearned: set[int] = field(default_factory=set)

    def say(self, role: str, content: str) -> None:
        """Add a message of the system, the user or a tool."""
        self.messages.append({"role": role, "content": content})

    def call(self, text: str, name: str, arguments: Mapping[str, object]) -> None:
        """Add an assistant turn that calls one tool."""
        self.answer("" if self.thinking else text, text)
        function = {"name": name, "arguments": arguments}
        identity = f"call_{len(self.messages)}"
        call = {"id": identity, "type": "function", "function": function}
        self.messages[-1]["tool_calls"] = [call]

    def answer(self, content: str, thought: str) -> None:
        """Add an assistant turn without a call."""
        message: dict[str, object] = {"role": "assistant", "content": content}
        if self.thinking:
            message["reasoning_content"] = thought
        self.messages.append(message)


def varied_tools(
    rng: random.Random, tools: tuple[dict[str, object], ...]
) -> list[dict[str, object]]:
    """Copy tool schemas as different clients write them: other key orders, titles, tool order."""
    varied: list[dict[str, object]] = json.loads(json.dumps(tools))
    if rng.random() < 0.3:
        rng.shuffle(varied)
    with_titles, is_sorted = rng.random() < 0.15, rng.random() < 0.3
    for tool in varied:
        function = tool["function"]
        assert isinstance(function, dict)
        parameters = function["parameters"]
        for name, schema in parameters["properties"].items():
            if with_titles:
                schema["title"] = name.title()
        if is_sorted:
            function["parameters"] = dict(sorted(parameters.items()))
    return varied


def repair_conversation(
    rng: random.Random, *, split: Split, size: Size, thinking: bool, mistakes: float = 0.12
) -> Conversation:
    """Write a solved task of the repair dialect.

    Args:
        rng: Source of every choice.
        split: Whose names to use.
        size: Size of the repository.
        thinking: Whether thoughts are written.
        mistakes: Probability of a deliberate mistake, from which the oracle then recovers.
    """
    task = make_task(rng.getrandbits(40), split=split, size=size, num_bugs=draw_num_bugs(rng))
    tools = SimulatedTools(task)
    transcript = Transcript(thinking)
    if rng.random() < 0.5:
        transcript.say("system", rng.choice(_SYSTEM_PROMPTS))
    transcript.say("user", task.prompt)
    _use(transcript, tools, "I list the files.", "list_files", {})
    output = _use(transcript, tools, "I run the tests.", "run_tests", {})
    mistake = rng.choice(["edit", "body"]) if rng.random() < mistakes else ""
    while "FAIL " in output:
        path, name = first_failure(output)
        output = _repair_once(rng, transcript, tools, (path, task.function(path, name)), mistake)
        mistake = ""
    passed = output.rsplit("\n", 1)[-1].split(" ")[0]
    text = f"All {passed} tests pass. I fixed {name} in {path}."
    transcript.answer(text, "All tests pass.")
    return Conversation(
        transcript.messages,
        varied_tools(rng, REPAIR_TOOLS),
        thinking,
        frozenset(transcript.unlearned),
        forget=rng.random() < 0.12,
    )


def draw_num_bugs(rng: random.Random) -> int:
    """Mostly one bug; sometimes two or three, which makes a history long in many short turns."""
    return rng.choices([1, 2, 3], [0.7, 0.17, 0.13])[0]


def first_failure(output: str) -> tuple[str, str]:
    """Path and function of the first line that names a failure."""
    line = next(line for line in output.split("\n") if line.startswith("FAIL "))
    _, path, name = line.split(":", 1)[0].split(" ")
    return path, name


def _use(
    transcript: Transcript,
    tools: SimulatedTools,
    text: str,
    name: str,
    arguments: Mapping[str, object],
) -> str:
    transcript.call(text, name, arguments)
    output = tools.call(name, arguments)
    transcript.say("tool", output)
    return output


def _repair_once(
    rng: random.Random,
    transcript: Transcript,
    tools: SimulatedTools,
    place: tuple[str, Function],
    mistake: str,
) -> str:
    path, broken = place
    seen = f"FAIL {path} {broken.name}. I read {path}."
    _use(transcript, tools, seen, "read_file", {"path": path})
    start = f"    {broken.name} = "
    written = next(line for line in tools.files[path].split("\n") if line.startswith(start))
    text = f"FAIL {path} {broken.name} is {broken.doc}."
    edit = {"path": path, "old": written.strip(), "new": broken.line(broken.right)}
    if mistake == "edit":
        wrong = edit | {"old": edit["old"].replace(" = ", " =  ")}
        transcript.unlearned.add(len(transcript.messages))
        _use(transcript, tools, text, "edit_file", wrong)
        again = f"The edit failed. I read {path} again."
        _use(transcript, tools, again, "read_file", {"path": path})
    elif mistake == "body":
        names = dict(zip("abc", broken.parameters, strict=False)) | {"k": "7", "l": "8"}
        body = rng.choice(broken.template.bugs)[1].format(**names)
        edit["new"] = broken.line(body)
        transcript.unlearned.add(len(transcript.messages))
    output = _use(transcript, tools, text, "edit_file", edit)
    assert output.startswith("Edited"), output
    return _use(transcript, tools, "I run the tests again.", "run_tests", {})
