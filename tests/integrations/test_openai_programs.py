"""The programs of integrations/openai-compatible themselves, where they are installed.

Each is found on the path, or where a variable names it: `DLITE_AIDER=/somewhere/bin/aider`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

pytestmark = [pytest.mark.host, pytest.mark.soak, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "integrations" / "openai-compatible"
IN_FILES = "http://127.0.0.1:8000/v1"
SAID = "It is forty-two.\n"
QUESTION = "What does a.txt say?"
EDIT = "a.txt\n```\n<<<<<<< SEARCH\nIt is forty-two.\n=======\nIt is two.\n>>>>>>> REPLACE\n```\n"


@dataclass(frozen=True)
class Program:
    """How a client is started for one task.

    Attributes:
        command: Its name on the path.
        package: Where it is from.
        options: Behind its name.
        files: Ours, and the place in the home folder or the repository where the client reads it.
        tool: The tool of its own that looks at a file.
        arguments: Of a call of it, for the file's path.
        returns_thoughts: It sends a thought back with its turn.
        names_session: It names its session in each request.
    """

    command: str
    package: str
    options: tuple[str, ...]
    files: dict[str, str]
    tool: str = ""
    arguments: Callable[[str], object] = str
    returns_thoughts: bool = True
    names_session: bool = False
    executable: str | None = field(init=False)

    def __post_init__(self) -> None:
        variable = f"DLITE_{self.command.upper()}"  # a test's environment has it no more
        found = os.environ.get(variable) or shutil.which(self.command)
        object.__setattr__(self, "executable", found)

    def run(self, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Let it work in `folder / "work"` with our files, the server's address put in."""
        if self.executable is None:
            pytest.skip(f"no program {self.command} ({self.package})")
        variables = {"PATH": os.environ["PATH"], "HOME": str(folder / "home")}
        variables |= {"OPENAI_API_KEY": "local", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        for name, place in self.files.items():
            text = (FOLDER / name).read_text(encoding="utf-8").replace(IN_FILES, url)
            if name.endswith(".env"):
                lines = (line for line in text.splitlines() if not line.startswith("#"))
                variables |= dict(line.split("=", 1) for line in lines)
                continue
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text, encoding="utf-8")
        return subprocess.run(
            [self.executable, *self.options],
            env=variables,
            cwd=folder / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
        )


CALLING = [
    Program(
        "qwen",
        "npm's @qwen-code/qwen-code",
        ("-y", QUESTION),
        {"qwen-code.settings.json": "home/.qwen/settings.json"},
        "read_file",
        lambda path: {"file_path": path},
    ),
    Program(
        "opencode",
        "npm's opencode-ai",
        ("run", QUESTION),
        {"opencode.json": "work/opencode.json"},
        "read",
        lambda path: {"filePath": path},
        names_session=True,
    ),
    Program(
        "cline",
        "npm's cline",
        (QUESTION,),
        {"cline.json": "home/.cline/data/settings/providers.json"},
        "read_files",
        lambda path: {"files": [{"path": path}]},
    ),
    Program(
        "openhands",
        "PyPI's openhands",
        ("--headless", "--override-with-envs", "-t", QUESTION),
        {"openhands.env": ""},
        "file_editor",
        lambda path: {"command": "view", "path": path, "security_risk": "LOW", "summary": "look"},
        returns_thoughts=False,
        names_session=True,
    ),
]
AIDER = Program(
    "aider",
    "PyPI's aider-chat",
    ("--yes-always", "--no-check-update", "--message", "It is two.", "a.txt"),
    {
        "aider.conf.yml": "work/.aider.conf.yml",
        "aider.model.settings.yml": "work/aider.model.settings.yml",
        "aider.model.metadata.json": "work/aider.model.metadata.json",
    },
)


def a_repository(folder: Path) -> Path:
    """A file to read or change; where it is."""
    for name in ("home", "work"):
        (folder / name).mkdir()
    (folder / "work" / "a.txt").write_text(SAID, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=folder / "work", check=True)
    return folder / "work" / "a.txt"


@pytest.mark.parametrize("program", CALLING, ids=lambda program: program.command)
def test_a_program_calls_a_tool_and_answers(program: Program, tmp_path: Path) -> None:
    path = a_repository(tmp_path)
    call = json.dumps({"name": program.tool, "arguments": program.arguments(str(path))})

    def say(request: ChatRequest) -> str:
        if not request.tools:  # a title of the conversation
            return "A file."
        if request.messages[-1].role == "tool":
            return "Forty-two."
        return f"<think>\nHm.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"

    engine = ScriptedEngine([say] * 9, max_context=65_536)
    with live_server(engine, ServerSettings(model_names=("nano",))) as server:
        done = program.run(server.base_url, tmp_path)
    assert "Forty-two." in done.stdout, done.stdout + done.stderr
    first, second = (request for request in engine.requests if request.tools)
    assert program.tool in [tool.name for tool in first.tools]
    # All of the first prompt comes back as it was, and then the turn: nothing is computed twice.
    assert second.tools == first.tools
    *before, turn, result = second.messages
    assert tuple(before) == first.messages
    assert [call.name for call in turn.tool_calls] == [program.tool]
    assert turn.tool_calls[0].arguments == program.arguments(str(path))
    assert turn.reasoning == ("Hm." if program.returns_thoughts else None)
    assert SAID.strip() in result.content
    assert first.session_hint == second.session_hint
    assert (first.session_hint is not None) == program.names_session
    for request in engine.requests:
        assert request.sampling.temperature is None  # the checkpoint's own


def test_aider_changes_a_file(tmp_path: Path) -> None:
    path = a_repository(tmp_path)
    engine = ScriptedEngine([f"<think>\nHm.\n</think>\n\n{EDIT}", "fix: a message"])
    with live_server(engine, ServerSettings(model_names=("nano",))) as server:
        done = AIDER.run(server.base_url, tmp_path)
    assert path.read_text(encoding="utf-8") == "It is two.\n", done.stdout + done.stderr
    assert engine.requests[0].sampling.temperature is None
