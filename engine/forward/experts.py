"""Mixtures of experts on a GPU without the host waiting for any number, as recordings need it.

transformers has several implementations; a field of the configuration selects one. The usual one
(`grouped_mm`) sorts the rows by expert and calls a kernel of torch that runs entirely on the device
only in bfloat16 and on some GPUs; otherwise the host has to fetch the number of rows of each
expert, which cannot be recorded. The implementation here needs no such numbers. It is used only if
the usual one cannot be recorded, then for all passes: a host that waits in each layer of a prompt
hears no messages meanwhile. It has three forms, chosen by sizes that the host knows:

    copies  few rows copy the weights of their experts
    all     more rows are multiplied with the weights of all experts
    blocks  the many rows of a prompt are sorted by expert and divided into blocks, each of one
            expert, whose weights are copied for the block; how many blocks may be needed at most
            follows from the number of rows, and which expert a block has stays on the device
"""

from types import TracebackType
from typing import Any

import torch

_NAME = "slipstream_recorded"
# Copying an expert's weights for each row that uses it moves those bytes three times.
_MOVES_PER_COPY = 3
_BLOCK_ROWS = 128
# Blocks are used if they multiply at most this share of the rows that all experts would: the copies
# of weights take time too.
_SHARE_OF_BLOCKS = 0.5
_COPIED_BYTES = 256 << 20  # most bytes of weights that are copied at once, if a block needs no more


class RecordedExperts:
    """Context in which a model's experts run the implementation of this file, if `is_used`.

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
    num_blocks = _num_blocks(chosen.numel(), experts.num_experts)
    if num_blocks * _BLOCK_ROWS <= _SHARE_OF_BLOCKS * len(hidden) * experts.num_experts:
        picked = _in_blocks(experts, hidden, chosen, num_blocks)
    else:
        rows = torch.arange(len(hidden), device=hidden.device)
        picked = _computed(experts, hidden)[chosen, rows[:, None]]
    return (picked * weights[:, :, None]).sum(1).to(hidden.dtype)


def _num_blocks(num_pairs: int, num_experts: int) -> int:
    """Return how many blocks of one expert each hold the rows' experts, however they are chosen."""
    return num_pairs // _BLOCK_ROWS + min(num_experts, num_pairs)


def _in_blocks(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, num_blocks: int
) -> torch.Tensor:
    """Return the outputs of each row's experts, [n, k, hidden_size]."""
    ids, order = chosen.flatten().sort()
    every = torch.arange(experts.num_experts, device=ids.device)
    ends = torch.searchsorted(ids, every, right=True)  # of each expert's rows among the sorted
    counts = ends.diff(prepend=ends.new_zeros(1))
    # The last rows of an expert's last block are padding, and so are blocks that nobody needs.
    needed = (counts + _BLOCK_ROWS - 1) // _BLOCK_ROWS
    block_ends = needed.cumsum(0)
    moved = _BLOCK_ROWS * (block_ends - needed) - (ends - counts)  # of an expert's rows, by padding
    at = torch.arange(len(ids), device=ids.device) + moved[ids]
    x = hidden.new_zeros(num_blocks * _BLOCK_ROWS, hidden.shape[1])
    x.index_copy_(0, at, hidden[order // chosen.shape[1]])
    numbers = torch.arange(num_blocks, device=ids.device)
    owners = torch.searchsorted(block_ends, numbers, right=True).clamp(max=len(every) - 1)
    x = x.view(num_blocks, _BLOCK_ROWS, -1)
    size = sum(getattr(experts, name)[0].nbytes for name in matrices(experts))
    step = max(1, _COPIED_BYTES // size)
    pairs = zip(torch.split(x, step), torch.split(owners, step), strict=True)
    out = torch.cat([_computed(experts, part, owner) for part, owner in pairs]).flatten(0, 1)
    return torch.empty_like(out[: len(ids)]).index_copy_(0, order, out[at]).view(*chosen.shape, -1)


def matrices(experts: Any) -> tuple[str, str]:
    """Return the names of the matrices of a module of experts, in the order of their use."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _computed(experts: Any, x: torch.Tensor, owners: torch.Tensor | None = None) -> torch.Tensor:
    """Return the outputs of experts for rows, [experts or blocks, n, hidden_size].

    x       [n, hidden_size]: rows for every expert; or [blocks, n, hidden_size]
    owners  [blocks] int64: the expert of each block; None: every expert computes all rows
    """
    up, down = matrices(experts)
    out = _product(experts, up, x, owners)
    out = experts._apply_gate(out) if experts.has_gate else experts.act_fn(out)
    out = _product(experts, down, out, owners)
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def _product(experts: Any, name: str, x: torch.Tensor, owners: torch.Tensor | None) -> torch.Tensor:
    """Return `x` times each owner's matrix `name` (None: each expert's), plus any bias."""

    def of_owners(weights: torch.Tensor) -> torch.Tensor:
        return weights if owners is None else weights[owners]

    weights = of_owners(getattr(experts, name))
    out = torch.matmul(x, weights if experts.is_transposed else weights.transpose(1, 2))
    return out + of_owners(getattr(experts, f"{name}_bias"))[:, None] if experts.has_bias else out
