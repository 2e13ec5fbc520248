"""The options of `ChatDLite`."""

from __future__ import annotations

import builtins
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from pydantic import ConfigDict, Field, SecretStr, SkipValidation

from dlite_agent.backend import ChatBackend
from dlite_agent.config import HistoryMode, Isolation, Quantization

__all__ = ["ENGINE_OPTIONS", "ChatOptions"]

ENGINE_OPTIONS = (
    *("model", "drafter", "revision", "device", "dtype", "quantize", "rope_scaling"),
    *("max_context", "max_kv_bytes", "kv_disk", "isolation", "max_batch", "max_queue"),
    *("reproducible", "audit"),
)


class ChatOptions(BaseChatModel):
    """What `ChatDLite` is made with; see there."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str = "nano"
    """`"nano"`, a folder in the Hugging Face layout, a GGUF file, or a hub name."""
    drafter: str = "auto"
    """`"auto"`, `"null"` (plain decoding), `"suffix"` or `"lookup"`."""
    revision: str | None = None
    """Hub revision."""
    temperature: float | None = None
    """0 is greedy; None: what the checkpoint says, as for all sampling options."""
    top_p: float | None = None
    """Keep the smallest set of tokens with at least this probability."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 (or -1) keeps all."""
    min_p: float | None = None
    """Keep tokens with at least this share of the best one's probability."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens that the answer holds, in [-2, 2]."""
    frequency_penalty: float | None = None
    """The same, once for each time that the answer holds the token."""
    repetition_penalty: float | None = None
    """Makes tokens of the prompt and of the answer less probable; 1 is off."""
    logit_bias: builtins.dict[int, float] | None = None
    """Added to logits, by token id; each in [-100, 100]."""
    logprobs: bool | None = None
    """Report the log-probability of every token in `response_metadata["logprobs"]`."""
    top_logprobs: int | None = None
    """And of this many best tokens at its position, up to 20."""
    n: int = 1
    """How many answers; `generate` returns them all, `invoke` the first."""
    max_tokens: int | None = None
    """Most tokens of an answer; None: what the context leaves."""
    seed: int | None = None
    """Makes sampling repeatable; None draws one, which the answer's metadata has."""
    stop: list[str] | str | None = None
    """Strings that end the content; no part of it. Thoughts and calls are not searched."""
    thinking_budget: int | None = None
    """Most tokens of thoughts; then they are closed. None is no limit."""
    enable_thinking: bool | None = None
    """Passed to the chat template; None leaves its default."""
    history: HistoryMode = "auto"
    """How earlier assistant turns come back: `auto`, `as_generated` or `template`."""
    device: str = "auto"
    """`"auto"`, `"cpu"`, `"cuda"` or `"cuda:N"`."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of weights and KV."""
    quantize: Quantization | None = None
    """`"int8"`: weights in 8 bits."""
    rope_scaling: builtins.dict[str, Any] | None = None
    """Stretches the positions, in the words of `config.json`."""
    max_context: int | None = None
    """Most tokens of prompt and answer; None: what the checkpoint allows."""
    max_kv_bytes: int | None = None
    """Budget of the KV pool; None: a quarter of the free memory."""
    kv_disk: str = "off"
    """Keep sessions on disk for the next process: `"auto"` or a folder."""
    isolation: Isolation = "thread"
    """Run the model in a thread of this process or in a process of its own."""
    max_batch: int = 16
    """Turns that run at once and share each forward."""
    max_queue: int = 64
    """Turns that may wait beside them; further ones wait for a place."""
    reproducible: bool = False
    """Nothing that is measured decides how a turn is computed."""
    audit: bool = False
    """bfloat16 output does not depend on the drafter; slower."""
    session_id: str | None = None
    """Where to look first for earlier turns; None: the LangGraph thread, if there is one."""
    engine: SkipValidation[ChatBackend] | None = Field(default=None, exclude=True, repr=False)
    """A backend of your own, in place of the shared engine of these options. You close it."""
    streaming: bool = False
    """Set to True, `invoke` streams inside (for callbacks); set to False, nothing ever streams."""
    stream_arguments: bool = False
    """Stream the arguments of a call as they come, for who shows them. Else they come at the end,
    whole: what is merged of a stream that was left half-way never has a call that was cut."""
    base_url: str | None = None
    """A server (`dlite-agent serve`) that runs the model, in place of this process; `model` is then
    its name there, and `"nano"` the server's first."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """The server's; without `base_url` there is nobody to authenticate to."""
    max_retries: int | None = None
    """No effect: nothing is sent that could be lost. See `with_retry`."""
    timeout: float | None = None
    """Most seconds to wait for an answer, loading included; in a stream, for each chunk."""
