"""Mixtures of experts in recorded passes (CUDA graphs), without the host waiting for any number.

transformers has several implementations; a field of the configuration selects one. The usual one
(`grouped_mm`) sorts the rows by expert and calls a kernel of torch that runs entirely on the device
only in bfloat16 and on some GPUs; otherwise the host has to fetch the number of rows of each
expert, which cannot be recorded. The implementation here needs no such numbers. It is used only for
recorded passes, and only if the usual one cannot be recorded: for the many rows of a prompt it
would compute far too much.
"""

from types import TracebackType
from typing import Any

import torch

_NAME = "slipstream_recorded"
# Copying an expert's weights for each row that uses it moves those bytes three times.
_MOVES_PER_COPY = 3


class RecordedExperts:
    """Context in which a model's experts run the implementation for recordings, if `is_used`.

    is_used  set to True if the usual implementation cannot be recorded; False at first
    """

    def __init__(self, model: Any) -> None:
        configs = [part.config for part in model.modules() if has_experts(part)]
        self._configs = list({id(config): config for config in configs}.values())
        self._usual: list[str] = []
        self.is_used = False

    def __bool__(self) -> bool:
        """Return True if the model has experts that can run this implementation."""
        return bool(self._configs)

    def __enter__(self) -> None:
        if not self.is_used:
            return
        _register()
        self._usual = [config._experts_implementation_internal for config in self._configs]
        for config in self._configs:
            config._experts_implementation_internal = _NAME

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if not self.is_used:
            return
        for config, usual in zip(self._configs, self._usual, strict=True):
            config._experts_implementation_internal = usual


def has_experts(part: Any) -> bool:
    """True if the module has experts whose implementation can be selected, all on this device."""
    is_whole = getattr(part, "_is_expert_parallel", True) is False
    return is_whole and isinstance(getattr(part, "down_proj", None), torch.nn.Parameter)


def _register() -> None:
    """Register `compute` with transformers as an implementation of experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # slow to import

    ALL_EXPERTS_FUNCTIONS[_NAME] = compute


def compute(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each row's chosen experts' outputs, [n, hidden_size].

    The result has the dtype of `hidden`.

    experts  transformers' module of experts
    hidden   [n, hidden_size]
    chosen   [n, k] int64: the experts of each row
    weights  [n, k]: their weights
    """
    if chosen.numel() * _MOVES_PER_COPY <= experts.num_experts:
        from transformers.integrations.moe import batched_mm_experts_forward

        return batched_mm_experts_forward(experts, hidden, chosen, weights)
    out = _all_experts(experts, hidden)
    rows = torch.arange(len(hidden), device=hidden.device)
    picked = out[chosen, rows[:, None]]  # [n, k, hidden_size]
    return (picked * weights[:, :, None]).sum(1).to(hidden.dtype)


def _all_experts(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return every expert's output for every row, [experts, n, hidden_size]."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    out = _product(experts, first, hidden)
    out = experts._apply_gate(out) if experts.has_gate else experts.act_fn(out)
    out = _product(experts, "down_proj", out)
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def _product(experts: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return `x` [n, in] or [experts, n, in] times each expert's matrix `name`, plus any bias."""
    matrices = getattr(experts, name)
    out = torch.matmul(x, matrices if experts.is_transposed else matrices.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out
