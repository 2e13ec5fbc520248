"""`/metrics`: vLLM's names behind a prefix of ours; its dashboards need one word changed."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dlite_agent.outputs import Generation

__all__ = ["ServerMetrics"]

# vLLM's own limits.
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ServerMetrics:
    """Counts one server's turns.

    Args:
        prefix: Of all names, e.g. `dlite:`.
        model: Value of the label `model_name`.
        num_running: Turns that run now.
        num_waiting: Turns that wait now.
    """

    def __init__(
        self,
        prefix: str,
        model: str,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        self._prefix = prefix
        self._model = model
        self._registry = CollectorRegistry()
        self._gauge("num_requests_running", "Turns that run").set_function(num_running)
        self._gauge("num_requests_waiting", "Turns that wait").set_function(num_waiting)
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Used share of the KV budget, 0 to 1")
        self._sessions = self._gauge("num_sessions", "Sessions that hold KV")
        self._tokens = {
            name: self._counter(name, text)
            for name, text in (
                ("prompt_tokens", "Tokens of prompts, cached ones included"),
                ("generation_tokens", "Sampled tokens"),
                ("prefix_cache_queries", "Prompt tokens that were looked for in sessions"),
                ("prefix_cache_hits", "Prompt tokens that were found there"),
                ("spec_decode_num_drafts", "Decode rounds"),
                ("spec_decode_num_draft_tokens", "Drafted tokens"),
                ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted"),
            )
        }
        self._ended = Counter(
            f"{prefix}request_success",
            "Turns that ended",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._refused = self._counter("request_errors", "Turns that failed or were cancelled")
        self._times = {
            name: self._histogram(name, text, buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "From the request to the first token", _TTFT_S),
                ("inter_token_latency_seconds", "Decode time by token", _TOKEN_S),
                ("e2e_request_latency_seconds", "From the request to its end", _REQUEST_S),
                ("request_queue_time_seconds", "Waiting", _REQUEST_S),
                ("request_prefill_time_seconds", "Prefill", _REQUEST_S),
                ("request_decode_time_seconds", "All rounds", _REQUEST_S),
                ("request_inference_time_seconds", "Prefill and rounds", _REQUEST_S),
                ("request_prompt_tokens", "Tokens of a prompt", _TOKENS),
                ("request_generation_tokens", "Tokens of an answer", _TOKENS),
            )
        }

    def note(self, generation: Generation) -> None:
        """Count a turn that ended."""
        stats = generation.stats
        self._ended.labels(self._model, generation.finish_reason).inc()
        for name, count in (
            ("prompt_tokens", stats.prompt_tokens),
            ("generation_tokens", stats.completion_tokens),
            ("prefix_cache_queries", stats.prompt_tokens),
            ("prefix_cache_hits", stats.cached_tokens),
            ("spec_decode_num_drafts", stats.rounds),
            ("spec_decode_num_draft_tokens", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", stats.accepted_tokens),
        ):
            self._tokens[name].inc(count)
        for name, value in (
            ("time_to_first_token_seconds", stats.ttft_s),
            ("e2e_request_latency_seconds", stats.total_s),
            ("request_queue_time_seconds", stats.queue_s),
            ("request_prefill_time_seconds", stats.prefill_s),
            ("request_decode_time_seconds", stats.decode_s),
            ("request_inference_time_seconds", stats.model_s),
            ("request_prompt_tokens", stats.prompt_tokens),
            ("request_generation_tokens", stats.completion_tokens),
        ):
            self._times[name].observe(value)
        if stats.completion_tokens > 1:
            per_token_s = stats.decode_s / (stats.completion_tokens - 1)
            self._times["inter_token_latency_seconds"].observe(per_token_s)

    def note_failure(self) -> None:
        """Count a turn that has no end: it failed, or nobody wanted it any more."""
        self._refused.inc()

    def note_memory(self, used_bytes: int, free_bytes: int, num_sessions: int) -> None:
        """Say what the sessions take now."""
        self._kv_usage.set(used_bytes / max(1, used_bytes + free_bytes))
        self._sessions.set(num_sessions)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(self._prefix + name, text, ("model_name",), registry=self._registry)
        return gauge.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(self._prefix + name, text, ("model_name",), registry=self._registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            self._prefix + name, text, ("model_name",), registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model)
