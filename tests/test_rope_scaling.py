"""What may be said about rope scaling, in which spellings, and how the rest is refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from dlite_agent.errors import ConfigurationError
from dlite_agent.rope_scaling import RopeScaling

YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32_768}


def test_both_spellings_and_json_are_the_same() -> None:
    wanted = RopeScaling("yarn", 4.0, 32_768)
    for given in (
        {"rope_type": "yarn"} | YARN,
        {"type": "yarn"} | YARN,
        {"type": "yarn", "rope_type": "yarn", "mscale": None} | YARN,
        json.dumps({"type": "yarn"} | YARN),
        wanted,
    ):
        assert RopeScaling.parse(given) == wanted


def test_newer_spelling_wins() -> None:
    given = {"type": "linear", "rope_type": "yarn"} | YARN
    assert RopeScaling.parse(given).rope_type == "yarn"


def test_it_is_a_value() -> None:
    scaling = RopeScaling.parse({"type": "yarn"} | YARN)
    assert {scaling: 1}[RopeScaling.parse({"rope_type": "yarn"} | YARN)] == 1
    assert pickle.loads(pickle.dumps(scaling)) == scaling
    assert scaling.to_json() != RopeScaling().to_json()
    assert str(scaling) == "yarn factor=4.0 original_max_position_embeddings=32768"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported: its frequencies change"),
        ({"type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ({"type": "mrope", "factor": 2.0}, "'mrope' is not supported: its positions"),
        ({"rope_type": "spiral", "factor": 2.0}, "'spiral' is not supported; use 'default'"),
        ({}, "None is not supported; use 'default'"),
        ({"factor": 2.0}, "None is not supported"),
        ({"rope_type": ["yarn"], "factor": 2.0}, "not supported"),
        ({"rope_type": "yarn"}, "'yarn' has no factor; name one"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor of rope_scaling is 0.5; use at least 1"),
        ({"rope_type": "yarn", "factor": "4"}, "factor of rope_scaling is '4'; use a number"),
        ({"rope_type": "yarn", "factor": True}, "factor of rope_scaling is True"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor of rope_scaling is nan"),
        ({"rope_type": "yarn", "factor": float("inf")}, "factor of rope_scaling is inf"),
        ({"rope_type": "yarn", "factor": 2.0, "fcator": 1}, "'fcator' is no field of rope_scaling"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096.5},
            "is 4096.5; use a whole number",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate of rope_scaling is 1"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1}, "must be the larger"),
        ({"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 1.0}, "must be the larger"),
        ("yarn", "'yarn', which is no JSON"),
        ("4", "rope_scaling is 4; use a mapping"),
        (7, "rope_scaling is 7; use a mapping"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RopeScaling.parse(given)
