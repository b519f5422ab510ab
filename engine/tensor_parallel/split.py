"""Divide a model among ranks: each keeps some attention heads, feed-forward columns and logits.

The rule is about structure and names no architecture: a layer has an attention of q_proj, k_proj,
v_proj and o_proj, and feed-forward blocks of gate_proj, up_proj and down_proj, or experts whose
weights lie in two tensors. All but the last matrix of a block are cut along their outputs, the last
one along its inputs, and after it the ranks' results are added up. The forwards of such attentions
reshape by the size of a head, so they run unchanged with fewer heads. Routers, norms and embeddings
are whole on every rank and compute the same numbers on each, from the same inputs.

Other models are refused: those whose attention counts its heads itself, mixes them before o_proj,
or keeps its weights in other shapes; and those with layers that keep a running state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from engine.errors import ModelError
from engine.forward.more_layers import has_states
from engine.tensor_parallel.group import Rank
from engine.tensor_parallel.layout import UNIT, scaled

T = TypeVar("T")
Product = Callable[[torch.Tensor], torch.Tensor]

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("gate_up_proj", "down_proj")
_COUNTS_OF_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


def summed(product: Product, rank: Rank | None) -> Product:
    """Return `product` with its result summed over all ranks; unchanged without ranks.

    For matrices whose inputs are divided among the ranks.

    product  [n, in / ranks] -> [n, out], this rank's part of the sum
    """
    if rank is None:
        return product
    add_up = rank.add_up

    def whole(x: torch.Tensor) -> torch.Tensor:
        out = product(x)
        add_up(out)
        return out

    return whole


def joined(product: Product, rank: Rank | None, count: int) -> Product:
    """Return `product` with all ranks' outputs joined, [n, count]; unchanged without ranks.

    For matrices whose `count` outputs are divided among the ranks. The joining is a sum in which
    all ranks but one have zeros: it is exact, and allows parts of different lengths.
    """
    if rank is None:
        return product
    add_up, run = rank.add_up, rank.share(count, UNIT)

    def whole(x: torch.Tensor) -> torch.Tensor:
        part = product(x)
        out = part.new_zeros(*part.shape[:-1], count)
        out[..., run.start : run.stop] = part
        add_up(out)
        return out

    return whole


def lowest(number: int | None, rank: Rank, device: torch.device) -> int | None:
    """Return, on every rank, the lowest of all ranks' numbers (>= 0); None if all are None."""
    numbers = torch.zeros(rank.count, dtype=torch.int64, device=device)
    numbers[rank.index] = 0 if number is None else number + 1
    rank.add_up(numbers)
    found = numbers[numbers > 0]
    return int(found.min()) - 1 if found.numel() else None


def all_agree(refusal: Exception | None, rank: Rank | None, device: torch.device) -> bool:
    """Return, on every rank, True if no rank has a refusal (an error); every rank must call it."""
    if rank is None:
        return refusal is None
    return lowest(None if refusal is None else 0, rank, device) is None


def first_says(found: T, choices: Sequence[T], rank: Rank | None, device: torch.device) -> T:
    """Return, on every rank, what rank 0 has `found`; without ranks `found` itself.

    choices  all that may be found, the same on every rank
    """
    if rank is None:
        return found
    said = torch.tensor([choices.index(found) if rank.index == 0 else 0], device=device)
    rank.add_up(said)
    return choices[int(said)]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that a rank keeps: ranges of indices along one dimension.

    dim   the dimension that is cut
    runs  the ranges that are kept, concatenated; (): the rank has no such weight at all
    """

    dim: int
    runs: tuple[range, ...]

    def of(self, weight: Any) -> torch.Tensor:
        """Return a copy of the part that is kept, so that the whole weight can be freed.

        weight  a tensor, or a slice object of a safetensors file, of which only the part is read
        """
        before = (slice(None),) * self.dim
        parts: list[torch.Tensor] = [
            weight[(*before, slice(run.start, run.stop))] for run in self.runs
        ]
        if len(parts) > 1:
            return torch.cat(parts, self.dim)
        return parts[0].clone(memory_format=torch.contiguous_format)


def cuts_of(name: str, model: Any, rank: Rank) -> dict[str, Cut]:
    """Return this rank's cut of each weight that is divided, by the weight's name in `model`.

    An output matrix that is tied to the embeddings is not among them (`share_head` divides it).

    name   the model's name, for messages
    model  the whole model; it may be on `meta` (without memory)

    Raises:
        ModelError: the model has parts that cannot be divided, or too few heads or columns for so
            many ranks.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _refused(name, model, "no list of decoder layers")
    if has_states(model):
        raise _refused(name, model, "layers with a running state")
    paths = {part: path for path, part in model.named_modules()}
    cuts: dict[str, Cut] = {}
    for layer in layers:
        parts = list(layer.modules())
        attentions = [part for part in parts if _has(part, _ATTENTION, nn.Module)]
        mlps = [part for part in parts if _has(part, _MLP, nn.Module)]
        experts = [part for part in parts if _has(part, _EXPERTS, nn.Parameter)]
        if len(attentions) != 1 or not mlps + experts:
            raise _refused(name, model, f"a layer without {'/'.join(_ATTENTION)} and {_MLP[0]}/...")
        why = _why_not_attention(attentions[0])
        why = why or next(filter(None, map(_why_not_mlp, mlps)), None)
        why = why or next(filter(None, map(_why_not_experts, experts)), None)
        if why is not None:
            raise _refused(name, model, why)
        cuts |= _cuts_of_attention(name, paths[attentions[0]], attentions[0], rank)
        for mlp in mlps:
            cuts |= _cuts_of_mlp(name, paths[mlp], mlp, rank)
        for part in experts:
            cuts |= _cuts_of_experts(name, paths[part], part, rank)
    head = model.get_output_embeddings()
    if _is_shared(head, rank) and head.weight is not model.get_input_embeddings().weight:
        cuts |= _outputs(paths[head], head, rank.share(head.out_features, UNIT))
    return cuts


def split(model: Any, cuts: Mapping[str, Cut], rank: Rank) -> None:
    """Reduce the weights of `model` to this rank's cuts, in place; its forward sums over the ranks.

    The forward then computes what the whole model did, if all ranks run it and `share_head` was
    called.
    """
    for name, cut in cuts.items():
        path, _, field = name.rpartition(".")
        part = model.get_submodule(path)
        if not cut.runs:
            part.register_parameter(field, None)
            continue
        kept = _parameter(cut.of(getattr(part, field).detach()))
        setattr(part, field, kept)
        if isinstance(part, nn.Linear) and field == "weight":
            part.out_features, part.in_features = kept.shape
        if 1 < kept.dim() == cut.dim + 1:  # the inputs are divided: outputs must be summed
            _add_up_behind(part, rank)


def share_head(model: Any, num_words: int, rank: Rank) -> None:
    """Divide the model's output matrix: each rank computes its tokens' logits, and all are joined.

    Undivided it would take a fifth of a small model's pass on every rank. Changes the model in
    place.

    num_words  number of logits of the whole matrix
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    run = rank.share(num_words, UNIT) if num_words >= rank.count else range(num_words)
    if head.out_features == num_words and _is_shared(head, rank):  # this rank read all of it
        part = head.weight.detach()[run.start : run.stop]
        is_tied = head.weight is model.get_input_embeddings().weight
        head.weight = _parameter(part if is_tied else part.clone())
        head.out_features = len(run)
        if head.bias is not None:
            head.bias = _parameter(head.bias.detach()[run.start : run.stop].clone())
    if head.out_features == num_words:
        return

    def join(_module: nn.Module, _inputs: object, part: torch.Tensor) -> torch.Tensor:
        return joined(lambda _: part, rank, num_words)(part)

    head.register_forward_hook(join)


def _is_shared(head: Any, rank: Rank) -> bool:
    """True if the output matrix can be divided among the ranks."""
    return type(head) is nn.Linear and head.out_features >= rank.count


def _has(part: nn.Module, names: tuple[str, ...], kind: type) -> bool:
    """True if the module has all these attributes, each of the type `kind`."""
    return all(isinstance(getattr(part, name, None), kind) for name in names)


def _refused(name: str, model: Any, why: str) -> ModelError:
    """Return the error for a model that cannot be divided."""
    kind = model.config.model_type
    return ModelError(f"{name}: {kind} cannot be divided among ranks ({why}); use one device")


def _why_not_attention(part: Any) -> str | None:
    """Return why an attention cannot be divided among ranks, or None."""
    q, k, v, o = (getattr(part, name) for name in _ATTENTION)
    dim = getattr(part, "head_dim", None)
    if any(type(linear) is not nn.Linear for linear in (q, k, v, o)):
        return "its attention has layers that are no plain matrices"
    if any(name in vars(part) for name in _COUNTS_OF_HEADS):
        return "its attention counts the heads itself"
    of_heads = {f"{name}.{end}" for name in _ATTENTION for end in ("weight", "bias")}
    if any(
        name not in of_heads and tuple(weight.shape) != (dim,)
        for name, weight in part.named_parameters()
    ):
        return "its attention has weights across heads"
    sizes = k.weight.shape == v.weight.shape, q.out_features == o.in_features
    if not (isinstance(dim, int) and all(sizes)):
        return "its heads are of other sizes"
    return None


def _why_not_mlp(part: Any) -> str | None:
    """Return why a feed-forward block cannot be divided among ranks, or None."""
    gate, up, down = (getattr(part, name) for name in _MLP)
    if any(type(linear) is not nn.Linear for linear in (gate, up, down)):
        return "its feed-forward block has layers that are no plain matrices"
    expected = {f"{name}.{end}" for name in _MLP for end in ("weight", "bias")}
    if any(name not in expected for name, _ in part.named_parameters()):
        return "its feed-forward block has more than three matrices"
    if not gate.out_features == up.out_features == down.in_features:
        return "its feed-forward block has matrices of other sizes"
    return None


def _why_not_experts(part: Any) -> str | None:
    """Return why a module of experts cannot be divided among ranks, or None."""
    gate_up, down = part.gate_up_proj, part.down_proj
    if {name for name, _ in part.named_parameters()} != set(_EXPERTS):
        return "its experts have more than two tensors"
    if gate_up.dim() != 3 or gate_up.shape[1:] != (2 * down.shape[2], down.shape[1]):
        return "its experts lie in other shapes"
    if not getattr(part, "is_concatenated", True):
        return "its experts have gate and up interleaved"
    return None


def _cuts_of_attention(name: str, path: str, part: Any, rank: Rank) -> dict[str, Cut]:
    dim = part.head_dim
    num_groups = part.k_proj.out_features // dim
    group = part.q_proj.out_features // part.k_proj.out_features
    _check_count(name, "key/value heads", num_groups, rank)
    groups = rank.share(num_groups)  # a query head stays with the key head that it attends to
    queries = scaled(groups, group * dim)
    return {
        **_outputs(f"{path}.q_proj", part.q_proj, queries),
        **_outputs(f"{path}.k_proj", part.k_proj, scaled(groups, dim)),
        **_outputs(f"{path}.v_proj", part.v_proj, scaled(groups, dim)),
        **_inputs(f"{path}.o_proj", part.o_proj, queries, rank),
    }


def _cuts_of_mlp(name: str, path: str, part: Any, rank: Rank) -> dict[str, Cut]:
    _check_count(name, "columns of a feed-forward block", part.down_proj.in_features, rank)
    columns = rank.share(part.down_proj.in_features, UNIT)
    return {
        **_outputs(f"{path}.gate_proj", part.gate_proj, columns),
        **_outputs(f"{path}.up_proj", part.up_proj, columns),
        **_inputs(f"{path}.down_proj", part.down_proj, columns, rank),
    }


def _cuts_of_experts(name: str, path: str, part: Any, rank: Rank) -> dict[str, Cut]:
    """Return the cuts of experts: every rank has some columns of each expert, so none is idle."""
    num_columns = part.down_proj.shape[2]
    _check_count(name, "columns of an expert", num_columns, rank)
    gate = rank.share(num_columns, UNIT)
    up = range(gate.start + num_columns, gate.stop + num_columns)
    return {
        f"{path}.gate_up_proj": Cut(1, (gate, up)),
        f"{path}.down_proj": Cut(2, (gate,)),
    }


def _outputs(path: str, linear: nn.Linear, run: range) -> dict[str, Cut]:
    """Return the cuts that keep the outputs `run` of a linear layer."""
    fields = ("weight",) if linear.bias is None else ("weight", "bias")
    return {f"{path}.{field}": Cut(0, (run,)) for field in fields}


def _inputs(path: str, linear: nn.Linear, run: range, rank: Rank) -> dict[str, Cut]:
    """Return the cuts that keep the inputs `run` of a linear layer; only rank 0 keeps the bias."""
    cuts = {f"{path}.weight": Cut(1, (run,))}
    if linear.bias is not None and rank.index > 0:
        cuts[f"{path}.bias"] = Cut(0, ())
    return cuts


def _add_up_behind(part: nn.Module, rank: Rank) -> None:
    """Make the module sum its output over all ranks, in place."""

    def add_up(_module: nn.Module, _inputs: object, out: torch.Tensor) -> None:
        rank.add_up(out)

    part.register_forward_hook(add_up)


def _parameter(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _check_count(name: str, what: str, count: int, rank: Rank) -> None:
    """Raise ModelError if there are fewer heads or columns than ranks."""
    if count < rank.count:
        raise ModelError(
            f"{name}: {count} {what} cannot be divided among {rank.count} ranks; use {count} at "
            "most"
        )
