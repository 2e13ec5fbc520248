"""A recipe: one YAML file that says what a drafter is trained from, how, and into what.

```yaml
model: Qwen/Qwen3-0.6B
transcripts: [runs/]
work: work/qwen3-0.6b
out: drafters/qwen3-0.6b
capture: {max_records: 200000}
drafter: {num_taps: 14, num_layers: 2}
align: {steps: 4000}
```
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from dlite_agent.errors import ConfigurationError, MissingDependencyError
from dlite_agent.training.trainer import AlignOptions

__all__ = ["CaptureOptions", "Recipe", "read_recipe"]


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What is captured.

    Attributes:
        max_records: Stop after so many; a record is a token of an answer that another follows.
        max_context: Turns with a longer prompt are left out.
        max_answer: Most tokens that the target writes for a turn.
        temperature: It writes with; 0 is greedy.
        enable_thinking: Passed to the chat template; null leaves its default. The mode that it will
            be served in.
        heldout: One conversation in so many is kept for measuring.
        shard_records: Records of a file.
        seed: Of sampling.
    """

    max_records: int = 200_000
    max_context: int = 16_384
    max_answer: int = 1_024
    temperature: float = 0.0
    enable_thinking: bool | None = None
    heldout: int = 20
    shard_records: int = 20_000
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("max_records", "max_context", "shard_records"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 1")
        if self.heldout < 2 or self.max_answer < 2 or self.temperature < 0:
            raise ConfigurationError(
                f"heldout={self.heldout!r}, max_answer={self.max_answer!r}, temperature="
                f"{self.temperature!r}: use at least 2, at least 2, and no negative number"
            )


@dataclass(frozen=True, slots=True)
class Recipe:
    """All of it.

    Attributes:
        model: The target: a folder, `nano`, or a hub name.
        transcripts: Files and folders; see `training.conversations`.
        work: Folder of records and state.
        out: Folder of the drafter.
        capture: What is captured.
        drafter: Choices of `DLiteConfig.for_target` that are not the default.
        align: How the drafter is trained.
    """

    model: str
    transcripts: tuple[str, ...]
    work: str
    out: str
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    drafter: Mapping[str, object] = field(default_factory=dict)
    align: AlignOptions = field(default_factory=AlignOptions)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, and change it by `key=value`, e.g. `align.steps=100` or `out=here`.

    Values of overrides are YAML.

    Raises:
        ConfigurationError: The file is none, a key is unknown or missing, or a value of a wrong
            kind or out of range.
        MissingDependencyError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError(
            'a recipe needs PyYAML; run: pip install "dlite-agent[train]"'
        ) from error
    if not path.is_file():
        raise ConfigurationError(f"there is no recipe {str(path)!r}; name a YAML file")
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        changes = [(override, *_override(override, yaml.safe_load)) for override in overrides]
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{str(path)!r} or an override is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{str(path)!r} is no mapping; see docs/guides/train-a-drafter.md")
    for override, keys, value in changes:
        place = content
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigurationError(f"{override!r}: {key!r} holds a value, not a section")
        place[keys[-1]] = value
    return cast(Recipe, _build(Recipe, content, ""))


def _override(text: str, parse: Any) -> tuple[list[str], object]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigurationError(f"{text!r} is no override; write key=value, e.g. align.steps=100")
    return key.split("."), parse(value)


def _build(kind: type[Any], content: Mapping[str, object], prefix: str) -> Any:
    """A dataclass from a mapping, checked."""
    known: dict[str, Field[object]] = {item.name: item for item in fields(kind)}
    hints = get_type_hints(kind)
    for key in content:
        if key not in known:
            raise ConfigurationError(
                f"the recipe has an unknown key {prefix + str(key)!r}; known here are "
                f"{', '.join(sorted(known))}"
            )
    for name, item in known.items():
        if name not in content and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigurationError(f"the recipe lacks {prefix + name!r}; add it")
    values = {name: _value(hints[name], value, prefix + name) for name, value in content.items()}
    return kind(**values)


def _value(hint: Any, value: object, name: str) -> object:
    if hint in (CaptureOptions, AlignOptions):
        if not isinstance(value, dict):
            raise ConfigurationError(f"{name} is {value!r}; it is a section of key: value lines")
        return _build(hint, value, f"{name}.")
    if hint == tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigurationError(f"{name} is {value!r}; use a list of paths")
        return tuple(cast(list[str], items))
    if isinstance(hint, types.UnionType):
        kinds = get_args(hint)
    else:
        kinds = (dict,) if hint not in (int, float, bool, str) else (hint,)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        value = float(value)
    if type(value) not in kinds:
        named = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigurationError(f"{name} is {value!r}; use a value of type {named}")
    return value
