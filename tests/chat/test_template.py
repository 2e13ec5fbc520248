"""Templates other than Qwen3's render, and say what they cannot do."""

from __future__ import annotations

import pytest

from dlite_agent.chat.messages import JSON, Message, ToolCall
from dlite_agent.chat.renderer import Renderer
from dlite_agent.errors import RequestError, UnsupportedCheckpointError
from dlite_agent.testing import ByteTokenizer
from tests.chat.jinja_tokenizer import LOOP, PROMPT, TURN, JinjaTokenizer


def test_template_that_opens_a_thought() -> None:
    renderer = Renderer(
        JinjaTokenizer(LOOP + "{% if prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    )
    prompt = renderer.render([Message("user", "q")])
    assert renderer.traits.header == "<|im_start|>assistant\n"
    assert prompt.starts_in_reasoning
    assert prompt.generation_suffix == (ByteTokenizer().control_tokens["<think>"], 10)
    assert renderer.strips_thoughts


def test_template_that_keeps_thoughts() -> None:
    source = LOOP.replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content") + PROMPT
    assert not Renderer(JinjaTokenizer(source)).strips_thoughts


def test_template_without_a_common_header_is_rendered_and_not_spliced() -> None:
    renderer = Renderer(JinjaTokenizer(LOOP + "{% if prompt %}ASSISTANT:{% endif %}"))
    messages = [Message("user", "q"), Message("assistant", "a"), Message("user", "b")]
    prompt = renderer.render(messages, splices={1: [65]})
    assert renderer.traits.header == ""
    assert prompt.spliced == frozenset()
    assert prompt.generation_suffix is None
    assert "message 1" in prompt.notes[0]


def test_template_that_ignores_the_generation_prompt() -> None:
    renderer = Renderer(JinjaTokenizer(LOOP))
    assert renderer.render([Message("user", "q")]).generation_suffix is None


def test_text_behind_the_header_cannot_be_recorded() -> None:
    source = LOOP + "{% if prompt %}<|im_start|>assistant\n{{ lead }}{% endif %}"
    prompt = Renderer(JinjaTokenizer(source)).render(
        [Message("user", "q")], template_kwargs={"lead": "So"}
    )
    assert prompt.generation_suffix is None


def test_template_that_drops_a_turn_does_not_splice_it() -> None:
    source = (
        "{% for m in messages %}{% if m.role != 'assistant' or not m.tool_calls %}"
        + TURN
        + "{% endif %}{% endfor %}"
        + PROMPT
    )
    renderer = Renderer(JinjaTokenizer(source))
    call = Message("assistant", "a", tool_calls=(ToolCall("f", {}),))
    answer = Message("assistant", "c")
    messages = [Message("user", "q"), call, Message("user", "b"), answer]
    prompt = renderer.render(messages, splices={1: [65], 3: [66]})
    assert prompt.spliced == {3}
    assert "message 1" in prompt.notes[0]


def test_turn_without_a_header_of_its_own_is_not_spliced() -> None:
    calls_only = "{% if m.tool_calls %}{{ m.content }}<|im_end|>{% else %}" + TURN + "{% endif %}"
    renderer = Renderer(JinjaTokenizer(LOOP.replace(TURN, calls_only) + PROMPT))
    call = Message("assistant", "b", tool_calls=(ToolCall("f", {}),))
    messages = [Message("user", "q"), Message("assistant", "a"), Message("user", "r"), call]
    prompt = renderer.render(messages, splices={3: [65]})
    assert prompt.spliced == frozenset()
    assert prompt.token_ids == renderer.render(messages).token_ids


def test_template_that_repeats_contents_keeps_the_first_place() -> None:
    renderer = Renderer(
        JinjaTokenizer(LOOP.replace("<|im_end|>", " {{ m.content }}<|im_end|>") + PROMPT)
    )
    prompt = renderer.render([Message("user", "q"), Message("user", "r")])
    assert [s.message_index for s in prompt.segments] == [0, 1, None]


def test_template_without_control_tokens_has_its_messages_too() -> None:
    renderer = Renderer(
        JinjaTokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    )
    prompt = renderer.render([Message("user", "q"), Message("user", "r")])
    assert prompt.token_ids == tuple(b"user: q\nuser: r\n")


def test_template_that_measures_contents_hides_its_messages() -> None:
    renderer = Renderer(
        JinjaTokenizer("{% for m in messages %}{{ m.content|length }}{% endfor %}" + PROMPT)
    )
    prompt = renderer.render([Message("user", "four")])
    assert prompt.segments == ()
    assert ByteTokenizer().decode(prompt.token_ids) == "4<|im_start|>assistant\n"
    assert prompt.message_at(0) is None


def test_template_that_measures_results_still_shows_its_generation_prompt() -> None:
    measured = "{{ m.content|length if m.role == 'tool' else m.content }}"
    renderer = Renderer(JinjaTokenizer(LOOP.replace("{{ m.content }}", measured) + PROMPT))
    messages = [Message("user", "q"), Message("assistant", "a"), Message("tool", "four")]
    prompt = renderer.render(messages, splices={1: [65]})
    assert [s.message_index for s in prompt.segments] == [None, None]
    rendered = ByteTokenizer().decode(prompt.token_ids)
    assert "assistant\nA<|im_end|>\n<|im_start|>tool\n4<|im_end|>" in rendered
    start = prompt.segments[1].start
    assert ByteTokenizer().decode(prompt.token_ids[start:]) == "<|im_start|>assistant\n"
    assert renderer.render(messages, add_generation_prompt=False).segments == ()


def test_template_that_refuses_sentinels_still_renders() -> None:
    source = (
        "{% for m in messages %}{% if m.content[:1]|urlencode|length > 8 %}{{ refuse('odd') }}"
        "{% endif %}{% endfor %}" + LOOP + PROMPT
    )
    renderer = Renderer(JinjaTokenizer(source))
    prompt = renderer.render([Message("user", "four")])
    assert ByteTokenizer().decode(prompt.token_ids).startswith("<|im_start|>user\nfour<|im_end|>")
    assert prompt.segments == ()
    with pytest.raises(RequestError, match="odd"):
        renderer.render([Message("user", "\U000f1234")])


def test_template_with_one_system_message_gets_the_others_as_it_can() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ refuse('system') }}{% endif %}{% endfor %}" + LOOP + PROMPT
    )
    renderer = Renderer(JinjaTokenizer(source))
    assert renderer.traits.single_system
    roles = ("system", "system", "user", "system")
    messages = [Message(role, f"text {i}") for i, role in enumerate(roles)]  # type: ignore[arg-type]
    prompt = renderer.render(messages)
    assert ByteTokenizer().decode(prompt.token_ids) == (
        "<|im_start|>system\ntext 0\n\ntext 1<|im_end|>\n<|im_start|>user\ntext 2<|im_end|>\n"
        "<|im_start|>user\ntext 3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [s.message_index for s in prompt.segments] == [0, 2, 3, None]
    assert renderer.render(messages[2:]).segments[0].message_index == 0


_CALLS = "{% for c in m.tool_calls or () %}<tool_call>ARGUMENTS</tool_call>{% endfor %}"


@pytest.mark.parametrize(
    ("expression", "arguments", "rendered"),
    [
        ("{{ c.function.arguments }}", {"a": "é"}, '{"a": "é"}'),
        ("{{ c.function.arguments }}", "no JSON", "no JSON"),
        (
            "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}",
            {"a": 1},
            "a=1;",
        ),
        (
            "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}",
            "raw",
            "arguments=raw;",
        ),
    ],
)
def test_arguments_go_in_the_form_that_the_template_reads(
    expression: str, arguments: JSON, rendered: str
) -> None:
    loop = LOOP.replace("<|im_end|>", _CALLS.replace("ARGUMENTS", expression) + "<|im_end|>")
    call = Message("assistant", "", tool_calls=(ToolCall("f", arguments),))
    tokenizer = JinjaTokenizer(loop + PROMPT)
    prompt = Renderer(tokenizer).render([Message("user", "q"), call])
    assert f"<tool_call>{rendered}</tool_call>" in tokenizer.decode(prompt.token_ids)


def test_template_that_refuses_everything_is_named() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="never"):
        Renderer(JinjaTokenizer("{{ refuse('never') }}"))
