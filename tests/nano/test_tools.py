from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.nano.tools import REPAIR_TOOLS, RepairTools, SimulatedTools
from dlite_agent.nano.world import make_task


@pytest.fixture
def tools(tmp_path: Path) -> RepairTools:
    (tmp_path / "secret.txt").write_text("outside")
    return RepairTools(make_task(1).materialise(tmp_path / "repository"))


@pytest.mark.parametrize("size", ["tiny", "small", "medium"])
def test_simulated_tools_give_the_text_of_the_real_ones(size: str, tmp_path: Path) -> None:
    for seed in range(6):
        task = make_task(seed, split="train", size=size)
        real = RepairTools(task.materialise(tmp_path / str(seed)))
        simulated = SimulatedTools(task)
        path, broken = task.broken_path, task.broken
        calls: list[tuple[str, dict[str, object]]] = [
            ("list_files", {}),
            ("run_tests", {}),
            ("read_file", {"path": path}),
            ("read_file", {"path": "nothing.py"}),
            ("edit_file", {"path": path, "old": "nowhere to be found", "new": ""}),
            (
                "edit_file",
                {
                    "path": path,
                    "old": broken.line(broken.written),
                    "new": broken.line(broken.right),
                },
            ),
            ("run_tests", {}),
            ("list_files", {}),
        ]
        for name, arguments in calls:
            assert real.call(name, arguments) == simulated.call(name, arguments)


@pytest.mark.parametrize(
    "path", ["../secret.txt", "/etc/passwd", "a/../../secret.txt", "", ".", "\0", "~/x"]
)
def test_nothing_outside_the_folder_is_read_or_written(
    tools: RepairTools, tmp_path: Path, path: str
) -> None:
    assert tools.read_file(path) == f"Error: no file {path}"
    assert tools.edit_file(path, "outside", "inside") == f"Error: no file {path}"
    assert (tmp_path / "secret.txt").read_text() == "outside"


def test_a_link_does_not_lead_outside(tools: RepairTools, tmp_path: Path) -> None:
    (tmp_path / "repository" / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert tools.read_file("link.txt") == "Error: no file link.txt"


def test_an_edit_must_match_once(tools: RepairTools) -> None:
    path = make_task(1).broken_path
    assert tools.edit_file(path, "return", "x").startswith("Error: old text found ")
    assert tools.edit_file(path, "", "x") == f"Error: old text found 0 times in {path}"


def test_mistakes_come_back_as_text(tools: RepairTools) -> None:
    assert tools.call("fly", {}) == "Error: no tool fly"
    assert tools.call("read_file", {"file": "x"}).startswith("Error: ")


def test_schemas_name_the_arguments_of_the_functions(tools: RepairTools) -> None:
    for schema in REPAIR_TOOLS:
        function = schema["function"]
        assert isinstance(function, dict)
        code = tools.functions()[function["name"]]
        assert code.__doc__ == function["description"]
        annotated = [name for name in code.__annotations__ if name != "return"]
        assert list(function["parameters"]["properties"]) == annotated
