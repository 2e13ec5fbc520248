"""From a request's output rules to the constraint of its turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.grammar import TurnForm, turn_grammar
from dlite_agent.chat.markers import CALL, THINK_END
from dlite_agent.chat.messages import JSON, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules
from dlite_agent.chat.patterns import examples
from dlite_agent.chat.renderer import RenderedPrompt
from dlite_agent.chat.schema_faults import fault_in
from dlite_agent.chat.template import CallForm
from dlite_agent.decoding.constraint import Closing, Constraint, GrammarCompiler
from dlite_agent.decoding.token_trie import TokenTable
from dlite_agent.errors import RequestError
from dlite_agent.tokenizer import CheckpointTokenizer

__all__ = ["TurnGrammars"]

_TAIL = 8  # tokens of a generation prompt in which a thought may have been closed already


class TurnGrammars:
    """The grammars of one model's turns.

    The first that is asked for reads the vocabulary, unless another model of this process has the
    same: half a second for 152,000 tokens, which a model without grammars never pays.

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
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._control = tokenizer.control_tokens
        self._calls: CallForm = calls

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        tokenizer = self._tokenizer
        table = TokenTable(
            [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
            list(self._control.values()),
            self._stop_ids,
            tokenizer.encode_untrusted,
            self._control.get(CALL),
            fingerprint=tokenizer.fingerprint,
        )
        return GrammarCompiler(table, self._vocab_size)

    def constraint(self, request: ChatRequest, prompt: RenderedPrompt) -> Constraint | None:
        """The constraint of a turn, at its start; None where anything may be written.

        Raises:
            RequestError: The rules name a tool that is not there, or hold a schema that cannot be
                enforced or met.
        """
        rules = request.output
        form = TurnForm(self._control, self._calls, self._thought(prompt))
        closing: Closing = "never" if rules.answer is None else "answers"
        if rules.closes_calls:
            closing = "all"
        answer = None if rules.answer is None else rules.answer.schema
        schemas = (answer, *(tool.parameters for tool in request.tools))
        texts = tuple(dict.fromkeys(text for schema in schemas for text in examples(schema)))
        try:
            grammar = turn_grammar(rules, request.tools, form)
        except RequestError as error:
            raise RequestError(self._fault(request, texts) or str(error)) from error
        if grammar is None:
            return None
        if not self._compiler.knows(grammar, request.tenant):
            fault = self._fault(request, texts)
            if fault is not None:
                raise RequestError(fault)
        return self._compiler.compile(grammar, request.tenant, closing, texts)

    def _fault(self, request: ChatRequest, texts: Sequence[str]) -> str | None:
        """The first schema that cannot be enforced or met: whose, where and why.

        Each is looked at alone, in the JSON form, also where the turn could do without it: a call
        that has begun has to end, and what JSON cannot be held to, tags are not held to either.
        """
        form = TurnForm(self._control, "json", "none")

        def refusal(schema: Mapping[str, JSON], *, is_strict: bool) -> str | None:
            answer = AnswerFormat(dict(schema), strict=is_strict)
            grammar = turn_grammar(OutputRules(answer=answer), (), form)
            try:
                self._compiler.check(grammar or "", texts)
            except RequestError as error:
                return str(error)
            return None

        answer = request.output.answer
        named = [
            (f"tool {tool.name!r}", dict(tool.parameters), tool.strict) for tool in _bound(request)
        ]
        if answer is not None and answer.schema is not None:
            named.append(("response_format", dict(answer.schema), answer.strict))
        for name, schema, is_strict in named:
            fault = fault_in(schema, partial(refusal, is_strict=is_strict))
            if fault is not None:
                return f"{name}: at {fault[0]}, {fault[1]}"
        return None

    def _thought(self, prompt: RenderedPrompt) -> Literal["open", "optional", "none"]:
        if prompt.starts_in_reasoning:
            return "open"
        is_closed = self._control.get(THINK_END) in prompt.token_ids[-_TAIL:]
        return "none" if is_closed else "optional"


def _bound(request: ChatRequest) -> list[ToolSpec]:
    """Tools whose calls are held to their schemas."""
    is_forced = request.output.tool_choice.mode == "required"
    allowed = request.output.allowed(request.tools)
    return [tool for tool in allowed if is_forced or tool.strict]
