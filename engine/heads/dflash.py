"""A DFlash head: some layers that draft a block of tokens in one pass (arXiv 2602.06036).

    c_i = norm(fc f_i)                  f_i: features of token i of the text, of several layers
    x = [e, m, m, ...]                  e: embedding of the text's last token, m: of a mask token
    y = x + attention(norm x)           keys and values: of all c_i, and of the block itself
    x' = y + mlp(norm y)                so in each layer
    logits: the target's output matrix times norm x of the masks, each for the token in its place

So a draft token does not depend on the drafts before it. The second version does two things more. A
row of the block is mixed with the row before it, in front of each attention and MLP and behind it
(`Mixer`). And the likeliest tokens of a place are weighed anew by the token before (`Selector`).

Owns the configuration and the weights. Knows no cache and no slot: keys and values of the text are
passed in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint.files import Object
from engine.checkpoint.model import max_model_len
from engine.errors import ModelError
from engine.forward.forward import over_all
from engine.forward.operators import Packer, Product, at_once
from engine.heads.head_tensors import HeadTensors
from engine.heads.layouts import rotary_config
from engine.heads.stated import (
    EPSILON,
    FULL,
    SECOND,
    SLIDING,
    USUAL_BLOCK,
    TargetSizes,
    count,
    refuse_odd_config,
    refuse_other_target,
)
from engine.heads.target import Target
from proto.head_kinds import HeadKind, dflash_part, feature_layers

# Endings of tensors in some checkpoints that are not needed, as in `eagle_layer.py`.
_UNUSED = ("t2d", "inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """The sizes of a DFlash head, checked against its target.

    width        hidden size, the target's
    dim          size of one attention head
    intermediate  inner size of the feed-forward blocks
    epsilon      epsilon of its norms
    layers       target layers whose features it reads, as in `EagleConfig`
    block        tokens of a block: the text's last one and the masks
    draft_vocab  number of tokens that it can draft
    mask_token   token id whose embedding stands for a token that is not known yet
    windows      per layer: so many positions are seen at most, this one included; None: all
    are_causal   per layer: True if a row of the block does not see the rows behind it
    scale        embeddings are multiplied with it
    multiplier   logits are multiplied with it
    softcap      logits are bent to stay within +-softcap; 0: they are not
    mixed, group  tokens that a mixer reads, and width of its groups; 0: the first version
    rank, top_k  of the selector: width of its vectors, and how many tokens of a place it weighs
    rope         a transformers configuration that describes its rotary embedding
    """

    width: int
    num_heads: int
    num_kv_heads: int
    dim: int
    intermediate: int
    epsilon: float
    layers: tuple[int, ...]
    block: int
    draft_vocab: int
    mask_token: int
    windows: tuple[int | None, ...]
    are_causal: tuple[bool, ...]
    scale: float
    multiplier: float
    softcap: float
    mixed: int
    group: int
    rank: int
    top_k: int
    max_model_len: int
    rope: Any


def read_dflash_config(path: Path, stated: Object, target: Target) -> DFlashConfig:
    """Return a DFlash head's sizes from its config.json, after checking them against the target.

    path    path of config.json, for messages
    stated  the content of config.json

    Raises:
        ModelError: a number is missing, or the head was made for another target or has a form that
            is not covered.
    """
    sizes = TargetSizes(target.name, target.vocab_size, target.hidden_size, target.num_layers)
    refuse_other_target(path, stated, HeadKind.DFLASH, sizes)
    refuse_odd_config(path, stated, HeadKind.DFLASH)
    part: Any = dflash_part(stated)
    width, num_heads = count(path, part, "hidden_size"), count(path, part, "num_attention_heads")
    dim = count(path, part, "head_dim", width // num_heads or 1)
    num_layers = count(path, part, "num_hidden_layers", 1)
    kinds = part.get("layer_types") or [FULL] * num_layers
    says = part.get("is_causal")
    rope = rotary_config(path, part, num_heads, dim)
    is_bounded = rope.rope_parameters["rope_type"] in ("longrope", "dynamic")
    longest = max_model_len(str(path), rope)
    mixed, group, rank, top_k = (int(part.get(field) or 0) for field in SECOND)
    if group and width % group:
        raise ModelError(f"{path}: conv_group_size, {group}, does not divide hidden_size, {width}")
    return DFlashConfig(
        width=width,
        num_heads=num_heads,
        num_kv_heads=count(path, part, "num_key_value_heads", num_heads),
        dim=dim,
        intermediate=count(path, part, "intermediate_size"),
        epsilon=float(part.get("rms_norm_eps") or EPSILON),
        layers=feature_layers(HeadKind.DFLASH, stated, target.num_layers),
        block=count(path, part, "block_size", USUAL_BLOCK),
        draft_vocab=count(path, part, "draft_vocab_size", target.vocab_size),
        mask_token=int(part["mask_token_id"]),
        windows=tuple(part["sliding_window"] if kind == SLIDING else None for kind in kinds),
        # Where config.json does not say, layers with a window are causal, as they were trained.
        are_causal=tuple(kind == SLIDING if says is None else bool(says) for kind in kinds),
        scale=_number(path, part, "input_embedding_scale", 1.0),
        multiplier=_number(path, part, "output_multiplier", 1.0),
        softcap=_number(path, part, "final_logit_softcapping", 0.0),
        mixed=mixed,
        group=group,
        rank=rank,
        top_k=top_k,
        max_model_len=min(target.max_model_len, longest) if is_bounded else target.max_model_len,
        rope=rope,
    )


def _number(path: Path, part: Object, field: str, default: float) -> float:
    """Return a number of config.json that is 0 or more. Raises ModelError."""
    found = part.get(field)
    if found is None:
        return default
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or not 0 <= found < math.inf:
        raise ModelError(f"{path}: {field} must be a number that is not below 0; get it again")
    return float(found)


# -- what the second version adds ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mixer:
    """Mixes each row of a block with the rows before it, by weights that depend on the row.

    base   [2, mixed, width]: fixed weights, in front of a part of the layer and behind it
    moved  product that gives what is added to them, [2, mixed, groups] of each row
    """

    base: torch.Tensor
    moved: Product
    group: int

    def before(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mixed rows [n, width], weights [n, mixed, groups] for `behind`)."""
        moved = self.moved(rows).view(len(rows), 2, self.base.shape[1], -1)
        return self._mixed(rows, moved[:, 0], self.base[0]), moved[:, 1]

    def behind(self, rows: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """Return the mixed outputs [n, width] of that part of the layer."""
        return self._mixed(rows, moved, self.base[1])

    def _mixed(self, rows: torch.Tensor, moved: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(rows)
        for back, fixed in enumerate(base):
            weights = fixed + moved[:, back].repeat_interleave(self.group, dim=-1)
            made = made + weights * F.pad(rows, (0, 0, back, 0))[: len(rows)]
        return made


@dataclass(frozen=True, slots=True)
class Selector:
    """Weighs the likeliest tokens of a place by the token before it.

    before, after  [V, rank]: vectors of a token that comes before, and of one that may follow
    place  product that gives the vector [rank] of a place in the block
    """

    before: torch.Tensor
    after: torch.Tensor
    place: Product
    top_k: int

    def weighed(self, logits: torch.Tensor, place: torch.Tensor, token: int) -> torch.Tensor:
        """Return the logits [V] of a place behind `token`; all but the likeliest are the lowest.

        logits  [V]: of the place, whatever is before it
        place   [rank]: its vector
        """
        best, ids = logits.topk(min(self.top_k, len(logits)))
        best = best + self.after[ids].float() @ (self.before[token] * place).float()
        return torch.full_like(logits, torch.finfo(logits.dtype).min).index_copy_(0, ids, best)


# -- the head --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """The weights of a layer; `keys_values` is the part of `qkv` that a text's tokens need."""

    qkv: Product
    keys_values: Product
    of_queries: Product  # the norm of each head's queries, and of its keys
    of_keys: Product
    out: Product
    gate_up: Product
    down: Product
    before_attention: Product
    before_mlp: Product
    mixers: tuple[Mixer, Mixer] | None  # of attention and of the MLP


@dataclass(frozen=True, slots=True)
class DFlash:
    """A DFlash head on its device.

    masked      [width]: the embedding of the mask token, scaled
    context     function: features [n, feature_size] -> c [n, width]
    stack       its layers
    last_norm   norm before `output`, which gives logits
    targets     [draft_vocab] int64: the target's token of each column of `output`; None: the same
    """

    config: DFlashConfig
    vocab_size: int
    embeddings: torch.Tensor
    masked: torch.Tensor
    context: Product
    stack: Sequence[BlockLayer]
    last_norm: Product
    output: Product
    targets: torch.Tensor | None
    selector: Selector | None
    dtype: torch.dtype
    device: torch.device

    def of_text(self, features: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return keys and values [layers, 2, n, kv_heads, dim] of a text's tokens.

        features  [n, feature_size], of the tokens
        turns     [2, n, 1, dim]: the rotary embedding at their positions
        """
        made = self.context(features.to(self.dtype))
        shape = len(made), 2, self.config.num_kv_heads, self.config.dim
        pairs = []
        for layer in self.stack:
            keys, values = layer.keys_values(made).view(shape).unbind(1)
            pairs.append(torch.stack((_turned(layer.of_keys(keys), turns), values)))
        return torch.stack(pairs)

    def block(
        self, token: int, text: torch.Tensor, turns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [block - 1, V] float32 of the drafts behind a text, and their states.

        token  the text's last token
        text   [layers, 2, n, kv_heads, dim]: keys and values of the tokens before it, in order
        turns  [2, block, 1, dim]: the rotary embedding at the positions of the block
        """
        config = self.config
        first = (self.embeddings[token] * config.scale)[None]
        rows = torch.cat((first, self.masked.expand(config.block - 1, -1)))
        for number, layer in enumerate(self.stack):
            rows = self._through(layer, rows, text[number], turns, number)
        rows = self.last_norm(rows[1:])
        logits = self.output(rows).float() * config.multiplier
        if config.softcap:
            logits = torch.tanh(logits / config.softcap) * config.softcap
        return over_all(logits, self.targets, self.vocab_size), rows

    def _through(
        self,
        layer: BlockLayer,
        rows: torch.Tensor,
        text: torch.Tensor,
        turns: torch.Tensor,
        number: int,
    ) -> torch.Tensor:
        """Return the block's rows after a layer."""
        config, normed, kept = self.config, layer.before_attention(rows), None
        if layer.mixers is not None:
            normed, kept = layer.mixers[0].before(normed)
        heads = layer.qkv(normed).view(len(rows), -1, config.dim)
        queries = _turned(layer.of_queries(heads[:, : config.num_heads]), turns)
        keys, values = heads[:, config.num_heads :].chunk(2, dim=1)
        keys = torch.cat((text[0], _turned(layer.of_keys(keys), turns)))
        seen = keys.transpose(0, 1)[None], torch.cat((text[1], values)).transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            *seen,
            attn_mask=self._mask(len(rows), len(keys), number),
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        hidden = layer.out(attended[0].transpose(0, 1).reshape(len(rows), -1))
        if layer.mixers is not None and kept is not None:
            hidden = layer.mixers[0].behind(hidden, kept)
        rows = rows + hidden
        normed = layer.before_mlp(rows)
        if layer.mixers is not None:
            normed, kept = layer.mixers[1].before(normed)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        hidden = layer.down(F.silu(gate) * up)
        if layer.mixers is not None and kept is not None:
            hidden = layer.mixers[1].behind(hidden, kept)
        return rows + hidden

    def _mask(self, num_rows: int, num_seen: int, number: int) -> torch.Tensor | None:
        """Return what the block's rows see [num_rows, num_seen] in a layer; None: everything."""
        window, is_causal = self.config.windows[number], self.config.are_causal[number]
        if window is None and not is_causal:
            return None
        seen = torch.arange(num_seen, device=self.device)
        ahead = seen - seen[num_seen - num_rows :, None]
        mask = torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            mask &= ahead.abs() < window
        return mask & (ahead <= 0) if is_causal else mask


def _turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return heads [n, heads, dim] turned by the rotary embedding [2, n, 1, dim]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * turns[0] + torch.cat((second, first), dim=-1) * turns[1]


# -- reading ---------------------------------------------------------------------------------------


def read_dflash(
    config: DFlashConfig,
    tensors: HeadTensors,
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
) -> DFlash:
    """Return a DFlash head made of its tensors and of the target's embeddings and output matrix.

    Raises:
        ModelError: a tensor is missing, has another shape, or is unknown, or the target has no
            embedding of the mask token.
    """
    made = _Reader(config, tensors, target, dtype, device).head()
    tensors.refuse_rest(*_UNUSED)
    return made


class _Reader:
    """Builds a `DFlash` from a checkpoint's tensors."""

    def __init__(
        self,
        config: DFlashConfig,
        tensors: HeadTensors,
        target: Target,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._tensors, self._target = config, tensors, target
        self._dtype, self._device = dtype, device
        self._packer = Packer(tiles=True)

    def head(self) -> DFlash:
        """Return the head. Raises ModelError."""
        config, width = self._config, self._config.width
        embeddings = self._shared("embed_tokens.weight", self._target.embedding)
        if config.mask_token >= len(embeddings):
            raise ModelError(
                f"{self._tensors.path}: mask_token_id is {config.mask_token}, and "
                f"{self._target.name} has {len(embeddings)} embeddings; use a head made for this "
                "target"
            )
        targets = self._tensors.targets(config.draft_vocab, self._target.vocab_size)
        entry = self._product(("fc", width, len(config.layers) * width))
        norm = self._norm("hidden_norm", width)
        return DFlash(
            config=config,
            vocab_size=self._target.vocab_size,
            embeddings=embeddings,
            masked=embeddings[config.mask_token] * config.scale,
            context=lambda features: norm(entry(features)),
            stack=[self._layer(f"layers.{number}") for number in range(len(config.windows))],
            last_norm=self._norm("norm", width),
            output=self._output(),
            targets=None if targets is None else targets.to(self._device),
            selector=self._selector() if config.rank else None,
            dtype=self._dtype,
            device=self._device,
        )

    def _layer(self, name: str) -> BlockLayer:
        config, width, inner = self._config, self._config.width, self._config.intermediate
        heads, kv_heads = config.num_heads * config.dim, config.num_kv_heads * config.dim
        sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        q, k, v = ((f"{name}.self_attn.{part}", size, width) for part, size in sizes.items())
        feeding = [(f"{name}.mlp.{part}", inner, width) for part in ("gate_proj", "up_proj")]
        return BlockLayer(
            qkv=self._product(q, k, v),
            keys_values=self._product(k, v),
            of_queries=self._norm(f"{name}.self_attn.q_norm", config.dim),
            of_keys=self._norm(f"{name}.self_attn.k_norm", config.dim),
            out=self._product((f"{name}.self_attn.o_proj", width, heads)),
            gate_up=self._product(*feeding),
            down=self._product((f"{name}.mlp.down_proj", width, inner)),
            before_attention=self._norm(f"{name}.input_layernorm", width),
            before_mlp=self._norm(f"{name}.post_attention_layernorm", width),
            mixers=self._mixers(name) if config.mixed else None,
        )

    def _mixers(self, name: str) -> tuple[Mixer, Mixer]:
        return self._mixer(f"{name}.attention_conv"), self._mixer(f"{name}.mlp_conv")

    def _mixer(self, name: str) -> Mixer:
        config = self._config
        num_moved = 2 * config.mixed * (config.width // config.group)
        base = self._tensors.take(f"{name}.base_kernel", 2, config.mixed, config.width)
        moved = self._product((f"{name}.kernel_projection", num_moved, config.width))
        return Mixer(base.to(self._device, self._dtype), moved, config.group)

    def _selector(self) -> Selector:
        name, config = "candidate_selector", self._config
        books = (
            self._tensors.take(f"{name}.{book}_codebook", self._target.vocab_size, config.rank)
            for book in ("predecessor", "successor")
        )
        before, after = (book.to(self._device, self._dtype) for book in books)
        place = self._product((f"{name}.hidden_projection", config.rank, config.width))
        return Selector(before, after, place, config.top_k)

    def _shared(self, name: str, of_target: Any) -> torch.Tensor:
        """Return a matrix of the checkpoint itself if it has it, else the target's."""
        if name not in self._tensors:
            found: torch.Tensor = of_target()
        else:
            found = self._tensors.take(name, self._target.vocab_size, self._config.width)
        return found.to(self._device, self._dtype)

    def _output(self) -> Product:
        config = self._config
        if "lm_head.weight" in self._tensors or config.draft_vocab != self._target.vocab_size:
            part = self._tensors.linear("lm_head", config.draft_vocab, config.width)
        else:
            part = self._target.output()
        return self._packer.take([part.to(self._device, self._dtype)])

    def _product(self, *parts: tuple[str, int, int]) -> Product:
        """Return the product with these matrices, stacked; each is (name, outputs, inputs)."""
        found = [self._tensors.linear(*part).to(self._device, self._dtype) for part in parts]
        return self._packer.take(found)

    def _norm(self, name: str, size: int) -> Product:
        weight = self._tensors.take(f"{name}.weight", size).to(self._device, self._dtype)
        return at_once(weight, size, self._config.epsilon)
