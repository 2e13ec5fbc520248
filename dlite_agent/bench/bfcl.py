"""The multi-turn tasks of the package `bfcl-eval` as conversations with real tool results.

The package is data and small programs: what a user says in each turn, the calls that solve it, and
the classes that those calls run on (a file system, a travel agency, …), all in memory. Here the
calls are read as Python's syntax tells, never evaluated; each is made by name on an instance of the
class that documents it, and what it returns is the tool's result. Nothing else of the package runs.

Ours, since the tasks do not have it: one call a message, as an agent's loop sends them; the
assistant's closing words in each turn; what the user says where functions are added.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dlite_agent.bench.talk import Talk
from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec
from dlite_agent.errors import ConfigurationError, MissingDependencyError

__all__ = ["bfcl_talks"]

_PACKAGE = "bfcl_eval"
_DONE, _UNABLE = "Done.", "I cannot do that with what I have."
_MORE = "There are more functions now. Go on with them."
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_MAP = f"{_PACKAGE}.constants.executable_backend_config"


def bfcl_talks(chosen: Sequence[str], limit: int | None = None) -> list[Talk]:
    """Read tasks and run the calls that solve them; the same each time.

    Args:
        chosen: Ids of tasks, and categories (`base`, `long_context`, …); `all` is all of them.
        limit: Tasks of each category that is named, from the first; None: all.

    Raises:
        MissingDependencyError: The package is not installed, or needs another one.
        ConfigurationError: A name that it does not have, or another layout than we know.
    """
    root = _root()
    tasks = {name: _tasks(root, path) for name, path in _files(root).items()}
    by_id = {task["id"]: task for some in tasks.values() for task in some}
    found: dict[str, Mapping[str, Any]] = {}
    for name in tasks if "all" in chosen else chosen:
        some = tasks[name][:limit] if name in tasks else [by_id[name]] if name in by_id else []
        if not some:
            raise ConfigurationError(
                f"bfcl: {name!r} is none of all, {', '.join(tasks)}, nor a task such as "
                f"{next(iter(by_id))}"
            )
        found |= {task["id"]: task for task in some}
    backends = _Backends(root)
    return [_talk(task, backends) for task in found.values()]


def _root() -> Path:
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingDependencyError(
            "the multi-turn tasks of BFCL come with the package 'bfcl-eval', which is not "
            "installed; run: pip install --no-deps bfcl-eval (of what it asks for, its back ends "
            "use mpmath alone, which torch brings)"
        )
    return Path(found.submodule_search_locations[0])


def _files(root: Path) -> dict[str, Path]:
    """Category → its file of tasks."""
    marker = "_multi_turn_"
    found = {
        path.stem.partition(marker)[2]: path
        for path in sorted((root / "data").glob(f"BFCL_v*{marker}*.json"))
    }
    if not found:
        raise ConfigurationError(
            f"bfcl: there is no BFCL_v*{marker}*.json in {str(root / 'data')!r}; "
            "use bfcl-eval 2026.3.23"
        )
    return found


def _tasks(root: Path, path: Path) -> list[dict[str, Any]]:
    """Tasks with the calls that solve each of their turns."""
    answers = {one["id"]: one for one in _lines(root / "data" / "possible_answer" / path.name)}
    return [task | {"calls": answers[task["id"]]["ground_truth"]} for task in _lines(path)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class _Backends:
    """The package's classes and what it tells of their functions."""

    def __init__(self, root: Path) -> None:
        known = _module(_MAP)
        self._modules: Mapping[str, str] = known.CLASS_FILE_PATH_MAPPING
        self._docs: Mapping[str, str] = known.MULTI_TURN_FUNC_DOC_FILE_MAPPING
        self._root = root

    def functions(self, class_name: str) -> list[ToolSpec]:
        path = self._root / "data" / "multi_turn_func_doc" / self._docs[class_name]
        return [
            ToolSpec(one["name"], one["description"], _schema(one["parameters"]))
            for one in _lines(path)
        ]

    def start(self, task: Mapping[str, Any]) -> dict[str, Callable[..., object]]:
        """Function → a method of an instance in the task's initial state."""
        is_long = "long_context" in task["id"]
        methods: dict[str, Callable[..., object]] = {}
        for name in task["involved_classes"]:
            instance = getattr(_module(self._modules[name]), name)()
            if hasattr(instance, "_load_scenario"):  # classes without state have none
                # Not copied, though instances change it: nobody reads a task twice.
                scenario = task["initial_config"].get(name, {})
                instance._load_scenario(scenario, long_context=is_long)
            methods |= {one.name: getattr(instance, one.name) for one in self.functions(name)}
        return methods


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name!r} of bfcl-eval cannot be imported: {error}; "
            "run: pip install --no-deps bfcl-eval==2026.3.23 mpmath"
        ) from error


def _schema(declared: Mapping[str, Any]) -> dict[str, JSON]:
    """JSON Schema of what the package declares with Python's names of types."""
    schema = dict(declared)
    schema["type"] = _TYPES.get(schema.get("type", "object"), schema.get("type", "object"))
    if "properties" in schema:
        schema["properties"] = {k: _schema(one) for k, one in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = _schema(schema["items"])
    return schema


def _talk(task: Mapping[str, Any], backends: _Backends) -> Talk:
    every = [one for name in task["involved_classes"] for one in backends.functions(name)]
    late = {name for names in task.get("missed_function", {}).values() for name in names}
    hidden = {*task.get("excluded_function", ()), *late}
    tools = tuple(one for one in every if one.name not in hidden)
    more: dict[int, tuple[ToolSpec, ...]] = {}
    messages: list[Message] = []
    methods, ids = backends.start(task), _ids(task["id"])
    for number, (said, calls) in enumerate(zip(task["question"], task["calls"], strict=True)):
        names = task.get("missed_function", {}).get(str(number), ())
        if names:
            more[len(messages)] = tuple(one for one in every if one.name in names)
        said = said or [{"role": "user", "content": _MORE}]
        messages += [Message(one["role"], one["content"]) for one in said]
        for text in calls:
            messages += _step(text, methods, next(ids))
        messages.append(Message("assistant", _DONE if calls else _UNABLE))
    return Talk(task["id"], tuple(messages), tools, more)


def _ids(task_id: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"call_{task_id}_{number:03d}"
        number += 1


def _step(
    text: str, methods: Mapping[str, Callable[..., object]], call_id: str
) -> tuple[Message, Message]:
    """A call, and what it returns."""
    name, values, named = _parsed(text)
    if name not in methods:
        raise ConfigurationError(
            f"bfcl: {text!r} calls {name!r}, which no class of its task documents; "
            "use bfcl-eval 2026.3.23"
        )
    method = methods[name]
    order = inspect.signature(method).parameters
    arguments = dict(zip(order, values, strict=False)) | named
    call = ToolCall(name, cast(JSON, json.loads(json.dumps(arguments))), id=call_id)
    result = Message("tool", _result(method, values, named), tool_call_id=call_id)
    return Message("assistant", tool_calls=(call,)), result


def _parsed(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name and literal arguments of a call in Python's syntax.

    Raises:
        ConfigurationError: It is anything else.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("no plain call")
        values = [ast.literal_eval(one) for one in call.args]
        named = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
        if len(named) < len(call.keywords):
            raise ValueError("keywords that are no names")
    except (ValueError, SyntaxError) as error:
        raise ConfigurationError(
            f"bfcl: {text!r} is no call of a function with literals ({error}); "
            "use bfcl-eval 2026.3.23"
        ) from error
    return call.func.id, values, named


def _result(method: Callable[..., object], values: list[Any], named: dict[str, Any]) -> str:
    """The text that a model would read: errors too are results."""
    try:
        value = method(*values, **named)
    except Exception as error:  # noqa: BLE001 - a class of somebody else's may raise anything
        return f"Error during execution: {error}"
    try:
        return json.dumps(value) if isinstance(value, dict) else str(value)
    except TypeError:  # a number of mpmath's is no JSON
        return str(value)
