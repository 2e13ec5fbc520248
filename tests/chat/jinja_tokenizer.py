"""A byte tokenizer with a chat template of the test's own."""

from __future__ import annotations

from jinja2 import Environment, TemplateError

from dlite_agent.chat.messages import JSON
from dlite_agent.errors import RequestError
from dlite_agent.testing import ByteTokenizer


class JinjaTokenizer(ByteTokenizer):
    """A byte tokenizer with a jinja template of its own."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def apply_template(
        self,
        messages: list[dict[str, JSON]],
        tools: list[dict[str, JSON]] | None,
        add_generation_prompt: bool,
        /,
        **variables: JSON,
    ) -> str:
        def refuse(message: str) -> None:
            raise TemplateError(message)

        template = Environment().from_string(self._source)
        names = {"messages": messages, "tools": tools, "prompt": add_generation_prompt}
        try:
            return template.render(**names, **variables, refuse=refuse)
        except (TemplateError, TypeError) as error:
            raise RequestError(str(error)) from error


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if prompt %}<|im_start|>assistant\n{% endif %}"
