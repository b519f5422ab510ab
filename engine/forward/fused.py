"""The fast backend for the llama family: few operators, packed weights, its own slot cache.

It computes the same as transformers' llama, mistral, qwen2 and qwen3, with the same rounding where
that matters (norms and softmax in float32, tables of the model's own rotary embedding), but

    query, key and value are one matrix product, gate and up another, on CPUs packed or in tiles
    the rotary embedding of queries and keys is applied at once, in place
    keys and values of a pass are written by one copy per layer
    attention treats the query heads of a group as rows over one key head

At first it uses the model's own weights, so that its logits can be compared with the model's;
`take_over` then replaces the weights, matrix by matrix. Recorded passes (CUDA graphs) may merge the
operators between matrix products and attention into fewer (`small_operators.py`), and use kernels
of our own for products of few rows where these are faster (`few_rows.py`). From one decode pass to
the next, the only Python integer that changes in an operator's arguments is `num_visible`, so that
passes can be recorded.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint.model import LoadedModel
from engine.cpu_library import why_not_used
from engine.device import send
from engine.errors import ModelError
from engine.forward.cache_tensors import first_not_finite, zeros
from engine.forward.cpu_attention import cpu_attention, fits
from engine.forward.cpu_layers import CpuLayer, CpuLayers, Rows, checked
from engine.forward.cpu_operators import operators
from engine.forward.few_rows import FEW_ROWS_DEVICES, FewRows, num_parts, parts_of
from engine.forward.forward import (
    LAST,
    Layers,
    Output,
    Recordable,
    Say,
    Shape,
    Spans,
    features_of,
    silent,
)
from engine.forward.lane_attention import LaneAttention, LayerPlan, Plan, Projections
from engine.forward.linears import take, unpacked
from engine.forward.llama_parts import (
    NormWeights,
    epsilon_of_norms,
    head_weights,
    norm_weights,
    qkv_of,
    rotations,
    why_not_fused,
)
from engine.forward.masks import KindMasks
from engine.forward.operators import Form, Packer, Product, at_once, lies_in, of_pairs, rms_norm
from engine.forward.small_operators import SmallOperators, Trial
from engine.layout.slots import LaneLayout, Span
from engine.quantised.cpu_products import TiledProduct
from engine.quantised.linear import is_quantised
from engine.quantised.reading import reading
from engine.tensor_parallel.split import first_says, joined, summed
from engine.timing import Decide

logger = logging.getLogger(__name__)

_TRIED_SLOTS = 256  # seen by the passes in which operators are compared and timed
# Largest difference of a pass's logits by other operators, relative to the largest logit.
_PASS_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-4}


@dataclass(slots=True)
class _Layer:
    """One decoder layer: its norms, its matrix products (replaced by `take_over`), its cache.

    module     transformers' layer
    head_norm  norm of queries and keys [n, heads + kv_heads, dim]; only qwen3 has one
    cache      [2 kv_heads, num_slots, dim]: keys, then values
    """

    module: Any
    before_attention: Product
    qkv: Product
    head_norm: Product | None
    out: Product
    before_mlp: Product
    gate_up: Product
    down: Product
    cache: torch.Tensor


@dataclass(frozen=True, slots=True)
class _FusedPass:
    """The properties of a pass that all layers use; tensors on the device.

    made      memory for the projections
    cos, sin  [n, 1, dim]: of each row's position; sin is negative in its first half
    slots     [n] int64: the slots that keys and values are written to
    plan      the calls of attention
    """

    made: Projections
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    plan: Plan


class FusedBackend(Recordable):
    """Backend for the llama family with fused operators and its own cache; see `Backend`."""

    name = "fused"

    def __init__(self, loaded: LoadedModel, lanes: LaneLayout) -> None:
        """Allocate the cache. Raises ModelError if this backend cannot run the model."""
        why = why_not_fused(loaded.model)
        if why is not None:
            raise ModelError(f"{loaded.name}: the fused engine has no {why}; use the reference")
        model = loaded.model.model
        attention = model.layers[0].self_attn
        self._rank = loaded.rank
        self._device = loaded.device
        self._vocab_size = loaded.vocab_size
        self._is_quantised = is_quantised(loaded.model)
        self._dim = int(attention.head_dim)
        self._num_heads = attention.q_proj.out_features // self._dim  # of this rank
        self._num_kv_heads = attention.k_proj.out_features // self._dim
        self._group = self._num_heads // self._num_kv_heads
        shape = (len(model.layers), 2 * self._num_kv_heads, lanes.total, self._dim)
        self.cache = zeros(shape, loaded.dtype, loaded.device)
        self.rotations = rotations(model, min(lanes.num_slots, loaded.max_model_len), loaded)
        self._embeddings = model.embed_tokens.weight.detach()
        form = of_pairs if loaded.device.type == "cpu" else at_once
        self._layers = [
            self._layer(module, cache, form)
            for module, cache in zip(model.layers, self.cache.unbind(), strict=True)
        ]
        self.kinds = loaded.kinds.within(lanes.num_slots)
        self._masks = KindMasks(self.kinds, loaded.device, loaded.dtype)
        self._scale = float(attention.scaling)
        self.decide: Decide = partial(first_says, rank=self._rank, device=self._device)
        self._attention = LaneAttention(self.cache, lanes, self._group, self._scale, self.kinds)
        self._last_norm_module = model.norm
        self._last_norm = _norm(model.norm, form)
        self._head_module = loaded.model.lm_head
        self._head = joined(unpacked([self._head_module]), self._rank, self._vocab_size)
        self._cpu_layers: CpuLayers | None = None  # with merged operators, for passes on a CPU
        self._small: SmallOperators | None = None  # made at load, only for recorded passes
        self._norm_weights: list[NormWeights] = []
        self.is_merged = False  # True: recorded passes use the merged operators
        self._is_recorded = False  # True: passes may be recorded

    def _layer(self, module: Any, cache: torch.Tensor, form: Form) -> _Layer:
        """Return a layer that uses the model's own weights."""
        attention, mlp = module.self_attn, module.mlp
        return _Layer(
            module=module,
            before_attention=_norm(module.input_layernorm, form),
            qkv=unpacked(qkv_of(module)),
            head_norm=self._head_norm(attention, form),
            out=summed(unpacked([attention.o_proj]), self._rank),
            before_mlp=_norm(module.post_attention_layernorm, form),
            gate_up=unpacked([mlp.gate_proj, mlp.up_proj]),
            down=summed(unpacked([mlp.down_proj]), self._rank),
            cache=cache,
        )

    def _head_norm(self, attention: Any, form: Form) -> Product | None:
        weights = head_weights(attention, self._num_heads, self._num_kv_heads)
        if weights is None:
            return None
        return rms_norm(weights, float(attention.q_norm.variance_epsilon), form)

    def take_over(self, *, timed: bool = True, say: Say = silent) -> None:
        """Replace the model's weights by repacked ones; the model's own forward cannot run after.

        Works one matrix at a time, so that memory holds all weights once and a few matrices twice.
        Tied embeddings stay beside the packed output matrix. `timed` as in `Backend.take_over`.
        """
        del say
        # How many keys are read depends on all rows of a pass, and a row's last bits on that.
        self._masks.are_cut = timed
        # Only if `timed`: another form of a product gives other last bits. Not with ranks, which
        # would have to choose the same forms.
        can_choose = timed and self._is_recorded and self._rank is None
        few_rows = FewRows() if can_choose and self._device.type in FEW_ROWS_DEVICES else None
        is_on_cpu = self._device.type == "cpu"
        # Of several ranks only some may find the library; a recording holds operators of torch.
        is_alone = is_on_cpu and self._rank is None and not self._is_recorded
        tiles = is_alone or (is_on_cpu and (self._is_quantised or self._rank is not None))
        packer = Packer(tiles=tiles, few_rows=few_rows)
        for layer in self._layers:
            for name, product in self._laid_out(layer, packer).items():
                setattr(layer, name, product)
        self._head = self._head_laid_out(packer)
        if is_alone:
            self._take_own_layers()

    def _laid_out(self, layer: _Layer, packer: Packer) -> Mapping[str, Product]:
        """Return the products of a layer by their names in `_Layer`, with weights laid out anew."""
        fast = partial(take, packer, dtype=self.cache.dtype)
        attention, mlp = layer.module.self_attn, layer.module.mlp
        return {
            "qkv": fast(qkv_of(layer.module)),
            "out": summed(fast([attention.o_proj], may_split=True), self._rank),
            "gate_up": fast([mlp.gate_proj, mlp.up_proj]),
            "down": summed(fast([mlp.down_proj], may_split=True), self._rank),
        }

    def _head_laid_out(self, packer: Packer) -> Product:
        """Return the output matrix's product with its weight laid out anew; tied ones stay too."""
        head = self._head_module
        is_tied = isinstance(head, torch.nn.Linear) and lies_in(head.weight, self._embeddings)
        product = take(packer, [head], dtype=self.cache.dtype, leave=is_tied)
        return joined(product, self._rank, self._vocab_size)

    def _take_own_layers(self) -> None:
        """Compute the layers by our own operators and attention, if these give the same numbers.

        Overwrites the first slots of the cache.
        """
        layers = self._own_layers()
        if layers is None:
            return
        with torch.inference_mode():
            tolerance = _PASS_TOLERANCES[self.cache.dtype]
            self._cpu_layers = checked(layers, self._try_pass, tolerance, self._most_tried_rows)
        self.cache[:, :, : self._tried_slots].zero_()

    @property
    def is_by_row(self) -> bool:  # type: ignore[override]
        """True if all is computed by our own operators and products."""
        own = self._cpu_layers
        return own is not None and own.is_one_call and isinstance(self._head, TiledProduct)

    @property
    def forms(self) -> str:
        """Return in words what computes its passes, for people."""
        if self._device.type != "cpu":
            return "torch's operators"
        if self._cpu_layers is None:
            return f"torch's operators ({why_not_used() or 'several ranks, or other norms'})"
        calls = "one call" if self._cpu_layers.is_one_call else "single calls"
        tiles = f", weights read {reading()}" if self._is_quantised else ""
        return f"our C++, layers in {calls}{tiles}"

    def _own_layers(self) -> CpuLayers | None:
        """Return the layers with our own operators; None: not here, or not for these norms."""
        epsilon = epsilon_of_norms(self._modules, self._last_norm_module)
        merged = None if epsilon is None else operators(self.cache.dtype, epsilon)
        attention = cpu_attention(self.cache.dtype, self.cache.shape[2], self.kinds)
        if merged is None or attention is None or not fits(self.cache.dtype, self._dim):
            return None
        first = self._layers[0].module.input_layernorm.weight.detach()
        about = self._num_heads, self._scale
        return CpuLayers(merged, attention, first, self._cpu_parts(), *about)

    @property
    def _tried_slots(self) -> int:
        return min(_TRIED_SLOTS, self.cache.shape[2])

    @property
    def _most_tried_rows(self) -> int:
        return min(self._tried_slots, self.rotations.shape[1])

    def _try_pass(self, which: CpuLayers | None, num_rows: int) -> torch.Tensor:
        """Run a pass by our own operators, or without any; return its logits in float32."""
        before, self._cpu_layers = self._cpu_layers, which
        places = torch.arange(num_rows)
        ids = places % len(self._embeddings)  # a model may have fewer tokens than there are rows
        rows, spans = (
            torch.stack((ids, places, places, places + 1, 0 * places)),
            (Span(0, num_rows),),
        )
        windows = [torch.zeros_like(places)] * (2 * len(self.kinds.windows))
        rows = torch.cat((rows, torch.stack(windows))) if windows else rows
        logits = self.forward(rows, spans, num_visible=self._tried_slots).logits.float()
        self._cpu_layers = before
        return logits

    def forward(
        self,
        rows: torch.Tensor,
        spans: Spans,
        *,
        num_visible: int,
        keep: torch.Tensor | None = None,
        layers: Layers = (),
    ) -> Output:
        """Run n rows, write their keys and values; return logits and features (see `Backend`)."""
        with torch.inference_mode():
            if self._cpu_layers is not None:
                return self._run_own(self._cpu_layers, rows, spans, keep, layers)
            one = len(spans) == 1
            counts = (rows.shape[1],) if one else tuple(span.num_rows for span in spans)
            rows, masks = self._masks.build(rows, num_visible, counts)
            made = self._attention.projections(rows.shape[1])
            plan = self._attention.plan(made.apart, spans, masks, num_visible)
            return self._compute(rows, made, plan, keep, layers)

    def _run_own(
        self,
        own: CpuLayers,
        rows: torch.Tensor,
        spans: Spans,
        keep: torch.Tensor | None,
        layers: Layers,
    ) -> Output:
        """Run a pass on a CPU by our own operators."""
        made = self._attention.projections(rows.shape[1])
        hidden, cos, sin, slots = self._begin(rows)
        sight = own.attention.see(rows, spans)
        normed, states = own.run(Rows(hidden, cos, sin, slots, made.heads, sight), layers)
        if keep is not None:
            normed = normed.index_select(0, keep)
        features = features_of(states, layers)
        if not len(normed):  # the packed head takes no empty rows
            return Output(normed.new_empty(0, self._vocab_size), features)
        return Output(self._head(normed), features)

    def make_rooms(self, shapes: Iterable[Shape]) -> None:
        """Allocate the memory of recorded passes of these shapes."""
        self._is_recorded = True
        self._attention.make_rooms(shapes)

    def compute_recorded(
        self,
        rows: torch.Tensor,
        shape: Shape,
        masks: Sequence[torch.Tensor] | None,
        layers: Layers = (),
    ) -> Output:
        """Compute a pass in a form that can be recorded; needs `make_rooms` for its shape before.

        masks  None: attention is split over the keys (`make_split`)
        """
        if masks is None:
            plan = self._attention.plan_split(shape, rows)
        else:
            plan = self._attention.plan_recorded(shape, rows[2], masks)
        if self.is_merged:
            return self._compute_merged(rows, shape, plan, layers)
        return self._compute(rows, self._attention.room(shape).made, plan, None, layers)

    def _compute(
        self,
        rows: torch.Tensor,
        made: Projections,
        plan: Plan,
        keep: torch.Tensor | None,
        layers: Layers,
    ) -> Output:
        """Run a pass with the operators one by one; return its output."""
        hidden, cos, sin, slots = self._begin(rows)
        step = _FusedPass(made, cos, sin, slots, plan)
        states: dict[int, torch.Tensor] = {}
        for number, (layer, seen) in enumerate(zip(self._layers, plan.layers, strict=True)):
            if number in layers:
                states[number] = hidden.clone()  # `hidden` changes in place below
            hidden += layer.out(self._attend(layer, layer.before_attention(hidden), seen, step))
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate).mul_(up))
        if LAST in layers:
            hidden = states[LAST] = self._last_norm(hidden)
        features = features_of(states, layers)
        if keep is not None:
            hidden = hidden.index_select(0, send(keep, self._device))
        if not len(hidden):  # the packed head takes no empty rows
            return Output(hidden.new_empty(0, self._vocab_size), features)
        if LAST not in layers:  # norm only the rows whose logits are wanted
            hidden = self._last_norm(hidden)
        return Output(self._head(hidden), features)

    def _begin(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return embeddings [n, hidden], cosines and sines [n, 1, dim] and slots [n] of a pass."""
        ids, positions, slots = rows.unbind()[:3]
        cos, sin = self.rotations.index_select(1, positions)
        return F.embedding(ids, self._embeddings), cos, sin, slots

    def empty_features(self, num_rows: int, layers: Layers) -> torch.Tensor:
        """Return uninitialised memory for features, [num_rows, len(layers) * hidden_size]."""
        return self.cache.new_empty(num_rows, len(layers) * self._embeddings.shape[1])

    def make_split(self, shape: Shape) -> None:
        """Compile attention that is split over the keys, for passes of one shape."""
        self._attention.make_split(shape)

    def _attend(
        self, layer: _Layer, hidden: torch.Tensor, seen: LayerPlan, step: _FusedPass
    ) -> torch.Tensor:
        """Write the pass's keys and values; return attention's outputs [n, heads * dim]."""
        self._turn_and_write(layer.qkv(hidden), layer.head_norm, layer.cache, step)
        return self._attention.attend(step.plan, seen)

    def _turn_and_write(
        self,
        qkv: torch.Tensor,
        head_norm: Product | None,
        cache: torch.Tensor,
        step: _FusedPass,
    ) -> None:
        """Norm and rotate queries and keys in the pass's memory; write keys and values to `cache`.

        qkv  [n, (heads + 2 kv_heads) * dim]: queries, keys and values
        """
        made = step.made
        made.heads.copy_(qkv)
        if head_norm is not None:
            made.turned.copy_(head_norm(made.turned))
        torch.cat(made.halves, dim=-1, out=made.swapped)
        made.turned.mul_(step.cos).addcmul_(made.swapped, step.sin)
        cache.index_copy_(1, step.slots, made.written)

    def _compute_merged(
        self, rows: torch.Tensor, shape: Shape, plan: Plan, layers: Layers
    ) -> Output:
        """Run a pass like `_compute`, with merged small operators; return logits of all rows."""
        small = self._small
        assert small is not None
        assert shape in small.made, f"no programs for passes of {shape}"
        # Cloned here, in inference mode: other tensors would make the programs compile anew.
        hidden, cos, sin, slots = self._begin(rows[:3].clone())
        normed = self._layers[0].before_attention(hidden)
        states: dict[int, torch.Tensor] = {}
        for number, (layer, weights, seen) in enumerate(
            zip(self._layers, self._norm_weights, plan.layers, strict=True)
        ):
            if number in layers:
                states[number] = hidden
            qkv = layer.qkv(normed)
            beside = small.turn_and_write(shape, qkv, weights.heads, cos, sin, slots, layer.cache)
            attended = parts_of(layer.out)(self._attention.attend(plan, seen, beside))
            hidden, normed = small.add_and_norm(hidden, attended, weights.before_mlp)
            change = parts_of(layer.down)(small.gate(layer.gate_up(normed)))
            hidden, normed = small.add_and_norm(hidden, change, weights.after)
        if LAST in layers:
            states[LAST] = normed
        return Output(self._head(normed), features_of(states, layers))

    def make_merged(self, shapes: Iterable[Shape]) -> None:
        """Compile merged operators for recorded passes of these shapes, and check them.

        `make_rooms` must have been called for the shapes. The merged operators are used only while
        `is_merged` is True. Overwrites the first layer's cache, so call it before any text is
        opened.

        Raises:
            ModelError: the operators cannot be compiled here, or give other numbers.
        """
        epsilon = epsilon_of_norms(self._modules, self._last_norm_module)
        if epsilon is None:
            raise ModelError("its norms have several epsilons")
        small = SmallOperators(epsilon)
        self._norm_weights = self._weights_of_norms()
        for shape in shapes:
            trial = self._trial(shape)
            with torch.inference_mode():
                trial.cache.zero_()
                try:
                    small.make(shape, trial, partial(self._one_by_one, shape, small.epsilon))
                finally:
                    trial.cache.zero_()
        self._small = small

    @property
    def _modules(self) -> list[Any]:
        return [layer.module for layer in self._layers]

    def _weights_of_norms(self) -> list[NormWeights]:
        heads = self._num_heads, self._num_kv_heads
        return norm_weights(self._modules, self._last_norm_module, *heads)

    def _cpu_parts(self) -> list[CpuLayer]:
        """Return the layers as passes with merged operators on a CPU have them."""
        kinds = (0,) * len(self._layers) if self.kinds.is_uniform else self.kinds.of_layers
        made = []
        for layer, weights, kind in zip(self._layers, self._weights_of_norms(), kinds, strict=True):
            products = layer.qkv, layer.out, layer.gate_up, layer.down
            norms = weights.heads, weights.before_mlp, weights.after
            made.append(CpuLayer(products, norms, layer.cache, kind))
        return made

    def _trial(self, shape: Shape) -> Trial:
        """Return random inputs for checking the merged operators in passes of a shape."""
        layer, weights, count = self._layers[0], self._norm_weights[0], shape[0] * shape[1]
        random = torch.Generator().manual_seed(count)

        def some(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random).to(self._embeddings)

        # To a compiler, tensors made in inference mode are of another kind; weights are not.
        weight = some(self._embeddings.shape[1])
        heads = None if weights.heads is None else some(*weights.heads.shape)
        with torch.inference_mode():
            normed = some(count, len(weight))
            parts = [some(split, *normed.shape).float() for split in self._splits(count)]
            positions = torch.randint(self.rotations.shape[1], (count,), generator=random)
            cos, sin = self.rotations.index_select(1, positions.to(self._device))
            slots = torch.randperm(layer.cache.shape[1], generator=random)[:count]
            return Trial(
                hidden=some(*normed.shape),
                changes=(some(*normed.shape), *parts),
                weight=weight,
                gate_up=layer.gate_up(normed),
                qkv=layer.qkv(normed),
                weights=heads,
                cos=cos,
                sin=sin,
                slots=slots.to(self._device),
                cache=layer.cache,
            )

    def _splits(self, num_rows: int) -> list[int]:
        """Return into how many partial sums products are split whose result is added to a sum."""
        products = [product for layer in self._layers for product in (layer.out, layer.down)]
        return sorted({num_parts(product, num_rows) for product in products} - {1})

    def _one_by_one(self, shape: Shape, epsilon: float, trial: Trial) -> torch.Tensor:
        """Do what `turn_and_write` does, with single operators; return the queries."""
        room, norm = self._attention.room(shape), None
        if trial.weights is not None:
            norm = rms_norm(trial.weights[: -self._num_kv_heads], epsilon, at_once)
        step = _FusedPass(room.made, trial.cos, trial.sin, trial.slots, Plan((), ()))
        self._turn_and_write(trial.qkv, norm, trial.cache, step)
        return room.look.gathered()

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, all reads before any write (see `Backend.move`)."""
        with torch.inference_mode():
            read, written = send(torch.tensor((sources, targets), dtype=torch.int64), self._device)
            self.cache.index_copy_(2, written, self.cache.index_select(2, read))
            if self._cpu_layers is not None:
                self._cpu_layers.attention.move(read, written)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy `length` slots of the cache from `source` on to `target` on (see `Backend.copy`)."""
        with torch.inference_mode():
            self.cache.narrow(2, target, length).copy_(self.cache.narrow(2, source, length))
            if self._cpu_layers is not None:
                self._cpu_layers.attention.copy(source, target, length)

    def wipe(self, first: int, length: int) -> None:
        """Write zeros to `length` slots of the cache from `first` on (see `Backend.wipe`)."""
        with torch.inference_mode():
            self.cache.narrow(2, first, length).zero_()

    def not_finite(self, first: int, length: int) -> int | None:
        """Return where NaN or infinity first occurred in these slots, or None (see `Backend`)."""
        with torch.inference_mode():
            return first_not_finite(self.cache.unbind(), first, length)


def _norm(module: Any, form: Form) -> Product:
    """Return one of the model's norm layers as a function, computed in the given form."""
    return rms_norm(module.weight.detach(), float(module.variance_epsilon), form)
