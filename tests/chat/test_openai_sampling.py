"""OpenAI's sampling fields, and log-probabilities in its form."""

from __future__ import annotations

import pytest

from dlite_agent.chat.logprobs import TokenLogprob, logprobs_to_openai
from dlite_agent.chat.openai_sampling import (
    num_choices_from_openai,
    sampling_from_openai,
    stop_from_openai,
)
from dlite_agent.config import SamplingParams
from dlite_agent.errors import ConfigurationError, UnsupportedParameterError


def test_fields_are_read_and_null_is_absent() -> None:
    body = {
        "model": "nano",
        "messages": [],
        "temperature": 0.2,
        "top_p": None,
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "logit_bias": {"12": -1},
        "presence_penalty": None,
        "logprobs": True,
        "top_logprobs": 3,
        "min_p": 0.1,
        "choice_index": 4,
        "unknown": 1,
    }
    assert sampling_from_openai(body) == SamplingParams(
        temperature=0.2,
        max_tokens=7,
        logit_bias={12: -1.0},
        logprobs=True,
        top_logprobs=3,
        min_p=0.1,
    )
    assert sampling_from_openai({}) == SamplingParams()


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(ConfigurationError, match="frequency_penalty is 7"):
        sampling_from_openai({"frequency_penalty": 7})


@pytest.mark.parametrize(
    ("stop", "wanted"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stop_is_null_a_text_or_a_list(stop: object, wanted: tuple[str, ...]) -> None:
    assert stop_from_openai(stop) == wanted


@pytest.mark.parametrize("stop", [5, ["a", 5], {"a": 1}])
def test_another_stop_is_refused(stop: object) -> None:
    with pytest.raises(UnsupportedParameterError, match="use a text or a list of texts"):
        stop_from_openai(stop)


@pytest.mark.parametrize(("count", "wanted"), [(None, 1), (1, 1), (128, 128)])
def test_n_is_a_number_of_choices(count: object, wanted: int) -> None:
    assert num_choices_from_openai(count) == wanted


@pytest.mark.parametrize("count", [0, 129, 1.0, "2", True])
def test_another_n_is_refused(count: object) -> None:
    with pytest.raises(UnsupportedParameterError, match="from 1 to 128"):
        num_choices_from_openai(count)


def test_logprobs_are_openais_and_json_has_no_infinity() -> None:
    top = (TokenLogprob(1, "é".encode(), -0.1), TokenLogprob(2, b"\xc3", -float("inf")))
    entry = {"token": "é", "bytes": [0xC3, 0xA9], "logprob": -0.1}
    assert logprobs_to_openai([TokenLogprob(1, "é".encode(), -0.1, top)]) == {
        "content": [
            {
                **entry,
                "top_logprobs": [entry, {"token": "\ufffd", "bytes": [0xC3], "logprob": -9999.0}],
            }
        ]
    }
