"""The chat: pipes, a terminal, Ctrl-C in the middle of a turn, and errors that end nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.cli.chat import converse
from dlite_agent.cli.chat_screen import status_line
from dlite_agent.cli.conversation import Conversation
from dlite_agent.cli.main import main
from dlite_agent.config import SamplingParams
from dlite_agent.errors import CapacityError, ContextLengthExceededError, ModelNotFoundError
from dlite_agent.outputs import GenerationChunk, TurnStats
from dlite_agent.testing import ScriptedEngine
from tests.cli.scripted import call
from tests.tiny_checkpoint import write_checkpoint

CTRL_C, CTRL_D = b"\x03", b"\x04"
STYLES = re.compile("\x1b\\[[0-9;]*m")
CHAT = [sys.executable, "-m", "dlite_agent.cli.main", "chat"]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return give


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=256)


class Interrupted(ScriptedEngine):
    """Ctrl-C arrives after some rounds of the first turn."""

    rounds = 3

    def stream(self, request: ChatRequest) -> Iterator[GenerationChunk]:
        is_first = not self.requests
        for number, chunk in enumerate(super().stream(request)):
            if is_first and number == self.rounds:
                raise KeyboardInterrupt
            yield chunk


def roles(request: ChatRequest) -> list[str]:
    return [message.role for message in request.messages]


def test_piped_lines_are_answered_in_one_conversation(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(["Hello.", "<think>\nHm.\n</think>\n\nFine."])
    say("Hi.", "", "   ", "How are you?")
    converse(Conversation(engine, SamplingParams(seed=3), system="Be brief."))
    shown = capsys.readouterr()
    assert shown.out.startswith("Hello.\n")
    assert shown.out.endswith("Fine.\n")
    assert "\nHm.\nFine." in shown.out, "a thought is not the answer's first words"
    assert "\x1b" not in shown.out
    assert shown.err == ""
    assert roles(engine.requests[1]) == ["system", "user", "assistant", "user"]
    assert engine.requests[1].messages[2].content == "Hello."
    assert engine.requests[1].sampling.seed == 3


def test_json_is_one_object_a_turn(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(["One.", CapacityError("full; try again"), "Two."])
    say("a", "b", "c")
    converse(Conversation(engine, as_json=True))
    one, error, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["content"] == "One."
    assert one["finish_reason"] == "stop"
    assert one["stats"]["prompt_tokens"] > 0
    assert error == {"error": {"code": "capacity", "message": "full; try again"}}
    assert two["content"] == "Two."


def test_an_error_of_a_turn_forgets_its_line_and_the_chat_goes_on(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine([ContextLengthExceededError(900, 1, 256), "Yes."])
    say("a very long line", "short?")
    converse(Conversation(engine))
    shown = capsys.readouterr()
    assert shown.out == "Yes.\n"
    assert "shorten the history" in shown.err
    assert [m.content for m in engine.requests[1].messages] == ["short?"]


@pytest.mark.parametrize("as_json", [True, False])
def test_the_status_is_an_error_when_no_line_was_answered(
    as_json: bool, say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    long, full = ContextLengthExceededError(900, 1, 256), CapacityError("full; try again")
    for turns, status in (
        ([full, long], 2),
        ([long, full], 3),
        ([long, "Yes."], 0),
        (["Yes.", long], 0),
        ([], 0),
    ):
        say(*"ab"[: len(turns)])
        assert converse(Conversation(ScriptedEngine(turns), as_json=as_json)) == status


def test_an_error_of_the_model_ends_the_chat(say: Callable[..., None]) -> None:
    say("a", "b")
    with pytest.raises(ModelNotFoundError):
        converse(Conversation(ScriptedEngine([ModelNotFoundError("gone; look for it")])))


def test_new_begins_another_conversation(say: Callable[..., None]) -> None:
    engine = ScriptedEngine(["1", "2"])
    say("a", "/new", "b")
    converse(Conversation(engine, system="S"))
    assert roles(engine.requests[1]) == ["system", "user"]


def test_ctrl_c_keeps_what_was_written_and_the_next_turn_follows_it(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Interrupted(["A long answer that is stopped.", "Next."])
    say("a", "b")
    converse(Conversation(engine))
    assert capsys.readouterr().out == "A long answe [stopped]\nNext.\n"
    assert engine.requests[1].messages[1] == Message("assistant", "A long answe")
    assert engine.num_cancelled == 1


def test_ctrl_c_before_any_text_forgets_the_line(
    say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Interrupted(["<think>\nVery long.\n</think>\n\nYes.", "Next."])
    say("a", "b")
    converse(Conversation(engine, as_json=True))
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first == {
        "content": "",
        "finish_reason": "cancelled",
        "tool_calls": [],
        "unparsed": [],
        "stats": None,
    }
    assert roles(engine.requests[1]) == ["user"]


def test_ctrl_c_while_a_pipe_is_read_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Broken())
    with pytest.raises(KeyboardInterrupt):
        converse(Conversation(ScriptedEngine([])))


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        ("<&-", 0, ""),
        (">&- < <(echo a; echo b)", 0, ""),
        ("< <(echo a; echo b) | head -1", 141, "One.\n"),
        ("2>&- < <(echo a; echo b)", 0, "One.\nTwo.\n"),
    ],
)
def test_streams_that_are_closed_end_the_chat_quietly(words: str, status: int, shown: str) -> None:
    code = (
        "import sys\n"
        "from dlite_agent.cli import chat, main\n"
        "from dlite_agent.cli.conversation import Conversation\n"
        "from dlite_agent.testing import ScriptedEngine\n"
        "engine = ScriptedEngine(['One.', 'Two.'], round_s=0.2)\n"
        "chat.run = lambda arguments: chat.converse(Conversation(engine))\n"
        "sys.exit(main.main(['chat']))"
    )
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {words}', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, shown, "")


def test_a_status_line_has_the_figures_of_a_turn() -> None:
    stats = TurnStats(
        prompt_tokens=90, cached_tokens=80, prefilled_tokens=10, completion_tokens=31, rounds=10
    )
    assert status_line(stats) == (
        "90 prompt tokens, 80 cached, 10 prefilled · 31 written, τ 3.00, 0 tok/s"
    )


def test_a_real_model_refuses_a_long_line_and_answers_the_next(
    folder: Path, say: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    say("x" * 300, "hello", "again")
    options = ["--dtype", "float32", "--max-tokens", "5", "--temperature", "0", "--json"]
    assert main(["chat", str(folder), *options]) == 0, "two lines were answered"
    shown = capsys.readouterr()
    refused, first, second = map(json.loads, shown.out.splitlines())
    assert refused["error"]["code"] == "context_length_exceeded"
    assert first["stats"]["completion_tokens"] <= 5
    assert second["stats"]["cached_tokens"] > 0
    assert shown.err == ""


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, *arguments: str, command: Sequence[str] = CHAT) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_own_the_terminal,
        )
        os.close(slave)
        self.shown = ""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def interrupt(self, answer: str) -> None:
        """Press Ctrl-C at the prompt until it is heard.

        One that comes between the prompt and the read is noticed by Python after the read only.
        """
        for _ in range(20):
            self.type(CTRL_C)
            with contextlib.suppress(AssertionError):
                return self.wait_for(answer, seconds=3.0)
        raise AssertionError(f"{answer!r} never came, but: {self.shown!r}")

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Read until `text` is shown, and forget all up to it."""
        ends = time.perf_counter() + seconds
        while text not in self.shown:
            left = ends - time.perf_counter()
            assert left > 0, f"{text!r} never came, but: {self.shown!r}"
            if select.select([self._master], [], [], left)[0]:
                self.shown += os.read(self._master, 4096).decode("utf-8", "replace")
                self.shown = STYLES.sub("", self.shown)
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _own_the_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def write_endless_checkpoint(folder: Path) -> Path:
    """A model that, decoding greedily, writes bytes and never a control token."""
    write_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][256:] = 0.0
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ctrl_c_in_a_turn_then_another_turn_then_ctrl_d(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The whole command on a real terminal, with a model that goes on for thousands of tokens."""
    folder = write_endless_checkpoint(tmp_path_factory.mktemp("endless"))
    terminal = Terminal(str(folder), "--dtype", "float64", "--temperature", "0")
    with contextlib.closing(terminal):
        terminal.wait_for("Ctrl-D the conversation")
        terminal.wait_for("> ")
        terminal.interrupt("Ctrl-C ends an answer")
        for line in (b"go on\n", b"and on\n"):
            terminal.type(line)
            terminal.wait_for("\n")
            time.sleep(0.5)
            terminal.type(CTRL_C)
            terminal.wait_for("[stopped]")
            terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(timeout=30) == 0


# The chat of the command line, with tools, on a script instead of a model.
SCRIPTED = """
import json, sys
from dlite_agent.cli.main import main
from dlite_agent.engine import engine
from dlite_agent.testing import ScriptedEngine


class Scripted(ScriptedEngine):
    def __init__(self, config):
        super().__init__(json.loads(sys.argv[1]))

    def load(self, progress):
        return type("Info", (), dict(
            model="scripted", dtype="float32", device="cpu", max_context=100, drafter="null"))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


engine.Engine = Scripted
sys.exit(main(["chat", *sys.argv[2:]]))
"""


def scripted(turns: list[str], *options: str) -> list[str]:
    return [sys.executable, "-c", SCRIPTED, json.dumps(turns), *options]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_person_is_asked_and_ctrl_c_ends_a_tool(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old\n")
    turns = [
        call("read_file", path="a") + call("edit_file", path="a", old="old", new="new"),
        call("run_command", command="echo $$ > child; echo begun; exec sleep 1000"),
        "You are back.",
    ]
    options = ["--root", str(tmp_path), "--tools", "files,shell"]
    terminal = Terminal(command=scripted(turns, *options))
    with contextlib.closing(terminal):
        terminal.wait_for("Ctrl-D the conversation")
        terminal.wait_for("> ")
        terminal.type(b"go\n")
        terminal.wait_for("- old")
        terminal.wait_for("allow it? [y]es, [n]o, [a]lways: ")
        assert (tmp_path / "a").read_text() == "old\n"
        terminal.type(b"y\n")
        terminal.wait_for("Edited a")
        terminal.wait_for("$ echo $$ > child; echo begun; exec sleep 1000")
        terminal.wait_for("lways: ")
        terminal.type(b"y\n")
        child = wait_for_number(tmp_path / "child")
        terminal.type(CTRL_C)
        terminal.wait_for("[stopped]")
        terminal.wait_for("> ")
        assert not is_alive(child)
        terminal.type(b"and?\n")
        terminal.wait_for("You are back.")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(timeout=30) == 0
    assert (tmp_path / "a").read_text() == "new\n"


def test_sigterm_ends_the_tool_too(tmp_path: Path) -> None:
    turns = [call("run_command", command="echo $$ > child; exec sleep 1000")]
    command = scripted(turns, "--root", str(tmp_path), "--tools", "shell", "--yes")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        child = wait_for_number(tmp_path / "child")
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert not is_alive(child)


def test_a_terminal_without_utf8_and_colours_gets_neither(tmp_path: Path) -> None:
    turns = ["é → " + call("list_files"), "Ok."]
    command = scripted(turns, "--root", str(tmp_path))
    plain = {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        command, input=b"\xff?\n", capture_output=True, env=os.environ | plain, timeout=60
    )
    assert done.stdout == b"\\xe9 \\u2192 \n* list_files()\n  (no files)\nOk.\n"
    assert (done.returncode, done.stderr) == (0, b"")


def wait_for_number(path: Path) -> int:
    """The number that a program writes into a file, once it has."""
    ends = time.perf_counter() + 60.0
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.perf_counter() < ends, f"{path.name} was never written"
        time.sleep(0.01)
    return int(path.read_text())


def is_alive(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()
