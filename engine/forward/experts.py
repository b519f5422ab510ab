"""Mixtures of experts in recorded passes: a form in which no number has to reach the host.

transformers has several forms. Which one runs is a word in the configuration. The usual one
(`grouped_mm`) sorts the rows by their experts and leaves the rest to a kernel of torch, which does
it on the device only in bfloat16 and only on some GPUs; elsewhere it fetches how many rows each
expert has. The form below needs no such numbers. It is taken for recorded passes alone, where the
usual one cannot be recorded: over the many rows of a prompt it would compute far too much.
"""

from types import TracebackType
from typing import Any

import torch

_NAME = "slipstream_recorded"
# Copying an expert's weights for each row that wants them moves them three times.
_MOVES_PER_COPY = 3


class RecordedExperts:
    """As a context: the experts of a model compute in the form for recordings, if `is_used`.

    is_used  False until somebody finds that the usual form cannot be recorded
    """

    def __init__(self, model: Any) -> None:
        configs = [part.config for part in model.modules() if _has_experts(part)]
        self._configs = list({id(config): config for config in configs}.values())
        self._usual: list[str] = []
        self.is_used = False

    def __bool__(self) -> bool:
        """Whether the model has experts that can compute in this form."""
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


def _has_experts(part: Any) -> bool:
    """Whether transformers lets a module's experts compute in other forms, all on this device."""
    return getattr(part, "_is_expert_parallel", True) is False and hasattr(part, "down_proj")


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # slow to import

    ALL_EXPERTS_FUNCTIONS[_NAME] = compute


def compute(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return what the chosen experts make of each row, added up by their weights.

    experts  the module of transformers
    hidden   [n, hidden_size]
    chosen   [n, k] int64: of each row
    weights  [n, k]

    Returns [n, hidden_size] of the type of `hidden`.
    """
    if chosen.numel() * _MOVES_PER_COPY <= experts.num_experts:
        from transformers.integrations.moe import batched_mm_experts_forward

        return batched_mm_experts_forward(experts, hidden, chosen, weights)
    out = _all_experts(experts, hidden)
    rows = torch.arange(len(hidden), device=hidden.device)
    picked = out[chosen, rows[:, None]]  # [n, k, hidden_size]
    return (picked * weights[:, :, None]).sum(1).to(hidden.dtype)


def _all_experts(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What every expert makes of every row, [experts, n, hidden_size]: each is read once."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    out = _product(experts, first, hidden)
    out = experts._apply_gate(out) if experts.has_gate else experts.act_fn(out)
    out = _product(experts, "down_proj", out)
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def _product(experts: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """Multiply [n, in] or [experts, n, in] with a matrix of each expert."""
    matrices = getattr(experts, name)
    out = torch.matmul(x, matrices if experts.is_transposed else matrices.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out
