"""What `LLM.get_metrics` returns: the figures of all texts so far, in the classes of vLLM's reader.

A program of vLLM's imports these classes from `vllm.v1.metrics.reader`.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.api.outputs import RequestOutput
from coordinator.text.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure; its name is that in vLLM, and its labels name the model."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int = 0


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that may also shrink."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters, by a place."""

    values: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How many values were at most as large as each bound; none is kept here."""

    count: int = 0
    sum: float = 0.0
    buckets: Mapping[str, int] = field(default_factory=dict)


class Totals:
    """Counts over all texts that have ended, in whatever thread they were read.

    model  name of the target, for the labels
    """

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                *("prompt_tokens", "generation_tokens", "request_success"),
                *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
                "spec_decode_num_accepted_tokens",
            ),
            0,
        )
        self._by_place: list[int] = []

    def ended(self, part: RequestOutput) -> None:
        """Count a text by its last part."""
        (made,) = part.outputs
        if made.metrics is None:  # it could not be completed
            return
        with self._lock:
            self._counts["prompt_tokens"] += len(part.prompt_token_ids)
            self._counts["request_success"] += 1
            self._add(made.metrics)

    def _add(self, metrics: Metrics) -> None:
        self._counts["generation_tokens"] += metrics.num_tokens
        found = metrics.speculative_decoding
        if found is None:
            return
        self._counts["spec_decode_num_drafts"] += found.num_spec_steps
        self._counts["spec_decode_num_draft_tokens"] += found.num_draft_tokens
        self._counts["spec_decode_num_accepted_tokens"] += found.num_accepted_draft_tokens
        places = [round(share * found.num_spec_steps) for share in found.acceptance_by_position]
        longer = max(len(places), len(self._by_place))
        pairs = zip(_filled(self._by_place, longer), _filled(places, longer), strict=True)
        self._by_place = [before + new for before, new in pairs]

    def metrics(self) -> list[Metric]:
        """Return all figures so far."""
        with self._lock:
            counts: list[Metric] = [
                Counter(f"vllm:{name}", self._labels, value) for name, value in self._counts.items()
            ]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            return [*counts, Vector(name, self._labels, list(self._by_place))]


def _filled(values: list[int], length: int) -> list[int]:
    return [*values, *(0 for _ in range(length - len(values)))]
