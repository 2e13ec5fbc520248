"""A recipe: one YAML file that says what a drafter is trained from, how, and into what.

```yaml
model: Qwen/Qwen3-0.6B
transcripts: [runs/]
work: work/qwen3-0.6b
out: drafters/qwen3-0.6b
capture: {max_records: 200000, max_windows: 2000}
drafter: {num_taps: 14, num_layers: 2}
teacher: {steps: 2000}
align: {steps: 4000}
```
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from dlite_agent.errors import ConfigurationError, MissingDependencyError
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.training.options import AlignOptions

__all__ = ["CaptureOptions", "CompareOptions", "Recipe", "find_recipe", "read_recipe"]


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What is captured.

    Attributes:
        store: `disk` keeps shards; `memory` keeps records for the step that made them; `none` keeps
            a few at a time, with the target at work beside the student.
        dtype: Of taps: `bf16`, or `int8` in half the bytes.
        max_records: Stop after so many; a record is a token of an answer that another follows.
        max_windows: Of so many turns the positions before the answer are kept too, for those who
            read a history: a teacher, and baselines.
        window: Most positions before an answer that a window has.
        max_context: Turns with a longer prompt are left out.
        max_answer: Most tokens that the target writes for a turn.
        loop_size: Its answer ends before so many tokens that it already has in this order, as small
            targets repeat themselves; 0: it ends where the target ends it.
        temperature: It writes with; 0 is greedy.
        enable_thinking: Passed to the chat template; null leaves its default. The mode that it will
            be served in.
        heldout: One conversation in so many is kept for measuring.
        shard_records: Records of a file.
        seed: Of sampling.
    """

    store: Literal["disk", "memory", "none"] = "disk"
    dtype: Literal["bf16", "int8"] = "bf16"
    max_records: int = 200_000
    max_windows: int = 0
    window: int = 2_048
    max_context: int = 16_384
    max_answer: int = 1_024
    loop_size: int = 0
    temperature: float = 0.0
    enable_thinking: bool | None = None
    heldout: int = 20
    shard_records: int = 20_000
    seed: int = 1

    def num_rows(self, num_records: int, num_windows: int) -> int:
        """Positions that are still to be captured at most, where there are some already."""
        records = self.max_records - num_records
        windows = (self.max_windows - num_windows) * (self.window + self.max_answer)
        return (records + windows) * self.heldout // (self.heldout - 1)

    def __post_init__(self) -> None:
        for name in ("max_records", "max_context", "shard_records", "window"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 1")
        for name in ("max_windows", "loop_size"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 0")
        if self.heldout < 2 or self.max_answer < 2 or self.temperature < 0:
            raise ConfigurationError(
                f"heldout={self.heldout!r}, max_answer={self.max_answer!r}, temperature="
                f"{self.temperature!r}: use at least 2, at least 2, and no negative number"
            )


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How DLite and DSpark are compared; the rest is `align`'s, the same for all of them.

    Attributes:
        seeds: Runs of each, with the seeds 1, 2, ...
        windows: How far back DSpark sees, a contestant each; 0: to the window's first position.
        num_taps: Of DSpark, among the captured ones.
        max_heldout: Most held-out windows that are measured on.
    """

    seeds: int = 3
    windows: tuple[int, ...] = (0, 64)
    num_taps: int = 5
    max_heldout: int = 100

    def __post_init__(self) -> None:
        for name in ("seeds", "num_taps", "max_heldout"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 1")
        if not self.windows or min(self.windows) < 0:
            raise ConfigurationError(f"windows is {self.windows!r}; use numbers from 0")


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
        start: Folder or hub name of a DLite or DSpark drafter whose tensors are taken over where
            their shapes agree; null: none.
        teacher: How stage 1 is trained; null: there is none.
        align: How the drafter is trained.
        compare: What `train compare` trains beside it.
    """

    model: str
    transcripts: tuple[str, ...]
    work: str
    out: str
    capture: CaptureOptions = field(default_factory=CaptureOptions)
    drafter: Mapping[str, object] = field(default_factory=dict)
    start: str | None = None
    teacher: AlignOptions | None = None
    align: AlignOptions = field(default_factory=AlignOptions)
    compare: CompareOptions = field(default_factory=CompareOptions)

    def __post_init__(self) -> None:
        choices = ["num_taps", *(item.name for item in fields(DLiteConfig))]
        for key in self.drafter:
            if key not in choices:
                raise _unknown(f"drafter.{key}", key, choices)


def find_recipe(name: str) -> Path:
    """The file of a recipe: as named, or one of the package's.

    Raises:
        ConfigurationError: There is none.
    """
    path, folder = Path(name), Path(__file__).parent / "recipes"
    if path.is_file():
        return path
    ours = sorted(file.stem for file in folder.glob("*.yaml"))
    if name in ours:
        return folder / f"{name}.yaml"
    near = difflib.get_close_matches(name, ours, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"or one of {', '.join(ours)}"
    raise ConfigurationError(f"there is no recipe {name!r}; name a YAML file; {advice}")


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
            raise _unknown(f"{prefix}{key}", str(key), known)
    for name, item in known.items():
        if name not in content and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigurationError(f"the recipe lacks {prefix + name!r}; add it")
    values = {name: _value(hints[name], value, prefix + name) for name, value in content.items()}
    return kind(**values)


def _unknown(named: str, key: str, known: Iterable[str]) -> ConfigurationError:
    near = difflib.get_close_matches(key, known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return ConfigurationError(f"the recipe has an unknown key {named!r}; {advice}")


_SECTIONS = (CaptureOptions, AlignOptions, CompareOptions)


def _value(hint: Any, value: object, name: str) -> object:
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    section = next((kind for kind in kinds if kind in _SECTIONS), None)
    if section is not None and not (value is None and type(None) in kinds):
        if not isinstance(value, dict):
            raise ConfigurationError(f"{name} is {value!r}; it is a section of key: value lines")
        return _build(section, value, f"{name}.")
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        items = [value] if type(value) is kind else value
        if not isinstance(items, list) or not all(type(item) is kind for item in items):
            raise ConfigurationError(f"{name} is {value!r}; use a list of type {kind.__name__}")
        return tuple(items)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigurationError(f"{name} is {value!r}; use one of {get_args(hint)}")
        return value
    return _plain(kinds, value, name)


def _plain(kinds: tuple[Any, ...], value: object, name: str) -> object:
    """A number, a string, a truth value, nothing, or a mapping that is checked later."""
    if not set(kinds) <= {int, float, bool, str, type(None), AlignOptions}:
        kinds = (dict,)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        value = float(value)
    if type(value) not in kinds:
        named = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ConfigurationError(f"{name} is {value!r}; use a value of type {named}")
    return value
