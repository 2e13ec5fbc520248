"""A grammar over tokens: masks for every row of a draft, bytes that are forced, the way to an end.

llguidance does the parsing (decision 0005). Its matcher follows committed tokens only; a draft is
looked at and taken back within one call, so that nothing has to be rolled back after verification.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import torch
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask

from dlite_agent.decoding.draft_masks import DraftMasks
from dlite_agent.decoding.grammar_errors import refusal
from dlite_agent.decoding.token_trie import TokenTable, token_trie
from dlite_agent.errors import RequestError

__all__ = ["Closing", "Constraint", "GrammarCompiler"]

Closing = Literal["answers", "all", "never"]

_MAX_ENDING = 2048
"""Tokens of the shortest turn that a grammar may ask for."""
_CLOSING_MARGIN = 64
"""Tokens that an ending may grow by between two looks at it."""
_MAX_STRIDE = 16
"""Most tokens between two looks once an ending is near."""
_MAX_COMPILED = 64
_HOST = torch.device("cpu")
_STEP = 0x9E3779B1  # spreads consecutive numbers
# What ends something on the way to an end, tried in this order behind the control tokens that end a
# thought or a call: inside text, where a letter may stand, and between values.
_LETTER = "x"
_TEXT_ENDS = ("\n</parameter>\n", '"')
_VALUE_ENDS = ("}", "]", ",", '"')


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What all constraints of a target share.

    Attributes:
        vocab_size: Columns of the target's logits.
        num_tokens: Ids that the tokenizer has.
        stop_ids: Ids that end a turn where its grammar accepts.
        stop_id: The usual one.
        call_id: Opens a call, if it is a token.
        encode: Text to ordinary ids.
        ends: Control tokens that end something.
        letter: A letter.
        text_ends: Token sequences that end text.
        value_ends: Token sequences that end a value or a container.
    """

    vocab_size: int
    num_tokens: int
    stop_ids: frozenset[int]
    stop_id: int
    call_id: int | None
    encode: Callable[[str], Sequence[int]]
    ends: tuple[tuple[int, ...], ...]
    letter: tuple[int, ...]
    text_ends: tuple[tuple[int, ...], ...]
    value_ends: tuple[tuple[int, ...], ...]


class GrammarCompiler:
    """Compiles grammars for one vocabulary.

    Args:
        table: The vocabulary; see `token_trie` for what reading it takes.
        vocab_size: Columns of the target's logits; ids beyond the table are never allowed.
    """

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        self._trie = token_trie(table)
        stop_ids = frozenset(table.stop_ids)
        ends = [i for i in table.special_token_ids if table.tokens[i].startswith(b"</")]
        self._vocabulary = _Vocabulary(
            vocab_size,
            self._trie.tokenizer.vocab_size,
            stop_ids,
            table.eos_token_id,
            table.call_id,
            table.encode,
            tuple((i,) for i in ends),
            tuple(table.encode(_LETTER)),
            tuple(tuple(table.encode(text)) for text in _TEXT_ENDS),
            tuple(tuple(table.encode(text)) for text in _VALUE_ENDS),
        )
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def compile(
        self,
        grammar: str,
        tenant: str = "",
        closing: Closing = "never",
        examples: Sequence[str] = (),
    ) -> Constraint:
        """A constraint at the grammar's start; compiled grammars are kept, for each tenant alone.

        Args:
            grammar: In llguidance's dialect of Lark.
            tenant: Whose grammar it is.
            closing: What is closed before its tokens run out: `"answers"`: a turn that holds no
                call yet; `"all"`: calls as well, whose strings may then be cut short; `"never"`.
            examples: Texts that end where strings of the grammar may, to find an end by.

        Raises:
            RequestError: The grammar holds a schema that cannot be enforced, that nothing
                satisfies, or whose shortest answer has more than 2,048 tokens.
        """
        key = (tenant, grammar)
        matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._compiled[key] = self.check(grammar, examples)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Constraint(matcher.deep_copy(), self._vocabulary, closing, examples)

    def knows(self, grammar: str, tenant: str = "") -> bool:
        """Whether a grammar is compiled."""
        return (tenant, grammar) in self._compiled

    def check(self, grammar: str, examples: Sequence[str] = ()) -> LLMatcher:
        """A matcher at the grammar's start, which is not kept.

        Raises:
            RequestError: As for `compile`.
        """
        matcher = LLMatcher(self._trie.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(refusal(matcher.get_error()))
        constraint = Constraint(matcher.deep_copy(), self._vocabulary, "never", examples)
        if constraint.ending(_MAX_ENDING) is None:
            raise RequestError(
                "a schema of the request has no answer of fewer than "
                f"{_MAX_ENDING} tokens; a definition that needs itself has none at all: make the "
                "recursion optional, or lower minItems and minLength"
            )
        return matcher


class Constraint:
    """One turn under a grammar. What it allows depends on the committed tokens alone.

    Args:
        matcher: At the turn's start; owned.
        vocabulary: The target's.
        closing: See `GrammarCompiler.compile`.
        examples: See `GrammarCompiler.compile`.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: _Vocabulary,
        closing: Closing = "never",
        examples: Sequence[str] = (),
    ) -> None:
        self._matcher = matcher
        self._examples = examples
        self._vocabulary = vocabulary
        self._closing = closing
        self._next_look: int | None = None
        self._bits = allocate_token_bitmask(1, vocabulary.num_tokens)  # one row of `masks`

    def num_valid(self, drafted: Sequence[int]) -> int:
        """How many tokens of a draft the grammar allows; a stop id counts where it may stand."""
        known = takewhile(lambda token_id: token_id < self._vocabulary.num_tokens, drafted)
        return self._num_valid(tuple(known))  # an unknown id would break the matcher

    def forced(self, budget: int) -> tuple[int, ...]:
        """Tokens that spell the bytes which must come next, at most `budget`; often none.

        The bytes are certain and their split into tokens is not, so that they are a draft.
        """
        if not self._matcher.compute_ff_bytes():  # a tenth of the price, and most often the answer
            return ()
        return tuple(self._matcher.compute_ff_tokens()[:budget])

    def masks(self, drafted: Sequence[int]) -> DraftMasks:
        """Allowed tokens of the rows of a draft; to be read before the constraint advances.

        Args:
            drafted: k tokens that the grammar allows (`num_valid`).

        Returns:
            R masks: row i holds after `drafted[:i]`; R is k + 1, or less where the draft holds a
            stop id, behind which nothing comes.
        """
        vocabulary = self._vocabulary
        stop = next((i for i, token in enumerate(drafted) if token in vocabulary.stop_ids), None)
        return DraftMasks(
            self._matcher,
            drafted[:stop],
            self._bits[0],
            vocabulary.num_tokens,
            vocabulary.vocab_size,
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow committed tokens.

        Raises:
            ValueError: One that the grammar does not allow.
        """
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                raise ValueError(f"token {token_id!r} breaks the grammar")
            if token_id == self._vocabulary.call_id and self._closing == "answers":
                self._closing = "never"

    def num_unwatched(self, num_left: int) -> int:
        """How many tokens may be committed before `closing` has to be asked again."""
        if self._closing == "never":
            return num_left
        return num_left if self._next_look is None else max(0, num_left - self._next_look)

    def closing(self, num_left: int) -> tuple[int, ...]:
        """The tokens that end the turn in time, stop id included, once there is no room for more.

        Looks at the grammar only where the last ending that it saw comes near. Asked at the start
        and wherever `num_unwatched` says so, what it returns depends on the tokens alone.

        Args:
            num_left: Tokens that the turn may still commit.

        Returns:
            Nothing while there is room, or where the grammar cannot be ended within `num_left`.
        """
        if self._closing == "never":
            return ()
        if self._next_look is not None and num_left > self._next_look:
            return ()
        ending = self.ending(num_left - 1)
        if ending is None:
            self._next_look = num_left - 1
            return ()
        spare = num_left - len(ending) - 1 - _CLOSING_MARGIN
        if spare <= 0:
            return (*ending, self._vocabulary.stop_id)
        # nothing is drafted over a look, so that near the end they come closer by and by
        stride = max(1, min(_MAX_STRIDE, spare // 4))
        self._next_look = min(num_left - stride, len(ending) + 2 * _CLOSING_MARGIN)
        return ()

    def ending(self, max_tokens: int) -> tuple[int, ...] | None:
        """A short way to where the grammar accepts, at most `max_tokens`; None if none was found.

        Takes what is forced, else what closes most, else the end of an example, else anything.
        """
        matcher, ending = self._matcher, list[int]()
        while not matcher.is_accepting():
            step = self._step_to_end(max_tokens - len(ending), len(ending))
            if not step or not matcher.consume_tokens(step):
                break
            ending += step
        is_over = matcher.is_accepting()
        matcher.rollback(len(ending))
        return tuple(ending) if is_over else None

    def _step_to_end(self, room: int, num_taken: int) -> list[int]:
        forced = self._matcher.compute_ff_tokens()
        if forced:
            return forced if len(forced) <= room else []
        letter = self._vocabulary.letter
        is_text = self._num_valid(letter) == len(letter)
        for closer in self._closers(is_text=is_text):
            # what ends text is followed by no letter; a quote within text is
            behind = letter if is_text else ()
            if len(closer) <= room and self._num_valid((*closer, *behind)) == len(closer):
                return list(closer)
        if room < len(letter):
            return []
        if is_text and not self._examples:
            return list(letter)
        # Not always the first: it may lead nowhere, as zeros do in a number above zero.
        allowed = self.masks(()).row(0).ids(_HOST)
        return [int(allowed[num_taken * _STEP % len(allowed)])]

    def _closers(self, *, is_text: bool) -> Iterator[tuple[int, ...]]:
        vocabulary = self._vocabulary
        yield from vocabulary.ends
        yield from vocabulary.text_ends if is_text else vocabulary.value_ends
        for text in self._examples:
            in_json = json.dumps(text, ensure_ascii=False)[1:]
            for start in range(len(text)):
                yield tuple(vocabulary.encode(in_json[start - len(text) - 1 :]))
                yield tuple(vocabulary.encode(text[start:] + _TEXT_ENDS[0]))
        if not is_text:
            yield vocabulary.text_ends[0]

    def _num_valid(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))
