"""Options by lifetime: `EngineConfig` lives as long as the engine, `SamplingParams` one turn.

The environment is read here and nowhere else, and only when `from_env` is called.
"""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from dlite_agent.errors import ConfigurationError

__all__ = [
    "DType",
    "Device",
    "EngineConfig",
    "HistoryMode",
    "Isolation",
    "ReusePolicy",
    "SamplingParams",
]

DType = Literal["auto", "float32", "bfloat16", "float64"]
Device = str
HistoryMode = Literal["auto", "as_generated", "template"]
Isolation = Literal["thread", "process"]
ReusePolicy = Literal["session", "prefix", "none"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine is loaded.

    Attributes:
        model: `"nano"` (embedded), a folder in the Hugging Face layout, or a hub name.
        drafter: `"auto"`, `"null"` (plain decoding) or `"lookup"` (copies from the session).
        revision: Hub revision, or None for the default branch.
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:N"`.
        dtype: Weight and KV type; `"auto"` is bfloat16 where the device computes in it and the
            model is large enough to gain from it, else float32.
        max_context: Most tokens (prompt and answer) of one session; None: what the checkpoint
            allows.
        max_kv_bytes: Budget of the KV pool in bytes; None: a quarter of the free memory.
        prefill_chunk: Most prompt tokens of one forward; bounds the time to cancel.
        history: How earlier assistant turns come back (`docs/concepts/sessions.md`).
        reuse: `"session"`; `"prefix"` (longest prefix of the rendered text's tokens, no replay) and
            `"none"` exist as baselines.
        isolation: Run the model in a thread of this process or in a process of its own.
        threads: Compute threads of the model's process; None leaves torch's setting. Only used with
            `isolation="process"`, since a host's settings are not ours.
        max_queue: Requests that may wait before `CapacityError`.
        reproducible: Nothing that is measured while it runs decides how a turn is computed: kernel
            paths and the cost table are fixed, and the drafting controller reads counters, never
            clocks. The same requests in the same order are then computed the same way.
        audit: Compute every decode step in one shape, whatever was drafted, so that bfloat16 output
            does not depend on the drafter. Implies `reproducible`; costs speed
            (`docs/concepts/lossless.md`).
    """

    model: str = "nano"
    drafter: str = "auto"
    revision: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    max_context: int | None = None
    max_kv_bytes: int | None = None
    prefill_chunk: int = 256
    history: HistoryMode = "auto"
    reuse: ReusePolicy = "session"
    isolation: Isolation = "thread"
    threads: int | None = None
    max_queue: int = 64
    reproducible: bool = False
    audit: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float64"))
        _one_of("history", self.history, ("auto", "as_generated", "template"))
        _one_of("reuse", self.reuse, ("session", "prefix", "none"))
        _one_of("isolation", self.isolation, ("thread", "process"))
        for name in ("max_context", "max_kv_bytes", "prefill_chunk", "threads", "max_queue"):
            value = _make_whole(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"{name} is {value!r}, but must be at least 1; leave it out for the default"
                )
        for name in ("reproducible", "audit"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name} is {value!r}; use True or False")
        if self.audit:
            object.__setattr__(self, "reproducible", True)  # frozen, and still under construction

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, **overrides: object
    ) -> EngineConfig:
        """Read `DLITE_<FIELD>` variables (e.g. `DLITE_MODEL`), then apply overrides.

        An override that is None changes nothing.

        Raises:
            ConfigurationError: A variable does not parse, or an override names no field.
        """
        environ = os.environ if environ is None else environ
        known = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, object] = {}
        for name, kind in known.items():
            raw = environ.get(f"DLITE_{name.upper()}")
            if raw is not None:
                values[name] = _parse(name, raw, kind)
        for name, value in overrides.items():
            if name not in known:
                raise ConfigurationError(
                    f"{name!r} is not an engine option; known: {', '.join(sorted(known))}"
                )
            if value is not None:
                values[name] = value
        return cls(**values)  # type: ignore[arg-type]  # names checked above, values in __post_init__


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled. None means: what the checkpoint's `generation_config.json` says.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with at least this probability, in (0, 1].
        max_tokens: Most tokens to generate; None: what the context leaves.
        seed: In [-2**63, 2**64), what message formats can carry; None draws 64 fresh bits, which
            the turn's stats return.
        choice_index: Which of several independent answers to the same prompt.
        stop_token_ids: Extra ids that end the turn, beside the checkpoint's own.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    choice_index: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, numbers.Real):
                raise ConfigurationError(f"{name} is {value!r}; use a number")
        for name in ("top_k", "max_tokens", "seed", "choice_index"):
            _make_whole(self, name)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigurationError(f"seed is {self.seed!r}; use a number in [-2**63, 2**64)")
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.temperature is not None and not 0.0 <= self.temperature < float("inf"):
            raise ConfigurationError(
                f"temperature is {self.temperature!r}; use 0 (greedy) or a positive number"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ConfigurationError(
                f"top_k is {self.top_k!r}; use 0 (all tokens) or a positive number"
            )
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigurationError(f"top_p is {self.top_p!r}; use a number in (0, 1]")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens is {self.max_tokens!r}; use at least 1")

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill every None from `defaults`."""
        missing = {
            f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None
        }
        return replace(self, **missing)


def _make_whole(options: object, name: str) -> int | None:
    """Turn a field into a plain int (numpy's are neither JSON nor picklable everywhere)."""
    value = getattr(options, name)
    if value is None:
        return None
    try:
        whole = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name} is {value!r}; use a whole number") from None
    object.__setattr__(options, name, whole)  # frozen, and still under construction
    return whole


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name} is {value!r}; use one of {', '.join(map(repr, allowed))}")


def _parse(name: str, raw: str, kind: str) -> int | bool | str:
    """The value of a variable, by the annotation of its field."""
    if kind == "bool":
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if raw.lower() not in known:
            raise ConfigurationError(f"DLITE_{name.upper()} is {raw!r}; use true or false")
        return known[raw.lower()]
    if "int" not in kind:
        return raw
    try:
        return int(raw)
    except ValueError:
        raise ConfigurationError(f"DLITE_{name.upper()} is {raw!r}; use a whole number") from None
