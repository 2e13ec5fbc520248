"""vLLM's flags: what each value becomes, and how what cannot be honoured is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.cli.vllm_flags import (
    check_kv_cache_dtype,
    origins,
    sampling_defaults,
    speculation,
)
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.engine import Engine
from dlite_agent.errors import ConfigurationError
from tests.tiny_checkpoint import write_checkpoint


@pytest.mark.parametrize(
    ("given", "drafter", "count"),
    [
        ('{"model": "a/b", "num_speculative_tokens": 5}', "a/b", 5),
        ('{"model": "a/b", "method": "eagle3"}', "a/b", None),
        ('{"method": "suffix", "num_speculative_tokens": 32}', "suffix", 32),
        ('{"method": "ngram"}', "lookup", None),
        ('{"num_speculative_tokens": 3}', None, 3),
    ],
)
def test_a_speculation_is_a_drafter_and_a_limit(
    given: str, drafter: str | None, count: int | None
) -> None:
    assert speculation(given) == (drafter, count)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "it names nothing"),
        ("{}", "it names nothing"),
        ('{"method": "medusa"}', "method is 'medusa'"),
        ('{"method": ["suffix"]}', "method is ['suffix']"),
        ('{"method": "draft_model", "model": "a/b"}', "a model drafts by one of"),
        ('{"model": 3}', "model is 3 and no text"),
        ('{"model": "a/b", "draft_tensor_parallel_size": 2}', "'draft_tensor_parallel_size' is"),
        ('{"method": "suffix", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "suffix", "num_speculative_tokens": true}', "num_speculative_tokens is True"),
    ],
)
def test_a_speculation_that_cannot_be_had_is_refused_by_name(given: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)) as caught:
        speculation(given)
    assert str(caught.value).startswith("--speculative-config is ")


def test_keys_and_values_have_the_type_of_the_weights() -> None:
    for given, dtype in (("auto", "auto"), ("auto", "float32"), ("bfloat16", "bfloat16")):
        check_kv_cache_dtype(given, EngineConfig(dtype=dtype))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="use --dtype bfloat16 as well, or leave it out"):
        check_kv_cache_dtype("bfloat16", EngineConfig(dtype="float32"))
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype is 'fp8' .*; leave it out"):
        check_kv_cache_dtype("fp8", EngineConfig())


def test_web_sites_are_a_list() -> None:
    assert origins(None) == ()
    assert origins('["https://a.example", "*"]') == ("https://a.example", "*")
    for given in ("https://a.example", '{"a": 1}', "[3]"):
        with pytest.raises(ConfigurationError, match=r"--allowed-origins is .*; send a JSON list"):
            origins(given)


def test_a_folder_says_what_a_request_leaves_open(tmp_path: Path) -> None:
    assert sampling_defaults("auto") is None
    neutral = sampling_defaults("vllm")
    assert neutral is not None
    assert (neutral.temperature, neutral.top_k, neutral.stop_token_ids) == (1.0, 0, ())
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [5, 7]}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    assert sampling_defaults(str(tmp_path)) == SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        stop_token_ids=(5, 7),
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory; name a folder"),
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
        ('{"eos_token_id": "x"}', "eos_token_id='x' is neither"),
        ('{"do_sample": true, "top_p": 2}', "top_p is 2.0"),
    ],
)
def test_a_folder_without_a_sound_file_is_named(
    tmp_path: Path, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=re.escape(why)) as caught:
        sampling_defaults(str(tmp_path))
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_no_round_commits_more_than_the_limit_and_its_own_token(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path, max_positions=512))
    config = EngineConfig(folder, "suffix", max_draft_tokens=2, dtype="float64", idle=False)
    sampling = SamplingParams(temperature=0, max_tokens=64, logit_bias={7: 100.0})  # 7, 7, 7, ...
    with Engine(config) as engine:
        chunks = list(engine.stream(ChatRequest((), prompt=(5, 6, 7), sampling=sampling)))
    assert max(len(chunk.token_ids) for chunk in chunks) == 3
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [7] * 64
