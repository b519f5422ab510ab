"""Mixtures of experts on a CPU: one product for each expert that a pass uses, with packed weights.

transformers sorts the rows by expert and multiplies group by group, with each expert's matrices as
the checkpoint has them. For a few rows that reads memory at a fraction of its speed. Here each
expert's matrices may be laid out anew at load (`operators.packed_product`), as the fused forward
does with all others. Whether that is faster depends on the shape, the type and the processor, so it
is timed for one module of each shape: transformers' form, ours with the matrices as they are, and
ours with packed ones.

In reproducible mode nothing is timed. How many rows an expert gets depends on the other rows of the
pass, and a product's last bits depend on its number of rows. So there each expert that is used
computes all rows of the pass, and every row picks the results of its own experts.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from engine.forward.experts import has_experts, matrices
from engine.forward.masks import MASK_BITS
from engine.forward.operators import Product, packed_product, unmap
from engine.quantised.cpu_products import tiled_product
from engine.timing import Decide, Form, quickest

logger = logging.getLogger(__name__)

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function: (hidden [n, hidden_size], chosen [n, k] int64, weights [n, k]) -> [n, hidden_size]"""

_USUAL, _SORTED, _PACKED = _NAMES = "transformers' own", "sorted", "sorted and packed"
_TIMED_ROWS = 1, 8  # a plain step, and a pass that verifies drafts


class SortedExperts:
    """Computes one module of experts; its call has the signature of the module's forward."""

    def __init__(
        self, part: Any, products: Mapping[str, Sequence[Product]], *, is_fixed: bool
    ) -> None:
        """Compute what `part`, transformers' module of experts, does.

        products  name of a matrix -> the product of each expert with it
        is_fixed  True: a row's last bits must not depend on the other rows of a pass
        """
        self._part = part
        self._up, self._down = (products[name] for name in matrices(part))
        self._is_fixed = is_fixed

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each row's chosen experts' outputs, [n, hidden_size].

        hidden   [n, hidden_size]
        chosen   [n, k] int64: the experts of each row
        weights  [n, k]: their weights
        """
        # A prompt has as many rows wherever its text comes, so its groups are always the same.
        each = self._all_rows if self._is_fixed and len(hidden) <= MASK_BITS else self._own_rows
        return (each(hidden, chosen) * weights[:, :, None]).sum(1).to(hidden.dtype)

    def _own_rows(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each row's experts, [n, k, hidden_size]; no row is computed twice.

        Rows are sorted by expert, so that each expert has consecutive ones.
        """
        ids, order = chosen.flatten().sort()
        counts = [(expert, len(tuple(same))) for expert, same in groupby(ids.tolist())]
        sizes = [count for _, count in counts]
        rows = torch.split(hidden[order // chosen.shape[1]], sizes)
        up = [self._up[expert](x) for (expert, _), x in zip(counts, rows, strict=True)]
        gated = torch.split(self._gated(torch.cat(up)), sizes)
        down = [self._down[expert](x) for (expert, _), x in zip(counts, gated, strict=True)]
        out = self._normed(torch.cat(down))
        return torch.empty_like(out).index_copy_(0, order, out).view(*chosen.shape, -1)

    def _all_rows(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each row's experts, as `_own_rows`; each expert computes all rows.

        So all products have as many rows as the pass, whatever the other rows choose.
        """
        used = sorted(set(chosen.flatten().tolist()))
        outs = [
            self._normed(self._down[expert](self._gated(self._up[expert](hidden))))
            for expert in used
        ]
        place = torch.searchsorted(torch.tensor(used), chosen)
        return torch.stack(outs)[place, torch.arange(len(hidden))[:, None]]

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the activation makes of the first products' outputs."""
        part = self._part
        gated: torch.Tensor = part._apply_gate(x) if part.has_gate else part.act_fn(x)
        return gated

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last products' outputs, normed where the family does that."""
        part = self._part
        normed: torch.Tensor = part.post_expert_norm(x) if part.has_post_expert_norm else x
        return normed


class _ByRows:
    """Runs one form for passes of one row, another for all others."""

    def __init__(self, one: Run, several: Run) -> None:
        self._one, self._several = one, several

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return (self._one if len(hidden) == 1 else self._several)(hidden, chosen, weights)


def take_over(model: Any, decide: Decide, *, timed: bool, is_by_row: bool = False) -> None:
    """Let a model's experts run in the fastest form, in place; packed weights replace the model's.

    Works one expert at a time (where it is timed: one module), so that memory holds all weights
    once. Experts that transformers computes in a way of the family's own are left as they are.

    decide  chooses the form from the timed ones
    timed   False: reproducible mode
    is_by_row  True: by our own products, whose rows do not depend on each other; nothing is timed
    """
    found: dict[object, tuple[str, str]] = {}
    for part in filter(has_experts, model.modules()):
        if isinstance(part.forward, SortedExperts | _ByRows):
            continue  # by an earlier call
        weights = [getattr(part, name) for name in matrices(part)]
        key = tuple((weight.shape, weight.dtype) for weight in weights)
        if is_by_row:
            tiled = _packed(part, leave=False, layout=tiled_product)
            if tiled is not None:
                part.forward = SortedExperts(part, tiled, is_fixed=False)
                continue
        if not timed:
            packed = _packed(part, leave=False)
            part.forward = SortedExperts(part, packed or _plain(part), is_fixed=True)
            continue
        if key not in found:
            found[key] = _quickest(part, decide)
            logger.info("experts: for 1 row %s, for more %s", *found[key])
        part.forward = _form_of(part, *found[key])


def _quickest(part: Any, decide: Decide) -> tuple[str, str]:
    """Return the names of the fastest forms for one row and for several, for experts like `part`.

    Packed matrices serve passes of all numbers of rows, so they must be faster for both.
    """
    forms: dict[str, Run] = {
        _USUAL: part.forward,
        _SORTED: SortedExperts(part, _plain(part), is_fixed=False),
    }
    packed = _packed(part, leave=True)
    if decide(packed is not None, (False, True)):  # all ranks must time the same forms
        forms[_PACKED] = SortedExperts(part, packed or _plain(part), is_fixed=False)

    def names() -> tuple[str, str]:
        one, several = (
            # Any order: a group's product has another one for other numbers of rows anyway.
            quickest(
                [Form(name, name, partial(run, *rows)) for name, run in forms.items()],
                decide,
                any_order=True,
            )
            for rows in (_some_rows(part, count) for count in _TIMED_ROWS)
        )
        return one, several

    found = names()
    if _PACKED in forms and found != (_PACKED, _PACKED):
        del forms[_PACKED]
        found = names()
    return found


def _form_of(part: Any, one: str, several: str) -> Run:
    """Return the form of a module of experts, given the names for one row and for several."""
    if _PACKED in (one, several):
        packed = _packed(part, leave=False)
        return SortedExperts(part, packed or _plain(part), is_fixed=False)
    forms = {_USUAL: part.forward, _SORTED: SortedExperts(part, _plain(part), is_fixed=False)}
    return forms[one] if one == several else _ByRows(forms[one], forms[several])


def _some_rows(part: Any, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random inputs of `count` rows for a module of experts."""
    random = torch.Generator().manual_seed(count)
    weight = part.down_proj
    size = weight.shape[2] if part.is_transposed else weight.shape[1]
    hidden = torch.randn(count, size, generator=random).to(weight.dtype)
    num_chosen = min(_num_chosen(part), part.num_experts)
    scores = torch.rand(count, part.num_experts, generator=random)
    weights = torch.full((count, num_chosen), 1 / num_chosen, dtype=weight.dtype)
    return hidden, scores.topk(num_chosen, 1).indices, weights


def _num_chosen(part: Any) -> int:
    """Return how many experts a row has, by the configuration; 2 where it does not say."""
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k"):
        found = getattr(part.config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return 2


def _of_each(part: Any, name: str) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each expert's matrix `name` [out, in], a view, and its bias [out] or None."""
    weights = getattr(part, name).detach()
    biases = getattr(part, f"{name}_bias").detach() if part.has_bias else [None] * len(weights)
    for weight, bias in zip(weights, biases, strict=True):
        yield weight.t() if part.is_transposed else weight, bias


def _plain(part: Any) -> Mapping[str, Sequence[Product]]:
    """Return the products with all matrices as they are."""
    return {
        name: [partial(F.linear, weight=weight, bias=bias) for weight, bias in _of_each(part, name)]
        for name in matrices(part)
    }


Layout = Callable[[torch.Tensor, torch.Tensor | None], Product | None]
"""Function: (weight [out, in], bias [out] or None) -> the product with a copy laid out anew"""


def _packed(
    part: Any, *, leave: bool, layout: Layout | None = None
) -> Mapping[str, Sequence[Product]] | None:
    """Return the products with packed copies of all matrices; None if they cannot be packed.

    leave   False: the module's own matrices are freed (they have no elements afterwards)
    layout  how they are laid out; None: as `packed_product` does
    """
    made: dict[str, list[Product]] = {name: [] for name in matrices(part)}
    layout = layout or packed_product
    # Ask for one of each first: a module must not lose some of its matrices.
    if any(layout(*next(iter(_of_each(part, name)))) is None for name in made):
        return None
    for name, products in made.items():
        for weight, bias in _of_each(part, name):
            product = layout(weight.contiguous(), bias)
            assert product is not None, "matrices of one shape are packed alike"
            products.append(product)
            if not leave:
                unmap(weight)
    if not leave:
        for name in made:
            empty = getattr(part, name).new_empty(0)
            setattr(part, name, torch.nn.Parameter(empty, requires_grad=False))
    return made
