"""A conversation that a bench goes through, and the sources of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlite_agent.bench.transcripts import read_transcript, transcript_files
from dlite_agent.bench.turn_generator import generate_transcript
from dlite_agent.chat.messages import JSON, Message, ToolSpec

__all__ = ["Talk", "built_in_talks", "read_talks"]

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation.

    Attributes:
        name: Of its file or task.
        messages: All of them.
        tools: From the start.
        more_tools: Those that come with the message of an index.
    """

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    more_tools: Mapping[int, tuple[ToolSpec, ...]] = field(default_factory=dict)

    @property
    def template_kwargs(self) -> dict[str, JSON]:
        """Transcripts without thoughts were sampled without thinking."""
        return {} if any(m.reasoning for m in self.messages) else {"enable_thinking": False}

    def tools_before(self, index: int) -> tuple[ToolSpec, ...]:
        """The tools of the request that `messages[index]` answers."""
        later = (tools for start, tools in self.more_tools.items() if start < index)
        return (*self.tools, *(tool for some in later for tool in some))


def read_talks(transcripts: Path | Iterable[Path]) -> list[Talk]:
    """Transcripts in OpenAI's form, of files and of the `*.json` of folders; names are unique.

    Raises:
        ConfigurationError: There is none, or one is no transcript.
    """
    paths = transcript_files(transcripts)
    stems = [path.stem for path in paths]
    earlier = [stems[:i].count(stem) for i, stem in enumerate(stems)]
    names = [f"{stem}-{n + 1}" if n else stem for stem, n in zip(stems, earlier, strict=True)]
    return [Talk(name, *read_transcript(path)) for name, path in zip(names, paths, strict=True)]


def built_in_talks(presets: Sequence[str], seed: int) -> list[Talk]:
    """A short repair, and generated ones that are made of its tool results."""
    built_in = Talk("repair", *read_transcript(_ASSETS / "repair.json"))
    words = [message.content for message in built_in.messages if message.role == "tool"]
    generated = [Talk(preset, *generate_transcript(preset, seed, words)) for preset in presets]
    return [built_in, *generated]
