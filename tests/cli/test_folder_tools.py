"""Tools on a folder: the results that `nano` learned, nothing outside, no damaged file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlite_agent.cli import folder_tools
from dlite_agent.cli.folder_tools import FolderTools
from dlite_agent.errors import ConfigurationError
from dlite_agent.nano.tools import REPAIR_TOOLS, RepairTools
from dlite_agent.nano.world import make_task


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "secret").write_text("secret")
    (root / "a.py").write_text("one\ntwo\ntwo\n")
    (root / "away").symlink_to(tmp_path)
    (root / "near").symlink_to("a.py")
    return root


def run(root: Path, name: str, **arguments: str) -> str:
    (found,) = [tool for tool in FolderTools(root).tools() if tool.spec.name == name]
    return found.run(arguments, lambda text: None)


def test_schemas_and_results_are_those_that_nano_learned(tmp_path: Path) -> None:
    task = make_task(2, split="heldout", size="small")
    ours, theirs = task.materialise(tmp_path / "a"), task.materialise(tmp_path / "b")
    learned = {spec["function"]["name"]: spec["function"] for spec in REPAIR_TOOLS}  # type: ignore[index]
    specs = {tool.spec.name: tool.spec for tool in FolderTools(ours).tools()}
    for name in ("list_files", "read_file", "edit_file"):
        spec = specs[name]
        function = {"name": name, "description": spec.description, "parameters": spec.parameters}
        assert repr(function) == repr(learned[name]), "the order of keys is part of the prompt"
    path, line = task.broken_path, task.broken.line(task.broken.written)
    for name, arguments in (
        ("list_files", {}),
        ("read_file", {"path": path}),
        ("read_file", {"path": "nowhere.py"}),
        ("edit_file", {"path": path, "old": line, "new": "fixed"}),
        ("edit_file", {"path": path, "old": line, "new": "fixed"}),
        ("edit_file", {"path": path, "old": "", "new": "fixed"}),
        ("edit_file", {"path": "nowhere.py", "old": "a", "new": "b"}),
    ):
        assert run(ours, name, **arguments) == RepairTools(theirs).call(name, arguments)
    assert (ours / path).read_bytes() == (theirs / path).read_bytes()


@pytest.mark.parametrize(
    "path",
    ["../secret", "../root2/secret", "away/secret", "/etc/passwd", "away/root2/secret", "\0"],
)
def test_nothing_outside_is_read_or_written(root: Path, path: str) -> None:
    for name, arguments in (
        ("read_file", {}),
        ("edit_file", {"old": "secret", "new": "x"}),
        ("write_file", {"text": "x"}),
    ):
        result = run(root, name, path=path, **arguments)
        assert result.startswith("Error: ")
    assert (root.parent / "secret").read_text() == "secret"
    assert (root.parent / "root2" / "secret").read_text() == "secret"
    assert "secret" not in run(root, "search_files", text="secret")
    assert run(root, "list_files") == "a.py\nnear"


def test_a_link_inside_is_what_it_leads_to(root: Path) -> None:
    assert run(root, "edit_file", path="near", old="one", new="1") == "Edited near"
    assert (root / "near").is_symlink()
    assert (root / "a.py").read_text() == "1\ntwo\ntwo\n"


def test_a_file_keeps_its_mode_and_its_line_ends(root: Path) -> None:
    path = root / "run.sh"
    path.write_bytes(b"one\r\ntwo\r\nthree\n")
    path.chmod(0o750)
    assert run(root, "read_file", path="run.sh") == "one\ntwo\nthree\n"
    assert run(root, "edit_file", path="run.sh", old="one\ntwo", new="1\n2") == "Edited run.sh"
    assert path.read_bytes() == b"1\r\n2\r\nthree\n"
    assert path.stat().st_mode & 0o777 == 0o750
    left = sorted(entry.name for entry in root.iterdir())
    assert left == ["a.py", "away", "near", "run.sh"]


def test_what_is_no_text_is_refused_and_stays(root: Path) -> None:
    (root / "b.bin").write_bytes(b"\xff\xfe old")
    for name, arguments in (("read_file", {}), ("edit_file", {"old": "old", "new": "new"})):
        assert "no UTF-8 text" in run(root, name, path="b.bin", **arguments)
    assert (root / "b.bin").read_bytes() == b"\xff\xfe old"
    os.mkfifo(root / "pipe")
    assert run(root, "read_file", path="pipe") == "Error: no file pipe"
    assert run(root, "write_file", path="pipe", text="x") == "Error: pipe is no file"
    assert run(root, "read_file", path=".") == "Error: no file ."


def test_files_are_written_with_their_folders(root: Path) -> None:
    assert run(root, "write_file", path="new/deep/b.py", text="x\n") == "Wrote new/deep/b.py"
    assert run(root, "write_file", path="new/deep/b.py", text="y\n") == "Wrote new/deep/b.py"
    assert (root / "new" / "deep" / "b.py").read_text() == "y\n"
    assert run(root, "write_file", path="a.py/b", text="x").startswith("Error: ")


def test_a_long_file_is_read_in_parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_tools, "MAX_RESULT", 20)
    (root / "long").write_text("".join(f"line {i}\n" for i in range(1, 6)))
    assert run(root, "read_file", path="long") == (
        "line 1\nline 2\n(5 lines; read long:3 for the rest)"
    )
    assert run(root, "read_file", path="long:4") == "line 4\nline 5\n"
    assert run(root, "read_file", path="long:9") == ""
    (root / "wide").write_text("x" * 50)
    assert run(root, "read_file", path="wide") == "x" * 20 + "\n(line 1 is cut)"
    monkeypatch.setattr(folder_tools, "MAX_FILE_BYTES", 30)
    assert "more than 30 bytes" in run(root, "read_file", path="long")


def test_lists_and_searches_have_an_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_tools, "MAX_LISTED", 1)
    assert run(root, "list_files") == "a.py\n(1 more files)"
    monkeypatch.setattr(folder_tools, "_MAX_FOUND", 2)
    found = run(root, "search_files", text="two").splitlines()
    assert found == ["a.py:2: two", "a.py:3: two", "(and more; search for a longer text)"]
    assert run(root, "search_files", text="nowhere") == "(not found)"
    assert run(root, "search_files", text="") == "Error: text is empty"


def test_a_root_that_is_no_folder_is_refused(root: Path) -> None:
    for wrong in (root / "a.py", root / "nowhere"):
        with pytest.raises(ConfigurationError, match="--root is"):
            FolderTools(wrong)


def test_an_edit_is_shown_before_it_is_made(root: Path) -> None:
    tools = {tool.spec.name: tool for tool in FolderTools(root).tools()}
    preview = tools["edit_file"].preview
    assert preview is not None
    assert preview({"path": "a", "old": "x\ny", "new": "z"}) == ["- x", "- y", "+ z"]
    assert (
        preview({"path": "a", "text": "x\n" * 100}) == ["+ x"] * 100
    )  # nothing is consented to unseen
    assert [tool.spec.name for tool in tools.values() if not tool.is_reading] == [
        "edit_file",
        "write_file",
    ]
