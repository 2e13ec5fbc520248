"""Tools on the files of one folder; nothing outside of it is listed, read or written.

Names, schemas and results are those of the dialect that `nano` learned where both have a tool
(`nano.tools`), so that it can use them, too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from dlite_agent.chat.messages import ToolSpec
from dlite_agent.cli.chat_tools import Arguments, ChatTool, OnOutput
from dlite_agent.errors import ConfigurationError

__all__ = ["FolderTools"]

MAX_RESULT = 20_000
"""Characters of one result, about 5,000 tokens."""
MAX_FILE_BYTES = 8 * 2**20
"""A larger file is neither read nor edited nor searched."""
MAX_LISTED = 500
_MAX_WALKED = 20_000
_MAX_FOUND = 100
_HIDDEN = ("__pycache__", "node_modules", ".")


class _RefusedError(Exception):
    """What the model is told instead of a result."""


class FolderTools:
    """Lists, reads, searches, edits and writes UTF-8 text below a folder.

    Symbolic links count as what they lead to. A file is replaced in one step, with its mode.

    Args:
        root: The folder.

    Raises:
        ConfigurationError: There is no such folder.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().resolve()
        if not self.root.is_dir():
            raise ConfigurationError(f"--root is {str(root)!r}, which is no folder; name one")

    def tools(self) -> list[ChatTool]:
        """All of them."""
        edit = _spec(
            "edit_file", "Replace a text that occurs once in a file.", "path", "old", "new"
        )
        write = _spec("write_file", "Create a file, or replace a whole one.", "path", "text")
        return [
            self._tool(_spec("list_files", "List the files of the repository."), is_reading=True),
            self._tool(_spec("read_file", "Read a file.", "path"), is_reading=True),
            self._tool(
                _spec("search_files", "Find the lines of all files that contain a text.", "text"),
                is_reading=True,
            ),
            self._tool(edit, is_reading=False),
            self._tool(write, is_reading=False),
        ]

    def list_files(self) -> str:
        """Paths of all files, but for hidden ones, sorted."""
        paths = sorted(path.relative_to(self.root).as_posix() for path in self._files())
        if not paths:
            return "(no files)"
        left = len(paths) - MAX_LISTED
        more = [f"({left} more files)"] if left > 0 else []
        return "\n".join([*paths[:MAX_LISTED], *more])

    def read_file(self, path: str) -> str:
        """A file's text; `path:N` begins with line N."""
        name, first = path, 1
        if not (self.root / path).exists():
            stem, colon, number = path.rpartition(":")
            if colon and number.isdecimal() and int(number) > 0:
                name, first = stem, int(number)
        lines = self._read(name).splitlines(keepends=True)
        text, num_shown = "", 0
        for line in lines[first - 1 :]:
            if len(text) + len(line) > MAX_RESULT:
                break
            text, num_shown = text + line, num_shown + 1
        after = first + num_shown
        if after > len(lines):
            return text
        if not num_shown:
            return lines[first - 1][:MAX_RESULT] + f"\n(line {first} is cut)"
        return f"{text}({len(lines)} lines; read {name}:{after} for the rest)"

    def search_files(self, text: str) -> str:
        """The lines of all files that contain a text."""
        if not text:
            return "Error: text is empty"
        found = list(islice(self._lines_with(text), _MAX_FOUND + 1))
        more = ["(and more; search for a longer text)"] if len(found) > _MAX_FOUND else []
        return "\n".join([*found[:_MAX_FOUND], *more]) or "(not found)"

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once; line ends stay those of the file."""
        text = self._read(path, is_raw=True)
        if "\r\n" in text and "\r" not in old:  # what `read_file` shows has plain line ends
            old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
        count = text.count(old) if old else 0
        if count != 1:
            return f"Error: old text found {count} times in {path}"
        _replace(self._resolve(path), text.replace(old, new))
        return f"Edited {path}"

    def write_file(self, path: str, text: str) -> str:
        """Create a file with its folders, or replace a whole one."""
        target = self._resolve(path)
        if target.exists() and not target.is_file():
            return f"Error: {path} is no file"
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, text)
        return f"Wrote {path}"

    def _tool(self, spec: ToolSpec, *, is_reading: bool) -> ChatTool:
        method = getattr(self, spec.name)

        def run(arguments: Arguments, _: OnOutput) -> str:
            try:
                return str(method(**arguments))
            except _RefusedError as refused:
                return f"Error: {refused}"
            except (OSError, ValueError) as error:  # ValueError: a path with a null character
                return f"Error: {getattr(error, 'strerror', None) or error}"

        return ChatTool(spec, run, is_reading=is_reading, preview=None if is_reading else _preview)

    def _resolve(self, path: str) -> Path:
        """Where a path leads; it need not exist."""
        target = (self.root / path).resolve()
        if not target.is_relative_to(self.root):
            raise _RefusedError(f"{path} is outside of the folder")
        return target

    def _read(self, path: str, *, is_raw: bool = False) -> str:
        target = self._resolve(path)
        if not target.is_file():
            raise _RefusedError(f"no file {path}")
        if target.stat().st_size > MAX_FILE_BYTES:
            raise _RefusedError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        try:
            with target.open(encoding="utf-8", newline="" if is_raw else None) as file:
                return file.read()
        except UnicodeDecodeError as error:
            raise _RefusedError(f"{path} is no UTF-8 text") from error

    def _files(self) -> Iterator[Path]:
        """Files below the root that are not hidden, the first many."""
        return islice(self._walk(), _MAX_WALKED)

    def _walk(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not name.startswith(_HIDDEN))
            for name in sorted(names):
                path = Path(folder, name)
                if not name.startswith(_HIDDEN) and path.is_file():
                    yield path

    def _lines_with(self, text: str) -> Iterator[str]:
        for path in self._files():
            name = path.relative_to(self.root).as_posix()
            try:
                content = self._read(name)
            except (_RefusedError, OSError):
                continue
            for number, line in enumerate(content.splitlines(), 1):
                if text in line:
                    yield f"{name}:{number}: {line.strip()[:200]}"


def _spec(name: str, description: str, *arguments: str) -> ToolSpec:
    """A tool whose arguments are texts, all needed; keys in the order that `nano` learned."""
    parameters: dict[str, object] = {
        "properties": {argument: {"type": "string"} for argument in arguments},
        "type": "object",
    }
    if arguments:
        parameters["required"] = list(arguments)
    return ToolSpec(name, description, parameters)  # type: ignore[arg-type]  # JSON as it stands


def _preview(arguments: Arguments) -> list[str]:
    """The lines that an edit takes out and puts in, or that are written."""
    removed = str(arguments.get("old", "")).splitlines()
    added = str(arguments.get("new", arguments.get("text", ""))).splitlines()
    return [f"- {line}" for line in removed] + [f"+ {line}" for line in added]


def _replace(path: Path, text: str) -> None:
    """Write a file; one that is there is replaced in one step, and keeps its mode."""
    if not path.exists():
        path.write_text(text, encoding="utf-8", newline="")
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".dlite-")
    written = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        shutil.copymode(path, written)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
