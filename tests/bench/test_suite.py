from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite_agent.bench.suite import built_in_suite, load_suite
from dlite_agent.errors import ConfigurationError
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.fixture(scope="module")
def tokenizer() -> CheckpointTokenizer:
    return load_tokenizer(str(Path("dlite_agent/nano/assets").resolve()))


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def test_every_answer_is_a_request_behind_what_stands_before_it(
    tokenizer: CheckpointTokenizer, tmp_path: Path
) -> None:
    suite = load_suite(
        write(
            tmp_path / "some.jsonl",
            {"name": "two", "messages": [USER, ANSWER, USER, ANSWER], "enable_thinking": False},
            {"messages": [USER, ANSWER, USER], "enable_thinking": True},
            {"prompt": "hi"},
        ),
        tokenizer,
    )
    named = [[(one.conversation, one.turn, one.thinking) for one in some] for some in suite]
    assert named == [
        [("two", 0, "off"), ("two", 1, "off")],
        [("some.jsonl:2", 0, "on"), ("some.jsonl:2", 1, "on")],
        [("some.jsonl:3", 0, "template")],
    ]
    first, second = (one.prompt_ids for one in suite[1])
    assert second[: len(first)] == first
    assert suite[2][0].prompt_ids == suite[1][0].prompt_ids
    assert tokenizer.decode(list(second)).count("hello") == 1


def test_built_in_suites_have_short_and_long_histories(tokenizer: CheckpointTokenizer) -> None:
    lengths = [
        len(one.prompt_ids)
        for some in load_suite(built_in_suite("nano"), tokenizer)
        for one in some
    ]
    assert min(lengths) < 1000
    assert max(lengths) > 3000
    assert len(load_suite(built_in_suite("other"), tokenizer)[0]) > 2


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("{", "no JSON"),
        ("[1]", "neither messages nor a prompt"),
        ('{"messages": "hi"}', "neither messages nor a prompt"),
        ('{"messages": [{"role": "user"}], "tools": [{"type": "x"}]}', "only tools of type"),
        ('{"messages": []}', "asks for no answer"),
        ('{"prompt": "hi", "name": "a"}\n' * 2, "two conversations of .* are called 'a'"),
        ("", "asks for no answer"),
    ],
)
def test_what_is_no_suite_is_refused(
    tokenizer: CheckpointTokenizer, tmp_path: Path, text: str, advice: str
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=advice):
        load_suite(path, tokenizer)


def test_missing_suite_is_named(tokenizer: CheckpointTokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.jsonl"):
        load_suite(tmp_path / "none.jsonl", tokenizer)
