"""An engine behind a server answers as it does here, and refuses in the same words."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from dlite_agent import errors
from dlite_agent.backend import ChatRequest
from dlite_agent.chat.delta_merge import merge_deltas
from dlite_agent.chat.messages import Message, TextDelta, ToolCall, ToolSpec
from dlite_agent.chat.miss import Miss
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.client.answer_reader import AnswerReader, turn_stats
from dlite_agent.client.remote_engine import RemoteEngine
from dlite_agent.client.remote_errors import pause_s
from dlite_agent.config import SamplingParams
from dlite_agent.outputs import Generation, GenerationChunk, TurnStats, turn_figures
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

ROOT = Path(__file__).parents[2]
TURN = (
    "<think>\nHm.\n</think>\n\nI look: é."
    '<tool_call>\n{"name": "read", "arguments": {"path": "é.py"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "test", "arguments": {}}\n</tool_call>\n'
    "<tool_call>\n{no call}\n</tool_call>"
)
TOOLS = (
    ToolSpec("read", "Read a file.", {"type": "object"}, strict=True),
    ToolSpec("test", parameters={"type": "object"}),
)
ASK = ChatRequest((Message("user", "Hi."),), tools=TOOLS)
FOREVER_S = 3600.0  # a round that no test waits for


@dataclass
class Counter:
    """A proxy that counts the connections through it."""

    url: str
    num_opened: int = 0
    num_open: int = 0


@contextmanager
def counting(url: str) -> Iterator[Counter]:
    """Pass bytes on to a server, in threads."""
    target = httpx.URL(url)
    listener = socket.create_server(("127.0.0.1", 0))
    counter = Counter(f"http://127.0.0.1:{listener.getsockname()[1]}")
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def connect(client: socket.socket) -> None:
        with client, socket.create_connection((target.host, target.port or 0)) as server:
            back = threading.Thread(target=pump, args=(server, client))
            back.start()
            pump(client, server)
            counter.num_open -= 1
            back.join(60)

    def accept() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = listener.accept()
                counter.num_opened += 1
                counter.num_open += 1
                threads.append(threading.Thread(target=connect, args=(client,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield counter
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (accepting, *threads):
            thread.join(60)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do; the test's own time limit ends it."""
    pause = threading.Event()
    while not is_so():
        pause.wait(0.005)


def told(chunks: list[GenerationChunk]) -> object:
    """What a stream says, however it is cut into chunks."""
    deltas = merge_deltas(delta for chunk in chunks for delta in chunk.deltas)
    ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    logprobs = [token for chunk in chunks for token in chunk.logprobs]
    return deltas, ids, logprobs, chunks[-1].generation, chunks[-1].finish_reason


async def test_an_answer_is_the_one_that_the_engine_gives_here() -> None:
    request = replace(ASK, sampling=SamplingParams(logprobs=True), stop=("never",))
    here = list(ScriptedEngine([TURN]).stream(request))
    with (
        live_server(ScriptedEngine([TURN] * 3)) as server,
        RemoteEngine(server.base_url) as engine,
    ):
        there = list(engine.stream(request))
        assert told(there) == told(here)
        again = [chunk async for chunk in engine.astream(request)]
        assert again[-1].generation is not None
        assert again[-1].generation.message.content == "I look: é."
        answer = await engine.agenerate(request)
    assert [call.name for call in answer.message.tool_calls] == ["read", "test"]
    assert answer.message.tool_calls[0].arguments == {"path": "é.py"}
    assert answer.unparsed[0].text == "{no call}"
    assert answer.stats.cached_tokens == answer.stats.prompt_tokens - 1


def test_every_field_of_a_request_arrives() -> None:
    backend = ScriptedEngine(["Yes.", "No.", "Yes."])
    history = (
        Message("system", "Be kind."),
        Message("user", "Hi."),
        Message("assistant", "", "Hm.", (ToolCall("read", {"path": "a"}, "call_1"),), turn="h1"),
        Message("tool", "A", tool_call_id="call_1", name="read"),
    )
    request = ChatRequest(
        history,
        tools=TOOLS,
        sampling=SamplingParams(
            temperature=0.5,
            top_k=7,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            logit_bias={5: 2.0},
            max_tokens=9,
            seed=2**63 + 1,
            choice_index=3,
            stop_token_ids=(17,),
            logprobs=True,
            top_logprobs=2,
            thinking_budget=4,
        ),
        session_hint="spät",
        template_kwargs={"enable_thinking": False},
        history="as_generated",
        stop=("END",),
        output=OutputRules(
            ToolChoice("auto", ("test",)),
            parallel_tool_calls=False,
            answer=AnswerFormat({"type": "object"}, strict=False),
            closes_calls=True,
        ),
        num_choices=2,
        when_full="wait",
    )
    with live_server(backend) as server, RemoteEngine(server.url) as engine:
        answers = engine.generate_choices(request)
        assert [answer.message.content for answer in answers] == ["Yes.", "No."]
        engine.generate(replace(ASK, tenant="mine", output=OutputRules(ToolChoice("required"))))
    seen, other = backend.requests[0], backend.requests[2]
    assert seen == request
    assert other.output == OutputRules(ToolChoice("required"))
    assert other.tenant not in ("", "mine")  # a name of the server's own, of key and salt


@pytest.mark.parametrize(
    "raised",
    [
        errors.ContextLengthExceededError(41_203, 1_024, 40_960),
        errors.UnsupportedParameterError("tools is 3; send tools"),
        errors.SessionNotFoundError("no session 'x'"),
        errors.SessionBusyError("busy"),
        errors.CapacityError("the KV budget is full"),
    ],
)
def test_a_refusal_is_the_error_that_the_engine_raises_here(raised: errors.DLiteError) -> None:
    with (
        live_server(ScriptedEngine([raised])) as server,
        RemoteEngine(server.url) as engine,
        pytest.raises(type(raised)) as caught,
    ):
        engine.generate(ASK)
    assert vars(caught.value).get("limit") == vars(raised).get("limit")
    if not isinstance(raised, errors.ContextLengthExceededError):
        assert str(caught.value) == str(raised)


def test_a_key_and_a_model_that_are_wrong_are_named() -> None:
    settings = ServerSettings(model_names=("served",), api_keys=("secret",))
    with live_server(ScriptedEngine(["Yes."]), settings) as server:
        with RemoteEngine(server.url, api_key="secret") as engine:
            assert (engine.model_name, engine.max_context) == ("served", 32_768)
            assert engine.generate(ASK).message.content == "Yes."
        with (
            RemoteEngine(server.url, api_key="other") as stranger,
            pytest.raises(errors.ConfigurationError, match="Incorrect API key"),
        ):
            stranger.generate(ASK)
        with RemoteEngine(server.url, api_key="secret", model="none") as lost:
            with pytest.raises(errors.ModelNotFoundError, match="'none'"):
                lost.generate(ASK)
            with pytest.raises(errors.ModelNotFoundError, match="it has 'served'"):
                _ = lost.max_context


def test_no_server_is_an_error_that_says_what_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        RemoteEngine(f"http://127.0.0.1:{port}") as engine,
        pytest.raises(errors.CapacityError, match="dlite-agent serve"),
    ):
        engine.generate(ASK)


def test_turns_share_connections_and_none_is_left_open(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Those of an event loop are closed with it, or with the engine, whatever is first."""
    with live_server(ScriptedEngine(["Yes."] * 9)) as server, counting(server.url) as counter:
        engine = RemoteEngine(counter.url)

        async def turns(count: int) -> None:
            for _ in range(count):
                assert (await engine.agenerate(ASK)).message.content == "Yes."

        asyncio.run(turns(3))
        assert counter.num_opened == 1
        wait_until(lambda: counter.num_open == 0)
        asyncio.run(turns(2))
        assert counter.num_opened == 2
        for _ in range(2):
            engine.generate(ASK)
        assert counter.num_opened == 3

        async def closed_inside() -> None:
            await turns(2)
            engine.close()

        asyncio.run(closed_inside())
        wait_until(lambda: counter.num_open == 0)
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


def test_closing_a_stream_ends_the_turn_on_the_server() -> None:
    backend = ScriptedEngine(["Yes. " * 10_000], round_s=0.01)  # minutes, if nobody ends it
    with live_server(backend) as server, RemoteEngine(server.url) as engine:
        chunks = engine.stream(ASK)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]  # a generator
        wait_until(lambda: backend.num_cancelled == 1)


async def test_cancelling_a_task_ends_the_turn_on_the_server() -> None:
    backend = ScriptedEngine(["Yes."], round_s=FOREVER_S)
    with live_server(backend) as server, RemoteEngine(server.url) as engine:
        task = asyncio.ensure_future(engine.agenerate(ASK))
        while not backend.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: backend.num_cancelled == 1)


def test_a_full_server_is_waited_for_where_the_request_says_so() -> None:
    backend = ScriptedEngine(["Yes. " * 10_000, "No."], round_s=0.01)
    settings = ServerSettings(max_running=1, max_queue=0)
    with live_server(backend, settings) as server, RemoteEngine(server.url) as engine:
        first = engine.stream(ASK)
        next(first)
        with pytest.raises(errors.CapacityError, match="try again later"):
            engine.generate(ASK)
        answers: list[str] = []
        waiting = replace(ASK, when_full="wait")
        thread = threading.Thread(
            target=lambda: answers.append(engine.generate(waiting).message.content)
        )
        thread.start()
        first.close()  # type: ignore[attr-defined]  # a generator
        thread.join(60)
    assert answers == ["No."]


def test_a_client_loads_no_tensor_library() -> None:
    code = (
        "import sys\n"
        "from dlite_agent import ChatRequest, Message, RemoteEngine\n"
        "with RemoteEngine(sys.argv[1]) as engine:\n"
        "    answer = engine.generate(ChatRequest((Message('user', 'Hi.'),)))\n"
        "heavy = ('torch', 'transformers', 'litellm', 'langchain_core', 'fastapi')\n"
        "print(answer.message.content, [name for name in heavy if name in sys.modules])"
    )
    with live_server(ScriptedEngine(["Yes."])) as server:
        command = [sys.executable, "-c", code, server.url]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Yes. []"


def test_a_server_of_another_kind_is_named() -> None:
    reader = AnswerReader()
    choice = {"index": 0, "delta": {"content": "Yes."}, "finish_reason": None}
    (chunk,) = reader.read("data: " + json.dumps({"choices": [choice]}))
    assert chunk.deltas == (TextDelta("Yes."),)
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    with pytest.raises(errors.ConfigurationError, match="no dlite-agent server"):
        list(reader.read("data: " + json.dumps({"choices": [end]})))
    refused = httpx.Response(502, text="<h1>Bad gateway</h1>")
    with pytest.raises(errors.DLiteError, match="answered 502: '<h1>Bad gateway"):
        pause_s(refused, waits=True)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
                connection.sendall(head + b": keep-alive\n\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            RemoteEngine(f"http://127.0.0.1:{port}") as engine,
            pytest.raises(errors.CapacityError, match="in the middle of an answer"),
        ):
            engine.generate(ASK)
        thread.join(60)


def test_a_turns_figures_come_back_as_they_were() -> None:
    miss = Miss("message_edited", 3, 120, "was", "now", "send it back", ("ids renamed",))
    stats = TurnStats(
        "s1", prompt_tokens=9, drafted_by={"suffix": 3}, replayed=("generated",), miss=miss
    )
    answer = Generation(Message("assistant", "Yes."), "stop", stats)
    assert turn_stats({**turn_figures(answer), "of_a_newer_server": 1}) == stats
