"""From a request's output rules to the constraint of its turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.grammar import TurnForm, turn_grammar
from dlite_agent.chat.markers import CALL, THINK_END
from dlite_agent.chat.output_rules import OutputRules, ToolChoice
from dlite_agent.chat.patterns import examples
from dlite_agent.chat.renderer import RenderedPrompt
from dlite_agent.chat.template import CallForm
from dlite_agent.decoding.constraint import Closing, Constraint, GrammarCompiler, TokenTable
from dlite_agent.errors import RequestError
from dlite_agent.tokenizer import CheckpointTokenizer

__all__ = ["TurnGrammars"]

_TAIL = 8  # tokens of a generation prompt in which a thought may have been closed already


class TurnGrammars:
    """The grammars of one model's turns. Reading a vocabulary of 152,000 tokens takes two seconds.

    Args:
        tokenizer: The checkpoint's.
        vocab_size: Columns of the target's logits.
        stop_ids: Ids that end a turn, the usual one first.
        calls: How the checkpoint's template writes calls.
    """

    def __init__(
        self,
        tokenizer: CheckpointTokenizer,
        vocab_size: int,
        stop_ids: Sequence[int],
        calls: CallForm = "json",
    ) -> None:
        control = tokenizer.control_tokens
        texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        table = TokenTable(
            texts, list(control.values()), stop_ids, tokenizer.encode_untrusted, control.get(CALL)
        )
        self._compiler = GrammarCompiler(table, vocab_size)
        self._control = control
        self._calls: CallForm = calls

    def constraint(self, request: ChatRequest, prompt: RenderedPrompt) -> Constraint | None:
        """The constraint of a turn, at its start; None where anything may be written.

        Raises:
            RequestError: The rules name a tool that is not there, or hold a schema that cannot be
                enforced or met.
        """
        rules = request.output
        form = TurnForm(self._control, self._calls, self._thought(prompt))
        grammar = turn_grammar(rules, request.tools, form)
        if grammar is None:
            return None
        closing: Closing = "never" if rules.answer is None else "answers"
        if rules.closes_calls:
            closing = "all"
        answer = None if rules.answer is None else rules.answer.schema
        schemas = (answer, *(tool.parameters for tool in request.tools))
        texts = tuple(dict.fromkeys(text for schema in schemas for text in examples(schema)))
        try:
            return self._compiler.compile(grammar, request.tenant, closing, texts)
        except RequestError as error:
            name = self._unmet(request, form, texts)
            if name is None:
                raise
            raise RequestError(f"tool {name!r}: {error}") from error

    def _unmet(self, request: ChatRequest, form: TurnForm, texts: Sequence[str]) -> str | None:
        """The first tool whose schema by itself cannot be enforced or met."""
        for tool in request.output.allowed(request.tools):
            one = OutputRules(ToolChoice("required", (tool.name,)))
            grammar = turn_grammar(one, (tool,), form)
            try:
                if grammar is not None:
                    self._compiler.compile(grammar, request.tenant, examples=texts)
            except RequestError:
                return tool.name
        return None

    def _thought(self, prompt: RenderedPrompt) -> Literal["open", "optional", "none"]:
        if prompt.starts_in_reasoning:
            return "open"
        is_closed = self._control.get(THINK_END) in prompt.token_ids[-_TAIL:]
        return "none" if is_closed else "optional"
