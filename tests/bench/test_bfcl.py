"""Tasks of BFCL as conversations, with a small package of ours that is laid out as the real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.bench.bfcl import bfcl_talks
from dlite_agent.bench.turns import TurnsOptions, bench_turns, turns_json
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError, MissingDependencyError
from tests.tiny_checkpoint import write_checkpoint

SHELF = """
class ShelfAPI:
    def __init__(self):
        self.things = []

    def _load_scenario(self, scenario, long_context=False):
        self.things = scenario["things"] + ["dust"] * long_context

    def put(self, thing, places=()):
        self.things.append(thing)
        return {"things": list(self.things), "places": places}

    def count(self):
        return len(self.things)

    def weigh(self):
        return {"kilograms": complex(1, 2)}

    def burn(self):
        raise RuntimeError("no fire")

    def secret(self):
        raise AssertionError("is called by no task")
"""
COUNTER = """
class CounterAPI:
    def up(self, by=1):
        return f"up by {by}"
"""
PREFIX = "bfcl_eval.backends"
CONFIG = f'''
CLASS_FILE_PATH_MAPPING = {{"ShelfAPI": "{PREFIX}.shelf", "CounterAPI": "{PREFIX}.counter"}}
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {{"ShelfAPI": "shelf.json", "CounterAPI": "counter.json"}}
'''


def documented(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "dict", "properties": properties, "required": list(properties)}
    return {"name": name, "description": f"{name}.", "parameters": parameters, "response": {}}


DOCS = {
    "shelf.json": [
        documented(
            "put",
            thing={"type": "string"},
            places={"type": "tuple", "items": {"type": "float"}},
        ),
        *(documented(name) for name in ("count", "weigh", "burn")),
    ],
    "counter.json": [documented("up", by={"type": "integer"})],
}


def task(name: str, turns: int, **more: Any) -> dict[str, Any]:
    said: list[Any] = [[{"role": "user", "content": f"Turn {i}."}] for i in range(turns)]
    return {
        "id": name,
        "question": said,
        "initial_config": {"ShelfAPI": {"things": ["book"]}},
        "involved_classes": ["CounterAPI", "ShelfAPI"],
    } | more


BASE, LONG, LATE = "multi_turn_base_0", "multi_turn_long_context_0", "multi_turn_miss_func_0"
TASKS = [
    task(BASE, 2, excluded_function=["burn"]),
    task("multi_turn_base_1", 1),
    task(LONG, 1),
    task(LATE, 2, missed_function={"1": ["count"]})
    | {"question": [task("", 1)["question"][0], []]},
]
CALLS = {
    BASE: [["put('cup', places=(1, 2.5))", "up()"], []],
    "multi_turn_base_1": [["weigh()", "burn()", "put(1, 2, 3)"]],
    LONG: [["count()"]],
    LATE: [["put('é', [])"], ["count()"]],
}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def forget() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "site" / "bfcl_eval"
    for folder, name, text in (
        ("constants", "executable_backend_config.py", CONFIG),
        ("backends", "shelf.py", SHELF),
        ("backends", "counter.py", COUNTER),
        ("", "__init__.py", ""),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text(text, encoding="utf-8")
    for name, docs in DOCS.items():
        write_lines(root / "data" / "multi_turn_func_doc" / name, docs)
    for kind in ("base", "long_context", "miss_func"):
        tasks = [task for task in TASKS if kind in task["id"]]
        answers = [{"id": task["id"], "ground_truth": CALLS[task["id"]]} for task in tasks]
        name = f"BFCL_v9_multi_turn_{kind}.json"
        write_lines(root / "data" / name, tasks)
        write_lines(root / "data" / "possible_answer" / name, answers)
    monkeypatch.syspath_prepend(root.parent)
    for module in forget():
        monkeypatch.delitem(sys.modules, module)
    yield root
    for module in forget():
        del sys.modules[module]


@pytest.mark.usefixtures("package")
def test_a_task_is_a_conversation_whose_results_its_back_end_gives() -> None:
    (talk,) = bfcl_talks([BASE])
    assert talk.name == BASE
    assert [message.role for message in talk.messages] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant"),
        *("user", "assistant"),
    ]
    (put,), (up,) = talk.messages[1].tool_calls, talk.messages[3].tool_calls
    assert (put.name, put.arguments) == ("put", {"thing": "cup", "places": [1, 2.5]})
    assert (up.name, up.arguments) == ("up", {})
    assert put.id == talk.messages[2].tool_call_id != up.id == talk.messages[4].tool_call_id
    assert json.loads(talk.messages[2].content) == {"things": ["book", "cup"], "places": [1, 2.5]}
    assert talk.messages[4].content == "up by 1"
    assert talk.messages[-1].content != talk.messages[5].content, "one was solved, one was not"


@pytest.mark.usefixtures("package")
def test_tools_are_those_of_the_task_as_json_schema() -> None:
    (talk,) = bfcl_talks([BASE])
    assert [tool.name for tool in talk.tools] == ["up", "put", "count", "weigh"]
    assert talk.tools[1].parameters == {
        "type": "object",
        "properties": {
            "thing": {"type": "string"},
            "places": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["thing", "places"],
    }
    assert not talk.more_tools


@pytest.mark.usefixtures("package")
def test_a_function_that_comes_late_is_offered_from_its_turn_on() -> None:
    (talk,) = bfcl_talks([LATE])
    names = [
        [tool.name for tool in talk.tools_before(i)]
        for i, message in enumerate(talk.messages)
        if message.role == "assistant"
    ]
    before = ["up", "put", "weigh", "burn"]
    assert names == [before, before, [*before, "count"], [*before, "count"]]
    assert [m.content for m in talk.messages if m.role == "tool"][-1] == "2"
    assert talk.messages[4].role == "user"
    assert talk.messages[4].content


@pytest.mark.usefixtures("package")
def test_what_a_back_end_raises_and_what_is_no_json_are_results() -> None:
    (talk,) = bfcl_talks(["multi_turn_base_1"])
    weighed, burned, misused = [m.content for m in talk.messages if m.role == "tool"]
    assert weighed == "{'kilograms': (1+2j)}"
    assert burned == "Error during execution: no fire"
    assert misused.startswith("Error during execution: ")


@pytest.mark.usefixtures("package")
def test_categories_and_ids_are_chosen_and_every_reading_starts_anew() -> None:
    names = [talk.name for talk in bfcl_talks(["base", LONG, "base"])]
    assert names == [BASE, "multi_turn_base_1", LONG]
    assert [talk.name for talk in bfcl_talks(["all"], 1)] == [BASE, LONG, LATE]
    assert bfcl_talks(["all"]) == bfcl_talks(["all"])
    (long,) = bfcl_talks([LONG])
    assert long.messages[2].content == "2", "the long state, and of this task alone"
    with pytest.raises(ConfigurationError, match="'simple' is none of all, base, long_context"):
        bfcl_talks(["simple"])


@pytest.mark.parametrize(
    "call",
    [
        "__import__('os').getcwd()",
        "put(open('x'))",
        "put(thing=__file__)",
        "put(*['a'])",
        "put(**{'thing': 'a'})",
        "put('a'); put('b')",
        "secret()",
        "_load_scenario({'things': []})",
        "put",
        "put(",
    ],
)
def test_a_call_is_read_and_never_evaluated(package: Path, call: str) -> None:
    path = package / "data" / "possible_answer" / "BFCL_v9_multi_turn_long_context.json"
    write_lines(path, [{"id": LONG, "ground_truth": [[call]]}])
    with pytest.raises(ConfigurationError, match="use bfcl-eval"):
        bfcl_talks([LONG])


def test_a_package_that_is_not_there_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps bfcl-eval"):
        bfcl_talks(["base"])


def test_a_package_of_another_layout_or_without_a_back_end_is_named(package: Path) -> None:
    (package / "backends" / "shelf.py").write_text("import a_module_that_is_nowhere")
    with pytest.raises(MissingDependencyError, match=r"backends\.shelf.*a_module_that_is_nowhere"):
        bfcl_talks(["base"])
    for path in (package / "data").glob("BFCL_*"):
        path.unlink()
    with pytest.raises(ConfigurationError, match="there is no BFCL_v"):
        bfcl_talks(["base"])


@pytest.mark.usefixtures("package")
def test_a_task_is_replayed_turn_by_turn(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", max_positions=4096)
    options = TurnsOptions(
        bfcl=[BASE], clients=("append-only", "mixed"), modes=("as_generated",), split_rate=0.5
    )
    config = EngineConfig(model=str(model), max_kv_bytes=32 * 2**20)
    runs = turns_json(bench_turns(config, options))["runs"]
    assert isinstance(runs, list)
    assert [(run["transcript"], run["client"]) for run in runs] == [
        (BASE, "append-only"),
        (BASE, "mixed"),
    ]
    for run in runs:
        assert len(run["turns"]) == 4
        assert run["amplification"] == 1.0


def test_the_real_package_has_no_call_that_fails() -> None:
    pytest.importorskip("bfcl_eval", reason="the tasks of BFCL: pip install --no-deps bfcl-eval")
    talks = bfcl_talks(["all"], 20)
    assert len(talks) == 80
    assert talks == bfcl_talks(["all"], 20)
    results = [m.content for talk in talks for m in talk.messages if m.role == "tool"]
    assert not [text for text in results if text.startswith("Error during execution")]
    assert all(talk.messages[-1].role == "assistant" for talk in talks)
    assert {len(talk.more_tools) for talk in talks} == {0, 1}
