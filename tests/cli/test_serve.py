"""`dlite-agent serve`: what its flags mean, and a stop in the middle of an answer."""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlite_agent.cli import serve
from dlite_agent.cli.main import main
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError, ModelNotFoundError
from dlite_agent.serving.server import open_listener
from dlite_agent.serving.server import serve as run_server
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.sessions.disk_folder import saved_folders
from dlite_agent.testing import ScriptedEngine
from tests.tiny_checkpoint import control_id, write_checkpoint

LIMIT_S = 60.0
NUM_STREAMS = 3


def config(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.engine_config(parser.parse_args(argv))


def test_flags_are_spelled_as_vllm_spells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_MAX_QUEUE", "3")
    flags = "--max-model-len 100 --dtype float32 --kv-cache-dtype auto --max-num-seqs 2"
    made = config("folder", *flags.split(), "--kv-disk", "auto")
    assert (made.model, made.isolation, made.kv_disk) == ("folder", "process", "auto")
    assert (made.max_context, made.dtype, made.max_batch, made.max_queue) == (100, "float32", 2, 3)
    assert config().drafter == "auto"
    made = config("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')
    assert (made.drafter, made.max_draft_tokens) == ("lookup", 5)
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype is 'bfloat16'"):
        config("--kv-cache-dtype", "bfloat16", "--dtype", "float32")


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"port {port} of '127.0.0.1' cannot be opened" in capsys.readouterr().err
    assert main(["serve", "--port", "70000"]) == 2


def test_a_server_without_a_key_that_others_reach_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["serve", "--host", "0.0.0.0", "--port", "70000"])
    assert "--api-key" in capsys.readouterr().err
    main(["serve", "--host", "localhost", "--port", "70000"])
    assert "--api-key" not in capsys.readouterr().err


def test_a_signal_under_load_ends_streams_cleanly_and_saves_their_sessions(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "model", max_positions=65_536)
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "dlite_agent.cli.main", "serve", str(folder)]
    flags = ["--port", "0", "--shutdown-timeout", "0", "--dtype", "float64", "--kv-disk", str(kept)]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = re.search(r"http://\S+", process.stderr.readline())
        assert url is not None
        assert "tokens of context" in process.stderr.readline()
        # The answer cannot end by itself: no token that would end it, and 65,000 of others.
        stops = (control_id("<|im_end|>"), control_id("<|endoftext|>"))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hi"}],
            "logit_bias": {str(token_id): -100 for token_id in stops},
            "stream": True,
        }
        asked = httpx.post(f"{url[0][:-3]}/tokenize", json={"prompt": "abc"}, verify=False)
        assert asked.json()["count"] == 3  # questions cross to the model's process, too
        endpoint = f"{url[0]}/chat/completions"
        with ExitStack() as stack:
            streams = []
            for seed in range(NUM_STREAMS):
                stream = httpx.stream(
                    "POST", endpoint, json={**body, "seed": seed}, timeout=LIMIT_S, verify=False
                )
                answer = stack.enter_context(stream)
                assert answer.status_code == 200
                streams.append(answer.iter_lines())
                next(line for line in streams[-1] if '"content":"' in line and '"role"' not in line)
            process.terminate()
            ends = [[line for line in lines if line.startswith("data: ")] for lines in streams]
        rest = process.communicate(timeout=LIMIT_S)[1]
    for *_, error, done in ends:
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
    assert process.returncode == 0, rest
    assert "sessions are saved" in rest
    saved = list(saved_folders(kept))
    assert len(saved) == NUM_STREAMS
    assert all(len(folder.kept.trail) > 0 for folder in saved)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    class Missing(ScriptedEngine):
        @property
        def max_context(self) -> int:  # type: ignore[override]
            raise ModelNotFoundError("no such model")

        @max_context.setter
        def max_context(self, value: int) -> None:
            pass

    with pytest.raises(ModelNotFoundError, match="no such model"):
        run_server(Missing([]), ServerSettings(), open_listener("127.0.0.1", 0))


def test_an_address_of_the_sixth_version_is_one() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        with open_listener("::1", 0) as listener:
            assert listener.family is socket.AF_INET6
    except ConfigurationError:
        pytest.skip("this machine has no IPv6 loopback")


@pytest.mark.parametrize("command", [["serve"], ["run", "--", "true"]])
def test_a_missing_package_of_the_server_is_told_with_its_extra(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dlite_agent.serving.server", None)
    assert main(command) == 2
    told = (
        f'{command[0]} needs the package .*; install it with: pip install "dlite-agent\\[server\\]"'
    )
    assert re.search(told, capsys.readouterr().err)
