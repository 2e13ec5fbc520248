"""Options are checked before any work is done, and the environment is read only when asked."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.errors import ConfigurationError
from dlite_agent.rope_scaling import RopeScaling


def test_defaults_are_the_embedded_model_with_sessions() -> None:
    config = EngineConfig()
    assert (config.model, config.reuse, config.isolation) == ("nano", "session", "thread")


def test_configs_are_frozen_and_hashable() -> None:
    config = EngineConfig(model="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = "y"  # type: ignore[misc]  # the point of the test
    assert hash(config) == hash(EngineConfig(model="x"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("quantize", "int4"),
        ("history", "raw"),
        ("reuse", "maybe"),
        ("isolation", "container"),
        ("max_context", 0),
        ("max_kv_bytes", -1),
        ("prefill_chunk", 0),
        ("threads", 0),
        ("max_queue", 0),
        ("max_context", "4096"),
        ("max_kv_bytes", 1e9),
        ("reproducible", "yes"),
        ("audit", 1),
        ("model", None),
        ("drafter", 5),
        ("revision", []),
        ("device", b"cpu"),
        ("kv_disk", ["a"]),
        ("kv_disk", "a\0b"),
        ("cache_dir", {}),
        ("max_batch", None),
        ("prefill_chunk", None),
    ],
)
def test_a_wrong_engine_option_names_field_and_value(field: str, value: object) -> None:
    named = re.escape(f"{field} is {value!r}")
    with pytest.raises(ConfigurationError, match=rf"^{named}.*(; use|but must be)"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("min_p", "0.1"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("logit_bias", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", "a"),
        ("logprobs", 5),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", 5),
        ("thinking_budget", -1),
        ("thinking_budget", "low"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", "10"),
        ("max_tokens", 2.5),
        ("temperature", "0.5"),
        ("top_p", "1"),
        ("top_k", 2.5),
        ("seed", "7"),
        ("seed", 0.5),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("choice_index", "a"),
        ("top_logprobs", None),
    ],
)
def test_a_wrong_sampling_parameter_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{field} is {value!r}; use"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("bias", [math.nan, math.inf, -100.5, "1", None])
def test_a_bias_that_is_no_number_in_range_is_named(bias: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^logit_bias\[7\] is .*; use a number in"):
        SamplingParams(logit_bias={7: bias})  # type: ignore[dict-item]  # the point of the test


@pytest.mark.parametrize("key", ["seven", 1.5, None])
def test_a_bias_of_what_is_no_token_id_is_named(key: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^logit_bias has the key .*; use token ids"):
        SamplingParams(logit_bias={key: 1.0})  # type: ignore[dict-item]  # the point of the test


def test_biases_are_the_same_in_any_order_and_with_the_keys_of_json() -> None:
    params = SamplingParams(logit_bias={7: 1, 3: -2.5})
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    same = SamplingParams(logit_bias={"3": -2.5, "7": 1.0})  # type: ignore[dict-item]  # as JSON has it
    assert hash(params) == hash(same)
    assert params == same == SamplingParams(logit_bias=((7, 1.0), (3, -2.5)))


def test_top_k_of_minus_one_keeps_all_as_in_other_servers() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_a_number_of_numpy_is_the_plain_number() -> None:
    params = SamplingParams(seed=np.int64(-3), max_tokens=np.int32(5))  # type: ignore[arg-type]  # the point of the test
    assert (type(params.seed), type(params.max_tokens)) == (int, int)
    assert params == SamplingParams(seed=-3, max_tokens=5)


@pytest.mark.parametrize("value", [Fraction(3, 2), np.float32(1.5), 10**30])
def test_any_real_number_becomes_one_that_torch_computes_with(value: float) -> None:
    params = SamplingParams(temperature=value, repetition_penalty=value)
    assert type(params.temperature) is type(params.repetition_penalty) is float
    assert params.temperature == float(value)


def test_a_number_beyond_all_floats_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^temperature is inf; use 0"):
        SamplingParams(temperature=10**400)


def test_a_path_is_the_text_of_it() -> None:
    folder = Path("some") / "folder"
    config = EngineConfig(model=folder, kv_disk=folder)  # type: ignore[arg-type]  # the point of the test
    assert config == EngineConfig(model=str(folder), kv_disk=str(folder))


def test_unset_sampling_parameters_come_from_the_defaults_and_set_ones_stay() -> None:
    checkpoint = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=3, stop_token_ids=(7,))
    assert params.with_defaults(checkpoint) == SamplingParams(
        temperature=0.0, top_k=20, top_p=0.95, max_tokens=8, seed=3, stop_token_ids=(7,)
    )


def test_the_environment_is_read_and_overrides_win() -> None:
    environ = {
        "DLITE_MODEL": "a",
        "DLITE_MAX_CONTEXT": "4096",
        "DLITE_REUSE": "prefix",
        "HOME": "/",
    }
    config = EngineConfig.from_env(environ, model="b", drafter=None)
    assert config == EngineConfig(model="b", max_context=4096, reuse="prefix")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def test_rope_scaling_is_a_value_whichever_way_it_is_given() -> None:
    given = EngineConfig(rope_scaling=YARN)
    assert given.rope_scaling == RopeScaling("yarn", 4.0, 32_768)
    assert given == EngineConfig(rope_scaling=RopeScaling("yarn", 4.0, 32_768))
    assert given == EngineConfig.from_env({"DLITE_ROPE_SCALING": json.dumps(YARN)})
    assert hash(given) != hash(EngineConfig())
    assert pickle.loads(pickle.dumps(given)) == given


def test_rope_scaling_that_nobody_knows_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigurationError, match="'spiral' is not supported; use 'default'"):
        EngineConfig(rope_scaling={"rope_type": "spiral", "factor": 2.0})


def test_int8_weights_compute_in_bfloat16() -> None:
    assert EngineConfig.from_env({"DLITE_QUANTIZE": "int8"}).quantize == "int8"
    with pytest.raises(ConfigurationError, match="use it with dtype='bfloat16'"):
        EngineConfig(quantize="int8", dtype="float32")


def test_from_env_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_DRAFTER", "lookup")
    assert EngineConfig.from_env().drafter == "lookup"
    assert EngineConfig().drafter == "auto"


def test_every_integer_field_is_parsed_from_the_environment() -> None:
    integers = {
        field.name for field in dataclasses.fields(EngineConfig) if "int" in str(field.type)
    }
    config = EngineConfig.from_env({f"DLITE_{name.upper()}": "7" for name in integers})
    assert {name: getattr(config, name) for name in integers} == dict.fromkeys(integers, 7)


@pytest.mark.parametrize(("raw", "value"), [("1", True), ("TRUE", True), ("no", False)])
def test_a_switch_is_read_from_the_environment(raw: str, value: bool) -> None:
    assert EngineConfig.from_env({"DLITE_REPRODUCIBLE": raw}).reproducible is value


def test_a_variable_that_is_no_switch_is_named() -> None:
    with pytest.raises(ConfigurationError, match="DLITE_AUDIT is 'maybe'; use true or false"):
        EngineConfig.from_env({"DLITE_AUDIT": "maybe"})


def test_auditing_is_reproducible_and_runs_one_turn_at_a_time() -> None:
    config = EngineConfig(audit=True)
    assert config.reproducible
    assert config.max_batch == 1
    assert not EngineConfig().reproducible


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigurationError, match="DLITE_MAX_QUEUE is 'many'; use a whole number"):
        EngineConfig.from_env({"DLITE_MAX_QUEUE": "many"})


def test_an_override_that_is_no_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'models' is not an engine option; known: .*model"
    ):
        EngineConfig.from_env({}, models="x")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/dlite-agent"),
        ({"HOME": "/home/me"}, "/home/me/.cache/dlite-agent"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/dlite-agent"),
        ({}, None),
    ],
)
def test_cache_folder_is_the_users_own(environ: dict[str, str], folder: str | None) -> None:
    expected = None if folder is None else Path(folder)
    assert EngineConfig().cache_folder(environ) == expected


def test_cache_folder_can_be_named_or_turned_off(tmp_path: Path) -> None:
    assert EngineConfig(cache_dir=str(tmp_path)).cache_folder() == tmp_path
    assert EngineConfig(cache_dir="off").cache_folder() is None
    with pytest.raises(ConfigurationError, match="cache_dir"):
        EngineConfig(cache_dir="")
