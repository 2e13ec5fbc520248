"""The four tools of the repair dialect, on a real folder and on files in memory.

Both give the same text for the same calls. The one in memory runs the checks of a `Task` without
a subprocess, which is what makes writing thousands of trajectories cheap.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dlite_agent.nano.world import TEST_FILE, TEST_TIMEOUT_S, Task

__all__ = ["REPAIR_TOOLS", "RepairTools", "SimulatedTools"]


def _schema(name: str, description: str, *arguments: str) -> dict[str, object]:
    parameters: dict[str, object] = {
        "properties": {argument: {"type": "string"} for argument in arguments},
        "type": "object",
    }
    if arguments:
        parameters["required"] = list(arguments)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


REPAIR_TOOLS: tuple[dict[str, object], ...] = (
    _schema("list_files", "List the files of the repository."),
    _schema("run_tests", "Run the tests."),
    _schema("read_file", "Read a file.", "path"),
    _schema("edit_file", "Replace a text that occurs once in a file.", "path", "old", "new"),
)
"""The tools as JSON schema, in the form that chat templates and OpenAI clients take."""


class _FileTools:
    """What both kinds share: the texts, and the rules for an edit."""

    def _paths(self) -> list[str]:
        raise NotImplementedError

    def _read(self, path: str) -> str | None:
        raise NotImplementedError

    def _write(self, path: str, text: str) -> None:
        raise NotImplementedError

    def run_tests(self) -> str:
        """Run the tests."""
        raise NotImplementedError

    def list_files(self) -> str:
        """List the files of the repository."""
        return "\n".join(self._paths())

    def read_file(self, path: str) -> str:
        """Read a file."""
        text = self._read(path)
        return f"Error: no file {path}" if text is None else text

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        text = self._read(path)
        if text is None:
            return f"Error: no file {path}"
        count = text.count(old) if old else 0
        if count != 1:
            return f"Error: old text found {count} times in {path}"
        self._write(path, text.replace(old, new))
        return f"Edited {path}"

    def functions(self) -> dict[str, Callable[..., str]]:
        """Map each tool's name to its function."""
        return {
            "list_files": self.list_files,
            "run_tests": self.run_tests,
            "read_file": self.read_file,
            "edit_file": self.edit_file,
        }

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool by name; every mistake comes back as text."""
        function = self.functions().get(name)
        if function is None:
            return f"Error: no tool {name}"
        try:
            return function(**{key: str(value) for key, value in arguments.items()})
        except TypeError as error:
            return f"Error: {error}"


class RepairTools(_FileTools):
    """The tools on a folder. Nothing outside of it can be listed, read or written.

    Args:
        root: Folder of the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def _resolve(self, path: str) -> Path | None:
        try:
            target = (self._root / path).resolve()
        except (OSError, ValueError):
            return None
        return target if target.is_relative_to(self._root) and target.is_file() else None

    def _paths(self) -> list[str]:
        found = (path.relative_to(self._root) for path in self._root.rglob("*") if path.is_file())
        hidden = ("__pycache__", ".")
        return sorted(p.as_posix() for p in found if not any(q.startswith(hidden) for q in p.parts))

    def _read(self, path: str) -> str | None:
        target = self._resolve(path)
        return None if target is None else target.read_text(encoding="utf-8", errors="replace")

    def _write(self, path: str, text: str) -> None:
        target = self._resolve(path)
        assert target is not None
        target.write_text(text, encoding="utf-8")

    def run_tests(self) -> str:
        """Run the tests."""
        try:
            result = subprocess.run(
                [sys.executable, TEST_FILE],
                cwd=self._root,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TEST_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"Error: the tests took longer than {TEST_TIMEOUT_S:.0f} s"
        return result.stdout.decode("utf-8", errors="replace").rstrip("\n")


class SimulatedTools(_FileTools):
    """The same tools on files in memory.

    Args:
        task: Whose files to start from and whose checks to run.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.files = task.files()

    def _paths(self) -> list[str]:
        return sorted(self.files)

    def _read(self, path: str) -> str | None:
        return self.files.get(path)

    def _write(self, path: str, text: str) -> None:
        self.files[path] = text

    def run_tests(self) -> str:
        """Run the tests."""
        spaces: dict[str, dict[str, Callable[..., object]]] = {}
        for path, _ in self._task.modules:
            spaces[path] = {}
            exec(self.files[path], spaces[path])
        lines: list[str] = []
        clean = dict.fromkeys(check.path for check in self._task.checks)
        for check in self._task.checks:
            got: object
            try:
                got = spaces[check.path][check.function](*check.arguments)
            except Exception as error:  # noqa: BLE001 - as in run_tests.py
                got = error
            if repr(got) != repr(check.expected):
                clean.pop(check.path, None)
                lines.append(
                    f"FAIL {check.path} {check.function}: expected {check.expected!r}, got {got!r}"
                )
        failed = len(lines)
        lines += [f"ok {path}" for path in clean]
        lines.append(f"{len(self._task.checks) - failed} passed, {failed} failed")
        return "\n".join(lines)
