from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite_agent.bench.transcripts import built_in_transcripts, load_transcripts
from dlite_agent.errors import ConfigurationError
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer
from tests.tiny_checkpoint import write_checkpoint

MESSAGES = [
    {"role": "system", "content": "You answer."},
    {"role": "user", "content": "What is in a.txt?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "seven lines of text"},
    {"role": "assistant", "content": "Seven lines of text."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    return load_tokenizer(str(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")))


def test_answers_and_tool_results_are_told_apart(
    tmp_path: Path, tokenizer: CheckpointTokenizer
) -> None:
    (tmp_path / "talk.json").write_text(json.dumps({"messages": MESSAGES}))
    (found,) = load_transcripts(tmp_path, tokenizer)
    assert found.name == "talk"
    texts = [tokenizer.decode(found.token_ids[start:stop]) for start, stop in found.answers]
    assert len(texts) == 2
    assert texts[0].startswith("I look.")
    assert texts[1] == "Seven lines of text.<|im_end|>"
    assert found.answers[-1][1] == len(found.token_ids)
    (result,) = found.tool_results
    assert "seven lines of text" in tokenizer.decode(found.token_ids[slice(*result)])
    assert found.answers[0][1] <= result[0] < result[1] <= found.answers[1][0]


def test_built_in_transcript_has_many_turns(tokenizer: CheckpointTokenizer) -> None:
    (found,) = built_in_transcripts(tokenizer)
    assert len(found.answers) == 8 - 1
    assert len(found.tool_results) == 6


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("{", "is no JSON"),
        ("[]", "no list of messages"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "no message of an assistant"),
    ],
)
def test_what_is_no_transcript_is_refused(
    tmp_path: Path, tokenizer: CheckpointTokenizer, text: str, advice: str
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigurationError, match=advice):
        load_transcripts(tmp_path, tokenizer)


def test_empty_folder_is_refused(tmp_path: Path, tokenizer: CheckpointTokenizer) -> None:
    with pytest.raises(ConfigurationError, match="there is no"):
        load_transcripts(tmp_path, tokenizer)
