"""What a rank keeps of a model: its heads, its columns, its words.

The rule is one of structure and names no architecture: a layer has an attention of q_proj, k_proj,
v_proj and o_proj, and feed-forward blocks of gate_proj, up_proj and down_proj, or experts whose
weights lie in two tensors. The first ones are cut by what comes out and the last by what goes in,
and what the ranks compute is added up behind it. The forwards of such attentions view by the size
of a head, so that they run with fewer heads as they are. Routers, norms and embeddings are whole on
every rank, and give the same numbers on each, for they are given the same.

Everything else is refused: what counts its heads itself, mixes them before o_proj, or keeps its
weights in other shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.errors import ModelError
from engine.tensor_parallel.group import Rank
from engine.tensor_parallel.layout import UNIT, scaled

Product = Callable[[torch.Tensor], torch.Tensor]

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("gate_up_proj", "down_proj")
_COUNTS_OF_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


def summed(product: Product, rank: Rank | None) -> Product:
    """Return a product whose inputs are divided among the ranks, added up; None: they are not."""
    if rank is None:
        return product
    add_up = rank.add_up

    def whole(x: torch.Tensor) -> torch.Tensor:
        out = product(x)
        add_up(out)
        return out

    return whole


def joined(product: Product, rank: Rank | None, count: int) -> Product:
    """Return a product whose `count` outputs are divided among the ranks, put together.

    It is a sum in which all ranks but one have zeros: exact, and of runs of any lengths.
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
    """Return the lowest number that any rank has, each >= 0; None: none has one."""
    numbers = torch.zeros(rank.count, dtype=torch.int64, device=device)
    numbers[rank.index] = 0 if number is None else number + 1
    rank.add_up(numbers)
    found = numbers[numbers > 0]
    return int(found.min()) - 1 if found.numel() else None


def split(name: str, model: Any, rank: Rank) -> None:
    """Leave of each weight of `model`, which is on the CPU, what this rank has of it.

    Its forward then gives what the whole gave, if all ranks run theirs.

    Raises:
        ModelError: it has other parts than those above, or too few for so many ranks.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _refused(name, model, "no list of decoder layers")
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
        _split_attention(name, attentions[0], rank)
        for mlp in mlps:
            _split_mlp(name, mlp, rank)
        for part in experts:
            _split_experts(name, part, rank)
    _split_head(model, rank)


def _has(part: nn.Module, names: tuple[str, ...], kind: type) -> bool:
    return all(isinstance(getattr(part, name, None), kind) for name in names)


def _refused(name: str, model: Any, why: str) -> ModelError:
    kind = model.config.model_type
    return ModelError(f"{name}: {kind} cannot be divided among ranks ({why}); use one device")


def _why_not_attention(part: Any) -> str | None:
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
    gate_up, down = part.gate_up_proj, part.down_proj
    if {name for name, _ in part.named_parameters()} != set(_EXPERTS):
        return "its experts have more than two tensors"
    if gate_up.dim() != 3 or gate_up.shape[1:] != (2 * down.shape[2], down.shape[1]):
        return "its experts lie in other shapes"
    if not getattr(part, "is_concatenated", True):
        return "its experts have gate and up interleaved"
    return None


def _split_attention(name: str, part: Any, rank: Rank) -> None:
    dim = part.head_dim
    num_groups = part.k_proj.out_features // dim
    group = part.q_proj.out_features // part.k_proj.out_features
    _check_count(name, "key/value heads", num_groups, rank)
    groups = rank.share(num_groups)  # a query head stays with the key head that it looks at
    queries = scaled(groups, group * dim)
    _keep_outputs(part.q_proj, queries)
    _keep_outputs(part.k_proj, scaled(groups, dim))
    _keep_outputs(part.v_proj, scaled(groups, dim))
    _keep_inputs(part.o_proj, queries, rank)


def _split_mlp(name: str, part: Any, rank: Rank) -> None:
    _check_count(name, "columns of a feed-forward block", part.down_proj.in_features, rank)
    columns = rank.share(part.down_proj.in_features, UNIT)
    _keep_outputs(part.gate_proj, columns)
    _keep_outputs(part.up_proj, columns)
    _keep_inputs(part.down_proj, columns, rank)


def _split_experts(name: str, part: Any, rank: Rank) -> None:
    """Every rank has some columns of every expert, and so none waits for another's expert."""
    num_columns = part.down_proj.shape[2]
    _check_count(name, "columns of an expert", num_columns, rank)
    run = rank.share(num_columns, UNIT)
    gate, up = part.gate_up_proj.detach().split(num_columns, dim=1)
    mine = slice(run.start, run.stop)
    part.gate_up_proj = _parameter(torch.cat((gate[:, mine], up[:, mine]), dim=1))
    part.down_proj = _parameter(part.down_proj.detach()[:, :, mine].clone())
    _add_up_behind(part, rank)


def _split_head(model: Any, rank: Rank) -> None:
    """By words: whole, it would be what the ranks share least, a fifth of a small model's pass."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear or head.out_features < rank.count:
        return
    count = head.out_features
    if head.weight is embeddings.weight:  # every rank reads all of the embeddings
        run = rank.share(count, UNIT)
        head.weight = _parameter(head.weight.detach()[run.start : run.stop])
        head.out_features = len(run)
        if head.bias is not None:
            head.bias = _parameter(head.bias.detach()[run.start : run.stop].clone())
    else:
        _keep_outputs(head, rank.share(count, UNIT))

    def join(_module: nn.Module, _inputs: object, part: torch.Tensor) -> torch.Tensor:
        return joined(lambda _: part, rank, count)(part)

    head.register_forward_hook(join)


def _keep_outputs(linear: nn.Linear, run: range) -> None:
    """A copy, so that what the whole weight takes can be given back."""
    mine = slice(run.start, run.stop)
    linear.weight = _parameter(linear.weight.detach()[mine].clone())
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias.detach()[mine].clone())
    linear.out_features = len(run)


def _keep_inputs(linear: nn.Linear, run: range, rank: Rank) -> None:
    """The bias is added once, on rank 0."""
    linear.weight = _parameter(linear.weight.detach()[:, run.start : run.stop].contiguous())
    if rank.index > 0:
        linear.register_parameter("bias", None)
    linear.in_features = len(run)
    _add_up_behind(linear, rank)


def _add_up_behind(part: nn.Module, rank: Rank) -> None:
    def add_up(_module: nn.Module, _inputs: object, out: torch.Tensor) -> None:
        rank.add_up(out)

    part.register_forward_hook(add_up)


def _parameter(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _check_count(name: str, what: str, count: int, rank: Rank) -> None:
    if count < rank.count:
        raise ModelError(
            f"{name}: {count} {what} cannot be divided among {rank.count} ranks; use {count} at "
            "most"
        )
