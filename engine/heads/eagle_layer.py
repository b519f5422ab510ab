"""The computation of an EAGLE head: one decoder layer over embeddings and features, and logits.

    EAGLE      x = fc [e, f]                      e: the token's embedding
               y = x + attention(x)               f: the feature of the token before
               f' = y + mlp(norm y)               logits: the target's output matrix times f'

    EAGLE-3    g = fc [f_low, f_mid, f_high]      or g' of the row before, if no feature is given
               y = g + attention([norm e, norm g])
               g' = y + mlp(norm y)               logits: output matrix times norm g'

    EAGLE 3.1  fc [norm f_low, norm f_mid, ...]   each feature has a norm of its own (`fc_norm`);
               norm g' is what the next row starts from (`norm_output`)

EAGLE is from arXiv 2401.15077 (EAGLE-2, 2406.16858, has the same layer), EAGLE-3 from 2503.01840. A
feature is a hidden state of the target. A row's *state*, f' or g' [width], is what the next row
starts from where no feature is given. Owns the weights. Knows no cache and no slot: attention is
computed elsewhere, between `enter` and `leave`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.cpu_library import library
from engine.errors import ModelError
from engine.forward.operators import Packer, Product, at_once, of_pairs, rms_norm, stack
from engine.heads.head_tensors import HeadTensors, linear
from engine.heads.layouts import EagleConfig, names_of
from engine.heads.target import Target
from engine.quantised.cpu_products import quantised_product
from engine.quantised.rounding import GROUP, quantised
from proto.head_kinds import HeadKind

Front = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function: (embeddings [n, width], states [n, width] before them) -> (input of attention, residual
to which attention's output is added)"""

# Endings of tensors in some checkpoints that are not needed: which target tokens can be drafted
# (d2t says so too), rotary frequencies (computed here), copies of the target's weights.
_UNUSED = ("t2d", "inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


class NormWeights(NamedTuple):
    """The weights [width] of a head's norms; EAGLE has but one.

    of_embedding, of_state  before attention
    before_mlp  before the feed-forward block
    last        before the output matrix
    """

    of_embedding: torch.Tensor | None
    of_state: torch.Tensor | None
    before_mlp: torch.Tensor
    last: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class EagleHead:
    """The weights of an EAGLE head on its device.

    vocab_size  V, the target's number of logits
    embeddings  [at least vocab_size, width]
    states      function: features [n, feature_size] -> states [n, width] that rows start from
    front       function that computes the input of attention (see `Front`)
    qkv         product that gives queries, keys and values, concatenated
    out         product after attention; `before_mlp`, `gate_up`, `down`: norm and products of the
                feed-forward block
    leaving     what makes a row's state of the layer's output: the identity, in EAGLE 3.1 a norm
    last_norm   norm of the state before `output`; the identity for EAGLE and EAGLE 3.1
    output      product that gives the logits of the draft vocabulary
    targets     [draft_vocab] int64: the target's token of each column of `output`; None: the same
    is_ascending  True: `targets` ascend
    weights     of the norms
    """

    config: EagleConfig
    vocab_size: int
    embeddings: torch.Tensor
    states: Product
    front: Front
    qkv: Product
    out: Product
    before_mlp: Product
    gate_up: Product
    down: Product
    leaving: Product
    last_norm: Product
    output: Product
    targets: torch.Tensor | None
    is_ascending: bool
    weights: NormWeights

    def enter(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (queries, keys and values concatenated [n, ...]; the residual [n, width]).

        Attention's output, after `out`, is added to the residual (`leave`).

        ids     [n] int64
        states  [n, width]: the state before each row, of the row before or made of a feature
        """
        entering, residual = self.front(F.embedding(ids, self.embeddings), states)
        return self.qkv(entering), residual

    def leave(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the rows' states [n, width], of attention and MLP added to `residual`.

        residual  [n, width] as returned by `enter`
        attended  [n, heads * dim]: the attention heads' outputs
        """
        hidden = residual + self.out(attended)
        gate, up = self.gate_up(self.before_mlp(hidden)).chunk(2, dim=-1)
        return self.leaving(hidden + self.down(F.silu(gate).mul_(up)))

    def own_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return logits [n, draft_vocab] float32 of the last norm's outputs [n, width]."""
        if not len(normed):  # packed weights take no empty rows
            return normed.new_empty(0, self.config.draft_vocab, dtype=torch.float32)
        return self.output(normed).float()


def read_eagle_head(
    config: EagleConfig,
    tensors: HeadTensors,
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
    bits: int = 0,
) -> EagleHead:
    """Return an EAGLE head made of its tensors and of those that it shares with the target.

    bits  8 or 4: its matrices are rounded to so many on a CPU, where they can be multiplied as such

    Raises:
        ModelError: a tensor is missing, has another shape, or is unknown.
    """
    made = _Reader(config, tensors, target, dtype, device, bits).head()
    tensors.refuse_rest(*_UNUSED)
    return made


class _Reader:
    """Builds an `EagleHead` from a checkpoint's tensors."""

    def __init__(
        self,
        config: EagleConfig,
        tensors: HeadTensors,
        target: Target,
        dtype: torch.dtype,
        device: torch.device,
        bits: int,
    ) -> None:
        self._bits = bits if device.type == "cpu" else 0
        self._config, self._tensors, self._target = config, tensors, target
        self._dtype, self._device = dtype, device
        self._names = names_of(list(tensors))
        self._packer = Packer(tiles=True)
        # Weights of the two norms before attention; EAGLE has none.
        self._entering: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def head(self) -> EagleHead:
        """Return the head. Raises ModelError."""
        config, layer = self._config, self._names.layer
        width, inner = config.width, config.intermediate
        heads, kv_heads = config.num_heads * config.dim, config.num_kv_heads * config.dim
        is_third = config.kind is HeadKind.EAGLE3
        entering = 2 * width if is_third else width
        sizes = (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
        qkv = [self._linear(f"{layer}.self_attn.{x}", size, entering) for x, size in sizes]
        feeding = [self._linear(f"{layer}.mlp.{x}", inner, width) for x in ("gate_proj", "up_proj")]
        targets = self._tensors.targets(config.draft_vocab, self._target.vocab_size)
        states, front = self._third_front() if is_third else (_same, self._first_front())
        last_norm = self._last_norm() if is_third else None
        norm = _same if last_norm is None else self._norm_of(last_norm)
        leaving, before_output = (norm, _same) if config.output_is_normed else (_same, norm)
        before_mlp = self._weight(f"{layer}.post_attention_layernorm", width)
        return EagleHead(
            config=config,
            vocab_size=self._target.vocab_size,
            embeddings=self._embeddings().to(self._device, self._dtype),
            states=states,
            front=front,
            qkv=self._product(qkv),
            out=self._product([self._linear(f"{layer}.self_attn.o_proj", width, heads)]),
            before_mlp=self._norm_of(before_mlp),
            gate_up=self._product(feeding),
            down=self._product([self._linear(f"{layer}.mlp.down_proj", width, inner)]),
            leaving=leaving,
            last_norm=before_output,
            output=self._product([self._moved(self._output(targets))]),
            targets=None if targets is None else targets.to(self._device),
            is_ascending=targets is None or bool((targets.diff() > 0).all()),
            weights=NormWeights(*self._entering, before_mlp, last_norm),
        )

    def _first_front(self) -> Front:
        """Return EAGLE's `Front`: the layer has no norm before its attention."""
        width = self._config.width
        fc = self._product([self._linear(self._names.fc, width, 2 * width)])

        def front(
            embedded: torch.Tensor, states: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            joined = fc(torch.cat((embedded, states), dim=-1))
            return joined, joined

        return front

    def _third_front(self) -> tuple[Product, Front]:
        """Return EAGLE-3's function that makes states of features, and its `Front`."""
        width, layer = self._config.width, self._names.layer
        is_normed = self._config.residual_is_normed
        weights = [self._weight(f"{layer}.{x}", width) for x in ("input_layernorm", "hidden_norm")]
        self._entering = weights[0], weights[1]
        of_embedding, of_state = map(self._norm_of, weights)

        def front(
            embedded: torch.Tensor, states: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            normed = of_state(states)
            entering = torch.cat((of_embedding(embedded), normed), dim=-1)
            return entering, normed if is_normed else states

        return self._third_states(), front

    def _third_states(self) -> Product:
        """Return EAGLE-3's function that makes states of features."""
        width, size = self._config.width, self._target.hidden_size
        if self._config.reads_last:
            self._refuse_another_width("matrix for features")
            return _same
        num_layers = len(self._config.layers)
        fc = self._product([self._linear(self._names.fc, width, num_layers * size)])
        if "input_norm.weight" in self._tensors:  # `norm_before_fc`
            whole = self._norm("input_norm", num_layers * size)
            return lambda features: fc(whole(features))
        if not self._config.features_are_normed:
            return fc
        each = [self._norm(f"fc_norm.{index}", size) for index in range(num_layers)]

        def states(features: torch.Tensor) -> torch.Tensor:
            parts = zip(each, features.chunk(num_layers, dim=-1), strict=True)
            return fc(torch.cat([norm(part) for norm, part in parts], dim=-1))

        return states

    def _embeddings(self) -> torch.Tensor:
        """Return the head's own token embeddings, or the target's. Raises ModelError."""
        vocab_size, width = self._target.vocab_size, self._config.width
        if "embed_tokens.weight" in self._tensors:
            return self._tensors.take("embed_tokens.weight", vocab_size, width)
        self._refuse_another_width("embeddings")
        found = self._target.embedding()
        if len(found) < vocab_size or found.shape[1] != width:
            raise ModelError(
                f"{self._target.name}: its embeddings are {list(found.shape)}, but the head needs "
                f"{[vocab_size, width]}; use a head with embeddings of its own"
            )
        return found

    def _output(self, targets: torch.Tensor | None) -> torch.nn.Linear:
        """Return the head's own output matrix, or the target's rows for tokens it can draft."""
        config = self._config
        if "lm_head.weight" in self._tensors:
            return self._tensors.linear("lm_head", config.draft_vocab, config.width)
        self._refuse_another_width("output matrix")
        found = self._target.output()
        if targets is None:
            return found
        bias = None if found.bias is None else found.bias[targets]
        return linear(found.weight[targets], bias)

    def _last_norm(self) -> torch.Tensor:
        """Return the weight of the norm before the output matrix; the target's if it has none."""
        if "norm.weight" in self._tensors:
            return self._weight("norm", self._config.width)
        self._refuse_another_width("last norm")
        return self._target.last_norm().to(self._device, self._dtype)

    def _refuse_another_width(self, what: str) -> None:
        """Raise ModelError if the head cannot share `what` with the target: widths differ."""
        width, hidden_size = self._config.width, self._target.hidden_size
        if width != hidden_size:
            raise ModelError(
                f"{self._tensors.path}: it has no {what} of its own, and cannot take those of "
                f"{self._target.name}: it is {width} wide, the target {hidden_size}; get it again"
            )

    def _product(self, parts: list[torch.nn.Linear]) -> Product:
        """Return the product of these layers, which read the same inputs."""
        return (self._rounded(parts) if self._bits else None) or self._packer.take(parts)

    def _rounded(self, parts: list[torch.nn.Linear]) -> Product | None:
        """Return the product with rounded weights; None: they cannot be multiplied as such."""
        # Without the library a head is not rounded: compiling it takes longer than loading a head.
        if library(compiles=False) is None or any(part.in_features % GROUP for part in parts):
            return None
        weight, bias = stack(parts)
        return quantised_product(quantised(weight, self._bits), bias, self._dtype)

    def _linear(self, name: str, rows: int, columns: int) -> torch.nn.Linear:
        return self._moved(self._tensors.linear(name, rows, columns))

    def _moved(self, part: torch.nn.Linear) -> torch.nn.Linear:
        return part.to(self._device, self._dtype)

    def _norm(self, name: str, size: int) -> Product:
        return self._norm_of(self._weight(name, size))

    def _weight(self, name: str, size: int) -> torch.Tensor:
        """Return the weight [size] of a norm."""
        return self._tensors.take(f"{name}.weight", size).to(self._device, self._dtype)

    def _norm_of(self, weight: torch.Tensor) -> Product:
        form = of_pairs if self._device.type == "cpu" else at_once
        return rms_norm(weight, self._config.epsilon, form)


def _same(x: torch.Tensor) -> torch.Tensor:
    """Return `x`: the identity, for layouts without this step."""
    return x
