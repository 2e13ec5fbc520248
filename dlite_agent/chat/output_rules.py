"""What an answer must be: which tools it may or has to call, and the form of its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, cast, get_args

from dlite_agent.chat.field_types import JSON_ADVICE, check_fields, make_tuple
from dlite_agent.chat.messages import JSON, MAX_DEPTH, ToolSpec, is_plain_json, is_too_deep
from dlite_agent.errors import RequestError, UnsupportedParameterError

__all__ = [
    "AnswerFormat",
    "OutputRules",
    "ToolChoice",
    "answer_format_from_openai",
    "output_rules_from_openai",
    "tool_choice_from_openai",
]


Mode = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools may be called.

    Attributes:
        mode: `"auto"`: the model decides; `"required"`: at least one call; `"none"`: no call.
        names: The tools that may be called; empty for all. The others stay in the prompt, so that
            it does not change.

    Raises:
        RequestError: A field is of another type; `tool_choice_from_openai` reads OpenAI's form.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        modes = get_args(Mode)
        advice = f"one of {modes!r}, and names for a tool's name"
        check_fields(self, {"mode": (self.mode in modes, advice)})
        make_tuple(self, "names", str, "a tuple of names, also for a single one")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """An answer that is JSON.

    Attributes:
        schema: JSON schema of the answer; None: any object.
        strict: Whether a keyword that cannot be enforced is an error; else it is not looked at.

    Raises:
        RequestError: A field is of another type.
    """

    schema: Mapping[str, JSON] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        is_schema = isinstance(self.schema, Mapping | None) and is_plain_json(self.schema)
        checks = {
            "schema": (is_schema, f"None or a mapping of {JSON_ADVICE}"),
            "strict": (isinstance(self.strict, bool), "True or False"),
        }
        check_fields(self, checks)


@dataclass(frozen=True, slots=True)
class OutputRules:
    """All of a request's rules.

    Attributes:
        tool_choice: Which tools may be called.
        parallel_tool_calls: Whether an answer may hold several calls.
        answer: The form of the answer's text; None for any text. With tools, an answer is calls or
            text in this form.
        closes_calls: Whether a call whose tokens run out is closed as well, its strings cut short:
            for answers that travel as calls, never for tools that do something.

    Raises:
        RequestError: A field is of another type.
    """

    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    answer: AnswerFormat | None = None
    closes_calls: bool = False

    def __post_init__(self) -> None:
        checks = {
            "tool_choice": (isinstance(self.tool_choice, ToolChoice), "a ToolChoice"),
            "parallel_tool_calls": (isinstance(self.parallel_tool_calls, bool), "True or False"),
            "answer": (isinstance(self.answer, AnswerFormat | None), "an AnswerFormat or None"),
            "closes_calls": (isinstance(self.closes_calls, bool), "True or False"),
        }
        check_fields(self, checks)

    def allowed(self, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """The tools that may be called.

        Raises:
            RequestError: The choice names a tool that is not there, or demands one of none.
        """
        choice = self.tool_choice
        known = [tool.name for tool in tools]
        for name in choice.names:
            if name not in known:
                raise RequestError(
                    f"tool_choice names the tool {name!r}, but tools has {known!r}; name one of "
                    "them"
                )
        if choice.mode == "required" and not tools:
            raise RequestError("tool_choice demands a call, but there are no tools; send tools")
        if choice.mode == "none":
            return ()
        return tuple(tool for tool in tools if not choice.names or tool.name in choice.names)


def output_rules_from_openai(body: Mapping[str, object]) -> OutputRules:
    """All rules of a request: `tool_choice`, `parallel_tool_calls`, `response_format`.

    Raises:
        UnsupportedParameterError: One of them is something that OpenAI does not know.
    """
    return OutputRules(
        tool_choice_from_openai(body.get("tool_choice")),
        body.get("parallel_tool_calls") is not False,
        answer_format_from_openai(body.get("response_format")),
    )


def tool_choice_from_openai(choice: object) -> ToolChoice:
    """Read `tool_choice`: a word, a named function, or `allowed_tools`; null is `"auto"`.

    `"any"` and true are `"required"`, as other APIs spell it. Another string is a tool's name.

    Raises:
        UnsupportedParameterError: It is something else.
    """
    if choice is None or choice in ("auto", ""):
        return ToolChoice()
    if choice is False or choice == "none":
        return ToolChoice("none")
    if choice is True or choice in ("required", "any"):
        return ToolChoice("required")
    if isinstance(choice, str):
        return ToolChoice("required", (choice,))
    if not isinstance(choice, Mapping):
        _refuse("tool_choice", choice, "send 'auto', 'none', 'required' or a function's name")
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice)
    if choice.get("type") in ("any", "auto", "none") and len(choice) == 1:
        return tool_choice_from_openai(choice["type"])
    return ToolChoice("required", (_function_name(choice),))


def answer_format_from_openai(response_format: object) -> AnswerFormat | None:
    """Read `response_format`: `text`, `json_object` or `json_schema`; None for text.

    Raises:
        UnsupportedParameterError: It is something else, or its schema is no object or too deep.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if not isinstance(response_format, Mapping) or kind not in (
        "text",
        "json_object",
        "json_schema",
    ):
        advice = "send one of type 'text', 'json_object' or 'json_schema'"
        _refuse("response_format", response_format, advice)
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat()
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(schema, Mapping):
        advice = "send {'name': ..., 'schema': {...}}"
        _refuse("response_format.json_schema", described, advice)
    if is_too_deep(cast(JSON, schema)):
        advice = f"nest at most {MAX_DEPTH} objects and lists"
        _refuse("response_format.json_schema.schema", schema, advice)
    return AnswerFormat(cast(dict[str, JSON], dict(schema)), described.get("strict") is not False)


def _allowed_tools(choice: Mapping[str, object]) -> ToolChoice:
    allowed = choice.get("allowed_tools", choice)
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not tools:
        advice = "send {'mode': 'auto' or 'required', 'tools': [...]} with at least one tool"
        _refuse("tool_choice.allowed_tools", allowed, advice)
    names = tuple(_function_name(tool) for tool in tools)
    return ToolChoice("required" if mode == "required" else "auto", names)


def _function_name(choice: object) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        _refuse("tool_choice", choice, "name a function: {'type': 'function', 'function': {...}}")
    return name


def _refuse(where: str, value: object, advice: str) -> NoReturn:
    raise UnsupportedParameterError(f"{where} is {value!r}; {advice}")
