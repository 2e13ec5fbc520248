"""`dlite-agent doctor TRANSCRIPT...`: what recorded requests cost, and what to change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.cli.console import styled, table, write
from dlite_agent.errors import ConfigurationError

if TYPE_CHECKING:
    from dlite_agent.chat.renderer import Renderer
    from dlite_agent.config import HistoryMode
    from dlite_agent.engine.forecast import RecordedRequest, TurnForecast

__all__ = [
    "TranscriptReport",
    "as_json",
    "inspect_transcripts",
    "is_transcript",
    "print_transcripts",
]

_KINDS = (".json", ".jsonl")
_ADVICE_FORM = (
    "use JSON: one transcript {'messages': [...], 'tools': [...]}, or a list (or one a line) of "
    "requests as they were sent, each of that form or {'request': ..., 'response': ...}"
)


@dataclass(frozen=True, slots=True)
class TranscriptReport:
    """What the requests of one file cost.

    Attributes:
        name: Of the file.
        requests: Each in order.
        amplification: Tokens computed over those that had to be, from the second request on.
        plain_amplification: The same where only the longest common prefix is reused.
        advice: What to change, the costliest first.
    """

    name: str
    requests: list[TurnForecast]
    amplification: float
    plain_amplification: float
    advice: list[str]


def is_transcript(argument: str) -> bool:
    """Whether an argument of the command line names recorded requests, and no model."""
    return argument.endswith(_KINDS)


def inspect_transcripts(
    paths: Sequence[str], model: str, history: HistoryMode
) -> list[TranscriptReport]:
    """Read files and forecast their requests with a model's tokenizer and template.

    Raises:
        ConfigurationError: A file cannot be read, or holds no requests.
    """
    from dlite_agent.chat.renderer import Renderer
    from dlite_agent.models.weights import resolve_checkpoint
    from dlite_agent.tokenizer import load_tokenizer

    recorded = [(Path(path).stem, _read(Path(path))) for path in paths]
    renderer = Renderer(load_tokenizer(str(resolve_checkpoint(model, None))))
    return [_report(name, requests, renderer, history) for name, requests in recorded]


def print_transcripts(reports: Sequence[TranscriptReport]) -> None:
    """Print a table for each file, and what to change."""
    for report in reports:
        write()
        write(f"{report.name}: {len(report.requests)} requests")
        rows = [_row(number, turn) for number, turn in enumerate(report.requests)]
        write(table(["request", "prompt", "new", "prefilled", "plain", "cause", "message"], rows))
        write(
            f"amplification {report.amplification:.2f}; with the longest common prefix alone "
            f"{report.plain_amplification:.2f}"
        )
        for advice in report.advice:
            write(styled(advice))


def as_json(reports: Sequence[TranscriptReport]) -> list[dict[str, object]]:
    """For `--json`."""
    return [asdict(report) for report in reports]


def _report(
    name: str, requests: list[RecordedRequest], renderer: Renderer, history: HistoryMode
) -> TranscriptReport:
    from dlite_agent.engine.forecast import amplification, forecast

    turns = forecast(requests, renderer, history=history)
    return TranscriptReport(
        name,
        turns,
        amplification(turns),
        amplification(turns, plain=True),
        _advice(turns),
    )


def _advice(turns: Sequence[TurnForecast]) -> list[str]:
    """One line a cause, the costliest first; and one a kind of oddity."""
    costs: dict[str, int] = {}
    firsts: dict[str, str] = {}
    oddities: dict[str, str] = {}
    for number, turn in enumerate(turns):
        if turn.miss is None:
            continue
        for oddity in turn.miss.oddities:
            kind = oddity.partition(": ")[2]
            oddities.setdefault(kind, f"free: request {number}, {oddity}")
        if (cause := turn.miss.cause) is None:
            continue
        costs[cause] = costs.get(cause, 0) + turn.miss.tokens
        index = turn.miss.message_index
        place = "" if index is None else f", messages[{index}]"
        texts = f" ({turn.miss.was!r} -> {turn.miss.now!r})" if turn.miss.was else ""
        firsts.setdefault(cause, f"first in request {number}{place}{texts}: {turn.miss.advice}")
    ordered = sorted(costs, key=lambda cause: -costs[cause])
    lines = [f"{cause}: {costs[cause]} tokens, {firsts[cause]}" for cause in ordered]
    return [*lines, *oddities.values()]


def _row(number: int, turn: TurnForecast) -> list[str]:
    miss = turn.miss
    cause = miss.cause or "" if miss is not None else ""
    index = miss.message_index if miss is not None else None
    figures = (number, turn.prompt, turn.needed, turn.prefilled, turn.plain)
    return [*map(str, figures), cause, "" if index is None else str(index)]


def _read(path: Path) -> list[RecordedRequest]:
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        found = [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigurationError(f"{str(path)!r} cannot be read: {error}; name a file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path.name!r} is no JSON: {error}; {_ADVICE_FORM}") from error
    if path.suffix == ".json" and isinstance(found[0], Mapping) and "messages" in found[0]:
        from dlite_agent.engine.forecast import requests_of

        whole = _request(found[0], path.name)
        requests = requests_of(whole.messages, whole.tools)
    else:
        found = _unwrapped(found[0]) if path.suffix == ".json" else found
        requests = [_request(item, path.name) for item in found]
    if not requests:
        raise ConfigurationError(f"{path.name!r} holds no request; {_ADVICE_FORM}")
    return requests


def _unwrapped(found: object) -> list[object]:
    if isinstance(found, Mapping) and isinstance(found.get("requests"), list):
        return list(found["requests"])
    return list(found) if isinstance(found, list) else [found]


def _request(item: object, name: str) -> RecordedRequest:
    from dlite_agent.chat.openai_format import messages_from_openai, tools_from_openai
    from dlite_agent.engine.forecast import RecordedRequest

    body = item.get("request", item) if isinstance(item, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list):
        raise ConfigurationError(f"{name!r} has a request without messages; {_ADVICE_FORM}")
    kwargs = body.get("chat_template_kwargs") or body.get("template_kwargs") or {}
    answer = _answer(item)
    return RecordedRequest(
        messages_from_openai(body["messages"]),
        tools_from_openai(body.get("tools")),
        dict(kwargs) if isinstance(kwargs, Mapping) else {},
        messages_from_openai([answer])[0] if answer is not None else None,
    )


def _answer(item: object) -> Mapping[str, object] | None:
    """The answer of a record: a whole response, or its message."""
    response = item.get("response") if isinstance(item, Mapping) else None
    if isinstance(response, Mapping) and response.get("choices"):
        response = response["choices"][0]
    if isinstance(response, Mapping) and isinstance(response.get("message"), Mapping):
        response = response["message"]
    has_role = isinstance(response, Mapping) and response.get("role") == "assistant"
    return response if isinstance(response, Mapping) and has_role else None
