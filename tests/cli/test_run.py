"""`dlite-agent run -- COMMAND`: the command finds a server, and its status is ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlite_agent.cli.main import main
from dlite_agent.cli.run import variables
from dlite_agent.config import child_environment
from dlite_agent.testing import ScriptedEngine

ASK = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "Hi."}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))
with open(sys.argv[1], "w") as file:
    json.dump([answer["choices"][0]["message"]["content"], sys.argv[2:]], file)
sys.exit(7)
"""


class _Scripted(ScriptedEngine):
    """Stands for an engine of its own, with nothing to load."""

    def __init__(self, config: object) -> None:
        super().__init__(["Yes."], model_name="nano")

    def load(self, progress: object = None) -> None:
        pass

    def __enter__(self) -> _Scripted:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def test_the_command_finds_the_server_and_its_status_is_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlite_agent.engine.engine.Engine", _Scripted)
    said = tmp_path / "said.json"
    command = [sys.executable, "-c", ASK, str(said), "--flag", "--", "-x"]
    assert main(["run", "--max-model-len", "2048", "--", *command]) == 7
    assert json.loads(said.read_text(encoding="utf-8")) == ["Yes.", ["--flag", "--", "-x"]]
    assert "serving nano on http://127.0.0.1:" in capsys.readouterr().err


def test_a_command_that_is_killed_has_a_shells_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlite_agent.engine.engine.Engine", _Scripted)
    assert main(["run", "--", "sh", "-c", "kill -9 $$"]) == 128 + signal.SIGKILL


def test_a_command_that_cannot_be_run_is_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlite_agent.engine.engine.Engine", None)
    assert main(["run", "--", "no-such-command-anywhere"]) == 127
    assert "no command 'no-such-command-anywhere'" in capsys.readouterr().err
    plain = tmp_path / "plain"
    plain.write_text("text")
    assert main(["run", "--", str(plain)]) == 126
    assert "chmod +x" in capsys.readouterr().err


def test_a_script_without_an_interpreter_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlite_agent.engine.engine.Engine", _Scripted)
    script = tmp_path / "script"
    script.write_text("echo")
    script.chmod(0o755)
    handler = signal.getsignal(signal.SIGTERM)
    assert main(["run", str(script)]) == 126
    assert "cannot be run" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler


def test_options_behind_the_command_are_the_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dlite_agent.engine.engine.Engine", _Scripted)
    said = tmp_path / "said"
    script = f'echo "$0 $*" > {said}'
    assert (
        main(["run", "--max-queue", "3", "sh", "-c", script, "a", "--model", "x", "--", "-v"]) == 0
    )
    assert said.read_text() == "a --model x -- -v\n"


def test_no_proxy_stands_between_the_command_and_its_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("dlite_agent.engine.engine.Engine", _Scripted)
    said = tmp_path / "said.json"
    assert main(["run", "--", sys.executable, "-c", ASK, str(said)]) == 7
    for given, made in (
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "a,b"}, "a,b,127.0.0.1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,127.0.0.1"),
        ({"NO_PROXY": "*"}, "*"),
    ):
        environment = child_environment({"A": "1"}, "127.0.0.1", given)
        assert environment == {"A": "1", "no_proxy": made, "NO_PROXY": made}


@pytest.mark.parametrize("name", ["TERM", "HUP"])
def test_a_signal_reaches_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlite_agent.engine.engine.Engine", _Scripted)
    number = signal.Signals[f"SIG{name}"]
    handler = signal.getsignal(number)
    # The command asks us to end, and waits for what we make of it.
    script = f"trap 'exit 9' {name}; kill -{name} {os.getpid()}; while :; do sleep 0.01; done"
    assert main(["run", "--", "sh", "-c", script]) == 9
    assert signal.getsignal(number) == handler


def test_variables_name_one_server_and_one_model() -> None:
    given = variables("http://127.0.0.1:1/v1", "nano")
    assert {value for name, value in given.items() if name.endswith(("_BASE", "_URL"))} == {
        "http://127.0.0.1:1/v1"
    }
    models = {value for name, value in given.items() if name.endswith("MODEL")}
    assert models == {"nano", "openai/nano", "hosted_vllm/nano"}


def test_a_command_is_demanded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--"])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.soak  # a process with a model of its own
def test_nano_answers_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlite_agent.cli.main", "run", "--", "sh", "-c", "echo $LLM_MODEL"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "hosted_vllm/nano"
