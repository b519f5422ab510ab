"""The draft heads of a target, as modules that can be trained: Medusa, EAGLE, EAGLE-3, DFlash.

This file defines what a head computes, which feature belongs to which token, and the files of a
head. It knows neither texts nor training.

Positions count tokens. The target's row of token q gives its features f_q and, of the token that
follows, its distribution p_q. Row i of a head is one chain of drafts after the tokens 0 .. i + 1:
at step s it holds token i + 1 + s and predicts the next token, as p_(i + 1 + s) does. At step 0 its
input is that token with f_i, the target's features of the token before it; later it is the token
with the state that the head itself gave the row at step s - 1. So in training the text is the true
one and the states are the head's own: the training-time test of EAGLE-3 (2503.01840, figure 6).
Medusa's and DFlash's steps do not depend on each other.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

from lab.training.features import BLOCK, NUM_BLOCK_LAYERS
from lab.training.files import write_tensors, write_text
from proto.head_kinds import HeadKind

NUM_MEDUSA_HEADS = 4
MOST_DRAFT_TOKENS = 32_000  # as many tokens as published EAGLE-3 heads can draft
FILES = {
    HeadKind.MEDUSA: "medusa_lm_head.safetensors",
    HeadKind.EAGLE: "model.safetensors",
    HeadKind.EAGLE3: "model.safetensors",
    HeadKind.DFLASH: "model.safetensors",
}
# The fields that a head's config.json shares with that of a llama.
LLAMA_FIELDS = (
    *("hidden_act", "hidden_size", "initializer_range", "intermediate_size"),
    *("max_position_embeddings", "model_type", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"),
)
Past = list[tuple[Tensor, Tensor]]  # each step's keys and values, [B, key heads, N, head_dim]


@dataclass(frozen=True, slots=True)
class Shared:
    """What a head takes from its target: sizes, and tensors that it uses or begins with.

    name        the target's name, for config.json
    config      the sizes of a llama layer as wide as the target; vocab_size is V
    layers      the layers whose features the head reads (`proto.head_kinds.feature_layers`)
    embedding   [V, H] float32: the target's token embeddings
    output      [V, H] float32: its output matrix
    bias        [V] float32: what the target adds to its logits; None: nothing
    last_norm   [H] float32: the weight of its last norm
    """

    name: str
    config: LlamaConfig
    layers: tuple[int, ...]
    embedding: Tensor
    output: Tensor
    bias: Tensor | None
    last_norm: Tensor

    @property
    def num_draft_tokens(self) -> int:
        """Return how many tokens an EAGLE-3 head of this target can draft, unless it is told."""
        return min(MOST_DRAFT_TOKENS, (len(self.output) + 1) // 2)


class Factors(NamedTuple):
    """What makes logits: rows [..., H] times an output matrix [D, H], plus a bias [D] if any."""

    rows: Tensor
    matrix: Tensor
    bias: Tensor | None

    def logits(self) -> Tensor:
        """Return the logits [..., D]."""
        return F.linear(self.rows, self.matrix, self.bias)


def at_step(values: Tensor, step: int, num_rows: int) -> Tensor:
    """Return [B, num_rows, ...] of values [B, T, ...]: one for each token that the rows hold."""
    return values[:, 1 + step : 1 + step + num_rows]


def rope_theta(config: LlamaConfig) -> float:
    """Return the base of the rotary embedding."""
    theta: float = config.rope_parameters["rope_theta"]
    return theta


class Attention(nn.Module):
    """The attention of a llama layer over rows that come in steps (see the module)."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, rope_theta(config)
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """Return [B, N, H] for the next step's inputs [B, N, width], and append to `past`.

        Appended are the step's keys and values. A row sees step 0 of the rows up to itself, and its
        own later steps.
        """
        num_rows = x.shape[1]
        angles = self.angles(num_rows, len(past), x.device)
        query, key = (rotated(self.heads(p(x)), angles) for p in (self.q_proj, self.k_proj))
        past.append((key, self.heads(self.v_proj(x))))
        first_key, first_value = (t[:, :, None] for t in past[0])
        query = query.unflatten(1, (first_key.shape[1], -1)) / math.sqrt(self.head_dim)
        later = query.new_full((num_rows, num_rows), -torch.inf).triu(1)
        scores = [query @ first_key.transpose(-1, -2) + later]  # [B, key heads, group, N, N]
        scores += [(query * k[:, :, None]).sum(dim=-1, keepdim=True) for k, _ in past[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        mixed = weights[..., :num_rows] @ first_value
        for step, (_, value) in enumerate(past[1:]):
            mixed = mixed + weights[..., num_rows + step, None] * value[:, :, None]
        return self.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """Return [B, N, heads * head_dim] split into [B, heads, N, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def angles(self, num_rows: int, step: int, device: torch.device) -> Tensor:
        """Return [N, head_dim]: the rotary angle of each pair of numbers in each row at a step.

        Only differences matter, so row 0 has angle 0 at step 0.
        """
        pairs = torch.arange(0, self.head_dim, 2, device=device) / self.head_dim
        rows = torch.arange(step, step + num_rows, device=device)
        return torch.outer(rows, self.theta**-pairs).repeat(1, 2)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return x with pairs rotated by these angles, as llama does: j goes with j + head_dim / 2."""
    left, right = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()


class FeedForward(nn.Module):
    """The gated feed-forward block of a llama layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=False)
        self.up_proj = nn.Linear(*sizes, bias=False)
        self.down_proj = nn.Linear(*reversed(sizes), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] for x [..., H]."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """A llama layer without the norm before its attention, as in EAGLE."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = norm(config)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """Return [B, N, H] for the next step's inputs [B, N, H]; append keys, values to `past`."""
        x = x + self.self_attn(x, past)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Midlayer(nn.Module):
    """EAGLE-3's layer: attention reads the token's embedding and the state side by side.

    Each has a norm of its own before it, and the result is added to the state.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = norm(config), norm(config)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = norm(config)

    def forward(self, embedded: Tensor, state: Tensor, past: Past) -> Tensor:
        """Return the next states [B, N, H] for embeddings, states [B, N, H]; append to `past`."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), dim=-1)
        x = state + self.self_attn(x, past)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


def norm(config: LlamaConfig) -> nn.RMSNorm:
    """Return a new RMS norm of the model's width."""
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class ResBlock(nn.Module):
    """Medusa's residual block; untrained, it is the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] for x [..., H]."""
        return x + F.silu(self.linear(x))


class OfWholeVocabulary:
    """A head that has the target's vocabulary."""

    @property
    def ids(self) -> None:
        """Return None: the head's tokens are the target's."""
        return None

    def of_target(self, logits: Tensor) -> Tensor:
        """Return the logits unchanged."""
        return logits


class Medusa(OfWholeVocabulary, nn.ModuleList):
    """Medusa heads (2401.10774): each reads one feature alone.

    Their output matrices begin as the target's. Step s is head s, which predicts the token s + 2
    after the feature's own token.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        vocab_size, hidden_size = shared.output.shape
        for _ in range(NUM_MEDUSA_HEADS):
            output = nn.Linear(hidden_size, vocab_size, bias=False)
            output.weight.data.copy_(shared.output)
            self.append(nn.Sequential(ResBlock(hidden_size), output))

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """Return [B, T - num_steps, H] for each head: the input of its output matrix.

        Arguments as for `Eagle.states`.
        """
        rows = features[:, : text.shape[1] - num_steps]
        heads: list[Any] = list(self)
        return [block(rows) for block, _ in heads[:num_steps]]

    def factors(self, state: Tensor, step: int) -> Factors:
        """Return what makes the logits [..., V] of head `step` for its states [..., H]."""
        head: Any = self[step]
        return Factors(state, head[1].weight, None)


class Eagle(OfWholeVocabulary, nn.Module):
    """EAGLE (2401.15077): predicts the target's next feature from the last one and the next token.

    Embedding and output matrix are the target's, so they are not among the head's weights.
    """

    embedding: Tensor
    output: Tensor

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        config = shared.config
        self.register_buffer("embedding", shared.embedding, persistent=False)
        self.register_buffer("output", shared.output, persistent=False)
        self.register_buffer("bias", shared.bias, persistent=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config)])

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """Return for each step the rows' states [B, T - num_steps, H]: the predicted features.

        features  of the target, [B, T, F]
        text      int64 [B, T]
        """
        num_rows = text.shape[1] - num_steps
        state, past, states = features[:, :num_rows], Past(), []
        for step in range(num_steps):
            embedded = F.embedding(at_step(text, step, num_rows), self.embedding)
            state = self.layers[0](self.fc(torch.cat((embedded, state), dim=-1)).float(), past)
            states.append(state)
        return states

    def factors(self, state: Tensor, _step: int) -> Factors:
        """Return what makes the logits [..., V] for the states [..., H]."""
        return Factors(state, self.output, self.bias)


class Eagle3(nn.Module):
    """EAGLE-3 (2503.01840): reads three features, and has its own output matrix for common tokens.

    Its states are the layer's, before the last norm. `d2t` is the target's id of a token minus the
    head's id; `t2d` says which of the target's tokens the head has.
    """

    embedding: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shared: Shared, ids: Tensor) -> None:
        super().__init__()
        config = shared.config
        self.register_buffer("embedding", shared.embedding, persistent=False)
        self.register_buffer("d2t", ids - torch.arange(len(ids), device=ids.device))
        t2d = torch.zeros(len(shared.output), dtype=torch.bool, device=ids.device)
        self.register_buffer("t2d", t2d.index_fill(0, ids, value=True))
        size = config.hidden_size
        self.fc = nn.Linear(len(shared.layers) * size, size, bias=False)
        # Begins by passing on the last of the three features, which is a better start than noise.
        self.fc.weight.data.zero_()[:, -size:].fill_diagonal_(1.0)
        self.midlayer = Midlayer(config)
        self.norm = norm(config)
        self.norm.weight.data.copy_(shared.last_norm)
        self.lm_head = nn.Linear(size, len(ids), bias=False)
        self.lm_head.weight.data.copy_(shared.output[ids])

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """Return for each step the states [B, T - num_steps, H] of the rows.

        Arguments as for `Eagle.states`.
        """
        num_rows = text.shape[1] - num_steps
        state, past, states = self.fc(features[:, :num_rows]).float(), Past(), []
        for step in range(num_steps):
            embedded = F.embedding(at_step(text, step, num_rows), self.embedding)
            state = self.midlayer(embedded, state, past)
            states.append(state)
        return states

    def factors(self, state: Tensor, _step: int) -> Factors:
        """Return what makes the logits [..., D] over its vocabulary for the states [..., H]."""
        return Factors(self.norm(state), self.lm_head.weight, None)

    def of_target(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] over the target's vocabulary: -inf for tokens the head lacks."""
        everything = logits.new_full((*logits.shape[:-1], len(self.t2d)), -torch.inf)
        return everything.index_copy(-1, self.ids, logits)

    @property
    def ids(self) -> Tensor:
        """Return int64 [D]: the target's ids of the head's tokens, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class BlockAttention(nn.Module):
    """The attention of blocks over the text before them and over themselves."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, rope_theta(config)
        width, dim = config.hidden_size, config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, key_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, key_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def forward(self, blocks: Tensor, text: Tensor) -> Tensor:
        """Return [B, N, M, H] for blocks [B, N, M, H]; block i sees rows 0 .. i of text [B, N, H].

        Row j of block i stands at position i + 1 + j, row i of the text at position i.
        """
        num_blocks, size = blocks.shape[1:3]
        at = torch.arange(num_blocks, device=blocks.device)
        places = at[:, None] + 1 + torch.arange(size, device=blocks.device)
        query = self.turned(self.q_norm(self.heads(self.q_proj(blocks))), places)
        own = self.turned(self.k_norm(self.heads(self.k_proj(blocks))), places)
        key = self.turned(self.k_norm(self.heads(self.k_proj(text))), at)
        values = self.heads(self.v_proj(blocks)), self.heads(self.v_proj(text))
        group = query.shape[-2] // key.shape[-2]
        query = query.unflatten(-2, (-1, group)) / math.sqrt(self.head_dim)
        before = torch.einsum("bnmkgd,btkd->bkgnmt", query, key)
        hidden = at > at[:, None, None]
        before = before.masked_fill(hidden, -torch.inf)
        among = torch.einsum("bnmkgd,bnskd->bkgnms", query, own)
        weights = torch.cat((before, among), dim=-1).softmax(dim=-1).to(query.dtype)
        seen, selves = weights.split((num_blocks, size), dim=-1)
        mixed = torch.einsum("bkgnms,bnskd->bnmkgd", selves, values[0])
        mixed = mixed + torch.einsum("bkgnmt,btkd->bnmkgd", seen, values[1])
        return self.o_proj(mixed.flatten(-3))

    def heads(self, x: Tensor) -> Tensor:
        """Return [..., heads * head_dim] split into [..., heads, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).float()

    def turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Return heads [..., *positions, heads, head_dim] turned by the rotary embedding."""
        pairs = torch.arange(0, self.head_dim, 2, device=heads.device) / self.head_dim
        angles = (positions[..., None] * self.theta**-pairs).repeat(*[1] * positions.dim(), 2)
        return rotated(heads, angles[..., None, :])


class BlockLayer(nn.Module):
    """A layer of a DFlash head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(config), norm(config)
        self.self_attn = BlockAttention(config)
        self.mlp = FeedForward(config)

    def forward(self, blocks: Tensor, text: Tensor) -> Tensor:
        """Return [B, N, M, H] for blocks [B, N, M, H] behind a text [B, N, H]."""
        blocks = blocks + self.self_attn(self.input_layernorm(blocks), text)
        y: Tensor = blocks + self.mlp(self.post_attention_layernorm(blocks))
        return y


class DFlash(OfWholeVocabulary, nn.Module):
    """DFlash (2602.06036): reads some features of all tokens, and drafts a block at once.

    Embeddings and output matrix are the target's, so they are not among the head's weights.
    """

    embedding: Tensor
    output: Tensor

    def __init__(self, shared: Shared, mask_token: int) -> None:
        super().__init__()
        config, size = shared.config, shared.config.hidden_size
        self.mask_token = mask_token
        self.register_buffer("embedding", shared.embedding, persistent=False)
        self.register_buffer("output", shared.output, persistent=False)
        self.register_buffer("bias", shared.bias, persistent=False)
        self.fc = nn.Linear(len(shared.layers) * size, size, bias=False)
        self.hidden_norm = norm(config)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(NUM_BLOCK_LAYERS)])
        self.norm = norm(config)
        self.norm.weight.data.copy_(shared.last_norm)

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """Return for each step the rows' states [B, T - num_steps, H], after the last norm.

        Arguments as for `Eagle.states`.
        """
        num_rows = text.shape[1] - num_steps
        before = self.hidden_norm(self.fc(features[:, :num_rows]).float())
        first = F.embedding(at_step(text, 0, num_rows), self.embedding)[:, :, None]
        masks = self.embedding[self.mask_token].expand(*first.shape[:2], BLOCK - 1, -1)
        blocks = torch.cat((first, masks), dim=2)
        for layer in self.layers:
            blocks = layer(blocks, before)
        return list(self.norm(blocks)[:, :, 1 : 1 + num_steps].float().unbind(dim=2))

    def factors(self, state: Tensor, _step: int) -> Factors:
        """Return what makes the logits [..., V] for the states [..., H]."""
        return Factors(state, self.output, self.bias)


Head = Medusa | Eagle | Eagle3 | DFlash


def new_head(kind: HeadKind, shared: Shared, ids: Tensor) -> Head:
    """Return an untrained head.

    ids  the tokens of EAGLE-3's vocabulary, ascending; of DFlash one, which stands for a mask
    """
    match kind:
        case HeadKind.MEDUSA:
            head: Head = Medusa(shared)
        case HeadKind.EAGLE:
            head = Eagle(shared)
        case HeadKind.EAGLE3:
            head = Eagle3(shared, ids.to(shared.output.device))
        case HeadKind.DFLASH:
            head = DFlash(shared, int(ids[0]))
    return head.to(shared.output.device)


def fields_of(head: Head, kind: HeadKind, shared: Shared) -> dict[str, object]:
    """Return the content of a head's config.json, with the names that published heads use."""
    config = shared.config.to_dict()
    if kind is HeadKind.MEDUSA:
        fields = {key: config[key] for key in ("hidden_size", "vocab_size")}
        fields |= {"medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": 1}
        return fields | {"base_model_name_or_path": shared.name, "torch_dtype": "bfloat16"}
    fields = {key: config[key] for key in LLAMA_FIELDS}
    fields |= {"num_hidden_layers": 1, "rope_theta": rope_theta(shared.config), "use_cache": True}
    fields |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    if isinstance(head, DFlash):
        outputs = [layer - 1 for layer in shared.layers]  # counted by what a layer gives
        inner = {"mask_token_id": head.mask_token, "block_size": BLOCK, "target_layer_ids": outputs}
        fields |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
        return fields | {"num_hidden_layers": NUM_BLOCK_LAYERS, "dflash_config": inner}
    if kind is HeadKind.EAGLE:
        return fields | {"architectures": ["LlamaForCausalLM"], "bias": True}
    fields["architectures"] = ["LlamaForCausalLMEagle3"]
    assert head.ids is not None
    return fields | {"draft_vocab_size": len(head.ids)}


def write_head(head: Head, kind: HeadKind, shared: Shared, folder: Path) -> None:
    """Write a head's weights (bfloat16), and then its config.json, into `folder`.

    Raises OutputError.
    """
    tensors = {
        key: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for key, tensor in head.state_dict().items()
    }
    write_tensors(folder / FILES[kind], tensors)
    text = json.dumps(fields_of(head, kind, shared), indent=2, sort_keys=True)
    write_text(folder / "config.json", text + "\n")


def load_head(kind: HeadKind, shared: Shared, folder: Path) -> Head:
    """Load and return a head that `write_head` wrote, in float32."""
    tensors = load_file(folder / FILES[kind])
    ids = tensors.get("d2t", torch.empty(0, dtype=torch.int64))
    ids = ids + torch.arange(len(ids))
    if kind is HeadKind.DFLASH:
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        ids = torch.tensor([stated["dflash_config"]["mask_token_id"]])
    head = new_head(kind, shared, ids)
    head.load_state_dict(tensors)
    return head.eval()
