"""How a server answers: names, keys, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from dlite_agent.config import SamplingParams
from dlite_agent.errors import ConfigurationError

__all__ = ["ServerSettings", "tenant_name"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything about a server that is no property of its model.

    Attributes:
        model_names: What clients may call the model; the first one is reported. Empty: the
            backend's own name.
        api_keys: Keys that are accepted; empty: everybody is.
        tenant_header: A header that names the tenant of a request. Only for a proxy that sets it
            itself: whoever has a key may send any name.
        allowed_hosts: Names by which clients reach a server without keys, beside those of its own
            machine; `"*"` for any (`host_guard`).
        accepts_addresses: Also by any address: it listens for other machines.
        allowed_origins: Web sites whose pages may use the server (CORS), as browsers spell them
            (`https://example.org`); `"*"` for all.
        max_running: Turns that the backend runs at once.
        max_queue: Turns that may wait beside them; the next one is told to try again (429).
        max_body_bytes: Largest body of a request.
        metrics_prefix: Of every metric's name.
        keep_alive_s: Longest silence of a stream; then a comment is sent.
        headers_within_s: A stream's headers wait so long for a refusal, which then has a status of
            its own; afterwards it is an event of the stream.
        sampling_defaults: What a request leaves open, in place of the checkpoint's own; its
            `stop_token_ids` end every turn. Or None.
        shutdown_timeout_s: How long a stop waits for running turns before it cancels them.

    Raises:
        ConfigurationError: A key is empty, or the header is trusted from everybody.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    tenant_header: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    accepts_addresses: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_running: int = 16
    max_queue: int = 64
    max_body_bytes: int = 32 * 2**20
    metrics_prefix: str = "dlite:"
    keep_alive_s: float = 5.0
    headers_within_s: float = 0.25
    sampling_defaults: SamplingParams | None = None
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ConfigurationError("an API key is ''; use one that nobody guesses, or no key")
        if self.tenant_header and not self.api_keys:
            raise ConfigurationError(
                f"tenant_header is {self.tenant_header!r} without a key, so that everybody might "
                "send it; give the proxy an API key"
            )


def tenant_name(parts: Sequence[str]) -> str:
    """One name for a key, a header and a salt; nothing where all are empty.

    A salt counts inside its key: no client reaches another key's sessions by guessing its salt.
    """
    if not any(parts):
        return ""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
