"""`dlite-agent serve [MODEL]`: an OpenAI-compatible server, with vLLM's flags."""

from __future__ import annotations

import argparse
import gc
from typing import Any

from dlite_agent.cli.console import note
from dlite_agent.cli.model_options import add_model_options
from dlite_agent.cli.vllm_flags import (
    check_kv_cache_dtype,
    origins,
    sampling_defaults,
    speculation,
)
from dlite_agent.config import EngineConfig
from dlite_agent.errors import MissingDependencyError

__all__ = [
    "add_arguments",
    "add_engine_arguments",
    "engine_config",
    "require_server",
    "run",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        default="nano",
        help="nano, a folder in the Hugging Face layout, a GGUF file, or a hub name",
    )
    _add_server_arguments(parser)
    add_engine_arguments(parser)


def require_server(verb: str) -> None:
    """Check that what the extra `server` installs is there.

    Raises:
        MissingDependencyError: It is not.
    """
    try:
        import dlite_agent.serving.server  # noqa: F401  # only whether it can be imported
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{verb} needs the package {error.name!r}, which is not installed; install it with: "
            'pip install "dlite-agent[server]"'
        ) from error


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    require_server("serve")
    from dlite_agent.engine.engine import Engine
    from dlite_agent.serving.host_guard import is_loopback
    from dlite_agent.serving.server import open_listener, serve
    from dlite_agent.serving.settings import ServerSettings

    config = engine_config(arguments)
    settings = ServerSettings(
        model_names=tuple(arguments.served_model_name or ()),
        api_keys=tuple(arguments.api_key or ()),
        tenant_header=arguments.tenant_header,
        allowed_hosts=(arguments.host, *(arguments.allowed_hosts or ())),
        accepts_addresses=not is_loopback(arguments.host),
        allowed_origins=origins(arguments.allowed_origins),
        max_running=config.max_batch,
        max_queue=config.max_queue,
        max_body_bytes=arguments.max_body_bytes,
        metrics_prefix=arguments.metrics_prefix,
        sampling_defaults=sampling_defaults(arguments.generation_config),
        shutdown_timeout_s=arguments.shutdown_timeout,
    )
    if settings.accepts_addresses and not settings.api_keys:
        note(f"whoever reaches {arguments.host} may use this server; --api-key KEY asks for a key")
    listener = open_listener(arguments.host, arguments.port)
    with Engine(config) as engine:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        note(f"serving {config.model} on http://{shown}:{port}/v1")
        # This process does nothing else, and what was imported stays: no collection has to look at
        # it while requests wait.
        gc.collect()
        gc.freeze()
        serve(engine, settings, listener, on_ready=lambda: note(_ready_line(engine)))
        note("stopping: sessions are saved" if config.kv_disk != "off" else "stopping")
    return 0


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's options; `DLITE_*` variables fill what no flag sets.

    Raises:
        ConfigurationError: A flag's value cannot be used.
    """
    drafting = speculation(arguments.speculative_config)
    config = EngineConfig.from_env(
        model=arguments.model,
        drafter=drafting.drafter,
        max_draft_tokens=drafting.max_draft_tokens,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        rope_scaling=arguments.rope_scaling,
        max_context=arguments.max_model_len,
        max_batch=arguments.max_num_seqs,
        max_queue=arguments.max_queue,
        kv_disk=arguments.kv_disk,
        public_prefixes=arguments.public_prefix,
        isolation="process",
    )
    check_kv_cache_dtype(arguments.kv_cache_dtype, config)
    return config


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument(
        "--api-key", action="append", metavar="KEY", help="that clients must send; may be repeated"
    )
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what clients may call the model"
    )
    parser.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="a header that names the tenant; only behind a proxy that sets it, with --api-key",
    )
    parser.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names of this server that are answered without --api-key, beside localhost; * for "
        "any",
    )
    parser.add_argument(
        "--allowed-origins",
        metavar="JSON",
        help="a list of web sites whose pages may use the server, e.g. "
        "'[\"http://localhost:3000\"]'; none by default",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=int,
        default=32 * 2**20,
        metavar="N",
        help="a larger request is refused",
    )
    parser.add_argument("--metrics-prefix", default="dlite:", help="vllm: for its dashboards")
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for turns that run at a stop; then they are cancelled",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the engine behind a server, but for the model."""
    defaults = EngineConfig()
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of one session; default: DLITE_MAX_CONTEXT, else what the model allows",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"most turns that run at once; default: DLITE_MAX_BATCH, else {defaults.max_batch}",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        metavar="N",
        help="most turns that wait beside them; default: DLITE_MAX_QUEUE, else "
        f"{defaults.max_queue}",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float64"),
        help="of weights and KV; default: DLITE_DTYPE, else auto",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="TYPE",
        help="auto, or what --dtype says: it is that of the weights",
    )
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='{"model": FOLDER or hub name} or {"method": "suffix" or "ngram"}, and '
        '"num_speculative_tokens": most of a draft',
    )
    parser.add_argument(
        "--generation-config",
        default="auto",
        metavar="FOLDER",
        help="what a request leaves open: auto is the checkpoint's file, vllm is temperature 1, a "
        "folder is the generation_config.json in it",
    )
    parser.add_argument(
        "--kv-disk", metavar="FOLDER", help="keep sessions there over a restart; auto: a cache"
    )
    parser.add_argument(
        "--public-prefix",
        action="append",
        metavar="FILE",
        help="JSON with the messages and tools that every tenant's prompts may share; repeatable",
    )
    add_model_options(parser)


def _ready_line(engine: Any) -> str:
    info = engine.load()
    return (
        f"ready after {info.load_s:.1f} s: {info.dtype} on {info.device}, {info.max_context} "
        f"tokens of context, drafter {info.drafter}"
    )
