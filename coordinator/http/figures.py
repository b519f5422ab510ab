"""Figures for Prometheus: our own names, and those of vLLM that tools made for vLLM read."""

import time
from collections import Counter as Count
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from coordinator.api.outputs import CompletionOutput
from coordinator.text.metrics import Metrics
from proto.messages import Role

MAX_POSITIONS = 48  # drafts of a pass that are counted by their place in it
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a coordinator, as far as figures tell of them.

    ready          the roles of the nodes that can work, one for each node
    restarts       nodes that took the place of one that had ended, by role
    losses         nodes that had been ready, and ended or fell silent, by role
    round_trips_s  seconds of a message to a node and its answer, by the node's name
    """

    ready: Sequence[Role] = ()
    restarts: Count[Role] = field(default_factory=Count)
    losses: Count[Role] = field(default_factory=Count)
    round_trips_s: Mapping[str, float] = field(default_factory=dict)


class Figures:
    """Counts what texts cost and what speculation did for them.

    model  label of every figure of vLLM
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        labels = ("model_name",)

        def counter(name: str, words: str, *more: str) -> Counter:
            return Counter(name, words, (*labels, *more), registry=self._registry)

        def gauge(name: str, words: str, *more: str) -> Gauge:
            return Gauge(name, words, (*labels, *more), registry=self._registry)

        def histogram(name: str, words: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, words, labels, buckets=buckets, registry=self._registry)

        self._running = gauge("vllm:num_requests_running", "Texts that are being written.")
        self._waiting = gauge("vllm:num_requests_waiting", "Texts that wait for a lane.")
        self._kv_usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of the target's KV cache that texts take, 0 to 1."
        )
        self._kv_room = gauge(
            "slipstream:kv_cache_tokens", "Tokens that fit into the target's KV cache, all lanes."
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._written_tokens = counter("vllm:generation_tokens", "Tokens that were written.")
        self._success = counter(
            "vllm:request_success", "Texts that have ended, by why.", "finished_reason"
        )
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", SECONDS
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens, the mean of a text.", SECONDS
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its last token.", SECONDS
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From the request until a lane was free.", SECONDS
        )
        self._prompt_len = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._text_len = histogram("vllm:request_generation_tokens", "Tokens of a text.", TOKENS)
        self._drafts = counter(
            "vllm:spec_decode_num_drafts", "Target passes that verified at least one draft."
        )
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Verified drafts.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place in the pass.",
            "position",
        )
        self._passes = counter("slipstream:target_passes", "Target passes of texts.")
        self._tokens = counter("slipstream:tokens", "Tokens by where they came from.", "origin")
        self._misses = counter(
            "slipstream:misses", "Passes whose first token was not drafted in time, by why.", "why"
        )
        self._refusals = counter("slipstream:refused_requests", "Refused requests.", "status")
        self._nodes = gauge("slipstream:nodes_ready", "Nodes that can work.", "role")
        self._lanes = gauge("slipstream:lanes", "Most texts that are written at once.")
        self._restarts = counter(
            "slipstream:node_restarts", "Nodes that took the place of one that had ended.", "role"
        )
        self._losses = counter(
            "slipstream:nodes_lost", "Nodes that had been ready, and ended or fell silent.", "role"
        )
        self._counted: Count[tuple[Counter, Role]] = Count()  # what the two count already
        self._round_trips = gauge(
            "slipstream:round_trip_seconds", "Of a message to a node and its answer.", "node"
        )

    def refused(self, status: int) -> None:
        """Count a request that was answered with this HTTP status instead of a text."""
        self._refusals.labels(self._model, str(status)).inc()

    def came(self, made: CompletionOutput, begun: float) -> None:
        """Count a part of a text, whose request came at `begun` (monotonic seconds)."""
        for origin, number in Count(made.token_origins).items():
            self._tokens.labels(self._model, origin).inc(number)
        self._written_tokens.labels(self._model).inc(len(made.token_ids))
        if made.finish_reason is None:
            return
        self._success.labels(self._model, made.finish_reason).inc()
        self._whole.labels(self._model).observe(time.monotonic() - begun)
        if made.metrics is not None:
            self._ended(made.metrics)

    def _ended(self, metrics: Metrics) -> None:
        model = self._model
        self._prompt_tokens.labels(model).inc(metrics.num_prompt_tokens)
        self._prompt_len.labels(model).observe(metrics.num_prompt_tokens)
        self._text_len.labels(model).observe(metrics.num_tokens)
        self._queue.labels(model).observe(metrics.queued_s)
        self._first_token.labels(model).observe(metrics.queued_s + metrics.time_to_first_token_s)
        if metrics.num_tokens > 1:
            self._between.labels(model).observe(metrics.writing_s / (metrics.num_tokens - 1))
        self._passes.labels(model).inc(metrics.num_target_passes)
        for why, number in metrics.misses.items():
            self._misses.labels(model, why).inc(number)
        spec = metrics.speculative_decoding
        if spec is None:
            return
        self._drafts.labels(model).inc(spec.num_spec_steps)
        self._draft_tokens.labels(model).inc(spec.num_draft_tokens)
        self._accepted.labels(model).inc(spec.num_accepted_draft_tokens)
        histogram = spec.acceptance_histogram
        for position in range(min(MAX_POSITIONS, spec.num_spec_tokens)):
            number = sum(histogram[position + 1 :])
            self._accepted_at.labels(model, str(position)).inc(number)

    def text(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_lanes: int,
        max_len: int,
        kv_cache_usage: float,
        nodes: Nodes,
    ) -> bytes:
        """Set the gauges to these numbers, and return all figures in Prometheus' text format.

        max_len  most tokens of a lane
        """
        self._running.labels(self._model).set(num_running)
        self._waiting.labels(self._model).set(num_waiting)
        self._lanes.labels(self._model).set(num_lanes)
        self._kv_room.labels(self._model).set(num_lanes * max_len)
        self._kv_usage.labels(self._model).set(kv_cache_usage)
        for role in Role:
            number = sum(one is role for one in nodes.ready)
            self._nodes.labels(self._model, str(role)).set(number)
            self._count_to(self._restarts, role, nodes.restarts[role])
            self._count_to(self._losses, role, nodes.losses[role])
        self._round_trips.clear()  # of nodes that are gone
        for name, seconds in nodes.round_trips_s.items():
            self._round_trips.labels(self._model, name).set(seconds)
        return generate_latest(self._registry)

    def _count_to(self, counter: Counter, role: Role, number: int) -> None:
        """Raise a counter of a role to a number that is counted elsewhere."""
        counter.labels(self._model, str(role)).inc(number - self._counted[counter, role])
        self._counted[counter, role] = number
