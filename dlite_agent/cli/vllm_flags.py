"""Values of vLLM's flags, as ours; what cannot be honoured is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.errors import ConfigurationError
from dlite_agent.generation_config import read_generation_config

__all__ = ["Speculation", "check_kv_cache_dtype", "origins", "sampling_defaults", "speculation"]

# vLLM's methods that need no model of their own, and ours; by their names the drafter that it is.
_WITHOUT_MODEL = {"suffix": "suffix", "ngram": "lookup", "dlite": "dlite", "auto": "auto"}
_WITH_MODEL = ("dlite", "dspark", "dflash", "dflash2", "eagle3")
_KEYS = ("method", "model", "num_speculative_tokens")
_ADVICE = (
    'send {"model": FOLDER or hub name}, or {"method": "suffix"}, and how many tokens at most as '
    '"num_speculative_tokens"'
)
_NEUTRAL = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


class Speculation(NamedTuple):
    """Options of the engine, by their names in `EngineConfig`; None leaves one as it is."""

    drafter: str | None = None
    max_draft_tokens: int | None = None


def speculation(given: str | None) -> Speculation:
    """The engine's options that `--speculative-config` means; none where it is not given.

    A drafter that is named by `model` is of the kind that its own `config.json` says; `method` may
    stand beside it.

    Raises:
        ConfigurationError: It is no JSON object, or holds what we cannot do.
    """
    if given is None:
        return Speculation()
    try:
        config: Any = json.loads(given)
    except ValueError as error:
        raise _refused(given, f"{error}") from error
    if not isinstance(config, dict) or not config:
        raise _refused(given, "it names nothing")
    unknown = sorted(config.keys() - set(_KEYS))
    if unknown:
        raise _refused(given, f"{unknown[0]!r} is not known, only {', '.join(map(repr, _KEYS))}")
    count = config.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or count < 1):
        raise _refused(given, f"num_speculative_tokens is {count!r} and no number from 1 on")
    return Speculation(_drafter(given, config), count)


def check_kv_cache_dtype(given: str, config: EngineConfig) -> None:
    """See that keys and values are kept as `--kv-cache-dtype` says: in the type of the weights.

    Raises:
        ConfigurationError: It is another type.
    """
    if given in ("auto", config.dtype):
        return
    advice = "leave it out"
    if given in ("float32", "bfloat16", "float64"):
        advice = f"use --dtype {given} as well, or leave it out"
    raise ConfigurationError(
        f"--kv-cache-dtype is {given!r} and --dtype is {config.dtype!r}, but keys and values are "
        f"kept in the type of the weights; {advice}"
    )


def origins(given: str | None) -> tuple[str, ...]:
    """The web sites of `--allowed-origins`.

    Raises:
        ConfigurationError: It is no JSON list of texts.
    """
    try:
        sites: Any = json.loads(given or "[]")
    except ValueError:
        sites = None
    if not isinstance(sites, list) or not all(isinstance(site, str) for site in sites):
        raise ConfigurationError(
            f"--allowed-origins is {given!r}; send a JSON list of texts such as "
            '["https://example.org"]'
        )
    return tuple(sites)


def sampling_defaults(generation_config: str) -> SamplingParams | None:
    """What `--generation-config` means: `auto` (None here), `vllm`, or a folder.

    `auto` is the checkpoint's own file, and `vllm` the model's plain distribution.

    Raises:
        ConfigurationError: See `read_generation_config`.
    """
    if generation_config == "auto":
        return None
    if generation_config == "vllm":
        return _NEUTRAL
    return read_generation_config(Path(generation_config))


def _drafter(given: str, config: dict[str, Any]) -> str | None:
    method, model = config.get("method"), config.get("model")
    if model is not None:
        if not isinstance(model, str) or not model:
            raise _refused(given, f"model is {model!r} and no text")
        if method not in (None, *_WITH_MODEL):
            known = ", ".join(map(repr, _WITH_MODEL))
            raise _refused(given, f"method is {method!r}, and a model drafts by one of {known}")
        return model
    if method is None:
        return None
    if not isinstance(method, str) or method not in _WITHOUT_MODEL:
        known = ", ".join(map(repr, _WITHOUT_MODEL))
        raise _refused(given, f"method is {method!r}; without a model it is one of {known}")
    return _WITHOUT_MODEL[method]


def _refused(given: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"--speculative-config is {given!r}: {why}; {_ADVICE}")
