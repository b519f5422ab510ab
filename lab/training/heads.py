"""The draft heads of the embedded target, as modules that can be trained: Medusa, EAGLE, EAGLE-3.

Owns what a head computes, which feature meets which token, and the files of a written head. It
knows neither corpus nor training.

Positions count tokens. The target's row of token q gives its features f_q and, of the token that
follows, its distribution p_q. Row i of a head is one chain of drafts behind the tokens 0 .. i + 1:
at step s it holds token i + 1 + s and says what follows it, as p_(i + 1 + s) does. At step 0 that
token stands beside f_i, the target's features of the token before it, later beside the state that
the head itself gave the row at step s - 1. So in training the text is the true one and the states
are its own: the training-time test of EAGLE-3 (2503.01840, figure 6).
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

NUM_MEDUSA_HEADS = 4
DRAFT_VOCAB_SIZE = 2048
# What enters these layers, and -1 for what the output matrix multiplies: with L layers, EAGLE-3
# takes 2, L // 2 and L - 3.
LAYERS = (2, 4, 5, -1)
FILES = {
    "medusa": "medusa_lm_head.safetensors",
    "eagle": "model.safetensors",
    "eagle3": "model.safetensors",
}
# Fields of the target's configuration that a head of one llama layer has too.
SHARED_FIELDS = (
    *("hidden_act", "hidden_size", "initializer_range", "intermediate_size"),
    *("max_position_embeddings", "model_type", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"),
)
Past = list[tuple[Tensor, Tensor]]  # each step's keys and values, [B, key heads, N, head_dim]


def at_step(values: Tensor, step: int, num_rows: int) -> Tensor:
    """[B, num_rows, ...] of [B, T, ...]: what belongs to the tokens that the rows hold."""
    return values[:, 1 + step : 1 + step + num_rows]


def target_features(target: LlamaForCausalLM, text: Tensor) -> Tensor:
    """[B, T, len(LAYERS) * H] of Int64[B, T]: the features of every token, side by side."""
    states = target.model(input_ids=text, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in LAYERS], dim=-1)


def rope_theta(config: LlamaConfig) -> float:
    theta: float = config.rope_parameters["rope_theta"]
    return theta


class Attention(nn.Module):
    """Attention of a llama layer over rows that come in steps."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, rope_theta(config)
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """[B, N, H] of the next step's inputs [B, N, width], whose keys and values join `past`: a
        row sees step 0 of the rows up to it, and its own later steps."""
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
        """[B, heads, N, head_dim] of [B, N, heads * head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def angles(self, num_rows: int, step: int, device: torch.device) -> Tensor:
        """[N, head_dim]: how far each pair of numbers is turned; only differences matter, so row 0
        is at 0 at step 0."""
        pairs = torch.arange(0, self.head_dim, 2, device=device) / self.head_dim
        rows = torch.arange(step, step + num_rows, device=device)
        return torch.outer(rows, self.theta**-pairs).repeat(1, 2)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions as llama has them: number j is paired with number j + head_dim / 2."""
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
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """A llama layer without the norm before its attention, as EAGLE has it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = norm(config)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = x + self.self_attn(x, past)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Midlayer(nn.Module):
    """EAGLE-3's layer: attention reads embedding and state side by side, each behind a norm of its
    own, and adds to the state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = norm(config), norm(config)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = norm(config)

    def forward(self, embedded: Tensor, state: Tensor, past: Past) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), dim=-1)
        x = state + self.self_attn(x, past)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


def norm(config: LlamaConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class ResBlock(nn.Module):
    """Medusa's block; it begins as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(nn.ModuleList):
    """Heads that read one feature alone; their output matrices begin as the target's (2401.10774).

    Its steps are its heads: head s says what comes s + 2 tokens after the feature's own token."""

    sources = (-1,)

    def __init__(self, config: LlamaConfig, embedding: Tensor) -> None:
        super().__init__()
        for _ in range(NUM_MEDUSA_HEADS):
            output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            output.weight.data.copy_(embedding)
            self.append(nn.Sequential(ResBlock(config.hidden_size), output))

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """As `Eagle.states`: what each head's output matrix multiplies."""
        rows = features[:, : text.shape[1] - num_steps]
        heads: list[Any] = list(self)
        return [block(rows) for block, _ in heads[:num_steps]]

    def logits(self, state: Tensor, step: int) -> Tensor:
        """As `Eagle.logits`."""
        head: Any = self[step]
        logits: Tensor = head[1](state)
        return logits

    def of_vocabulary(self, values: Tensor) -> Tensor:
        """As `Eagle.of_vocabulary`."""
        return values

    def of_target(self, logits: Tensor) -> Tensor:
        """As `Eagle.of_target`."""
        return logits


class Eagle(nn.Module):
    """EAGLE (2401.15077): the target's next feature of its last one and the token between them.

    Embedding and output matrix are the target's, which are one, and are not among the weights."""

    sources = (-1,)
    embedding: Tensor

    def __init__(self, config: LlamaConfig, embedding: Tensor) -> None:
        super().__init__()
        self.register_buffer("embedding", embedding, persistent=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config)])

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """The rows' states [B, T - num_steps, H] at each step, here the predicted features, of the
        text [B, T] and the target's features [B, T, F]."""
        num_rows = text.shape[1] - num_steps
        state, past, states = features[:, :num_rows], Past(), []
        for step in range(num_steps):
            embedded = F.embedding(at_step(text, step, num_rows), self.embedding)
            state = self.layers[0](self.fc(torch.cat((embedded, state), dim=-1)).float(), past)
            states.append(state)
        return states

    def logits(self, state: Tensor, _step: int) -> Tensor:
        """[..., D] of the states [..., H] at a step, over the head's own vocabulary."""
        return F.linear(state, self.embedding)

    def of_vocabulary(self, values: Tensor) -> Tensor:
        """The columns [..., D] of the head's vocabulary, of the target's [..., V]."""
        return values

    def of_target(self, logits: Tensor) -> Tensor:
        """[..., V] over the target's vocabulary, of the head's own [..., D]."""
        return logits


class Eagle3(nn.Module):
    """EAGLE-3 (2503.01840): three features, an output matrix of its own over the commonest tokens.

    Its states are the layer's before the last norm. `d2t` is by how much the target's id of a token
    is above the head's, `t2d` which of the target's tokens it has."""

    sources = LAYERS[:3]
    embedding: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, target: LlamaForCausalLM, embedding: Tensor, ids: Tensor) -> None:
        super().__init__()
        config = target.config
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("d2t", ids - torch.arange(len(ids), device=ids.device))
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device)
        self.register_buffer("t2d", t2d.index_fill(0, ids, value=True))
        size = config.hidden_size
        self.fc = nn.Linear(len(self.sources) * size, size, bias=False)
        # The target's own reading of a state in its middle is a better start than noise.
        self.fc.weight.data.zero_()[:, -size:].fill_diagonal_(1.0)
        self.midlayer = Midlayer(config)
        self.norm = norm(config)
        self.norm.weight.data.copy_(target.model.norm.weight)
        self.lm_head = nn.Linear(size, len(ids), bias=False)
        self.lm_head.weight.data.copy_(embedding[ids])

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """As `Eagle.states`."""
        num_rows = text.shape[1] - num_steps
        state, past, states = self.fc(features[:, :num_rows]).float(), Past(), []
        for step in range(num_steps):
            embedded = F.embedding(at_step(text, step, num_rows), self.embedding)
            state = self.midlayer(embedded, state, past)
            states.append(state)
        return states

    def logits(self, state: Tensor, _step: int) -> Tensor:
        """As `Eagle.logits`."""
        logits: Tensor = self.lm_head(self.norm(state))
        return logits

    def of_vocabulary(self, values: Tensor) -> Tensor:
        """As `Eagle.of_vocabulary`."""
        return values[..., self.ids]

    def of_target(self, logits: Tensor) -> Tensor:
        """As `Eagle.of_target`: what the head lacks is never chosen."""
        everything = logits.new_full((*logits.shape[:-1], len(self.t2d)), -torch.inf)
        return everything.index_copy(-1, self.ids, logits)

    @property
    def ids(self) -> Tensor:
        """Int64[D], the target's ids of the head's tokens, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


Head = Medusa | Eagle | Eagle3


def new_head(name: str, target: LlamaForCausalLM, ids: Tensor) -> Head:
    """An untrained head; `ids` are the tokens of EAGLE-3."""
    embedding = target.model.embed_tokens.weight.detach()
    match name:
        case "medusa":
            head: Head = Medusa(target.config, embedding)
        case "eagle":
            head = Eagle(target.config, embedding)
        case "eagle3":
            head = Eagle3(target, embedding, ids)
        case _:
            raise ValueError(f"no head is called {name}")
    return head.to(embedding.device)


def sources_of(head: Head, features: Tensor) -> Tensor:
    """[B, T, F] that a head reads, float32, of `target_features`."""
    width = features.shape[-1] // len(LAYERS)
    parts = [features[..., width * at : width * (at + 1)] for at in map(LAYERS.index, head.sources)]
    return torch.cat(parts, dim=-1).float()


def fields_of(name: str, target: LlamaForCausalLM) -> dict[str, object]:
    """What config.json says of a head, in the words of the published ones."""
    config = target.config.to_dict()
    if name == "medusa":
        fields = {key: config[key] for key in ("hidden_size", "vocab_size")}
        fields |= {"medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": 1}
        return fields | {"base_model_name_or_path": "models/target", "torch_dtype": "bfloat16"}
    fields = {key: config[key] for key in SHARED_FIELDS}
    fields |= {"num_hidden_layers": 1, "rope_theta": rope_theta(target.config), "use_cache": True}
    fields |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    if name == "eagle":
        return fields | {"architectures": ["LlamaForCausalLM"], "bias": True}
    fields["architectures"] = ["LlamaForCausalLMEagle3"]
    return fields | {"draft_vocab_size": DRAFT_VOCAB_SIZE}


def write_head(head: Head, name: str, target: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json and the weights, in bfloat16, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(fields_of(name, target), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {
        key: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for key, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / FILES[name], metadata={"format": "pt"})
    (folder / FILES[name]).chmod(0o644)


def load_head(name: str, target: LlamaForCausalLM, folder: Path) -> Head:
    """A head of `write_head`, in float32."""
    head = new_head(name, target, torch.arange(DRAFT_VOCAB_SIZE))
    head.load_state_dict(load_file(folder / FILES[name]))
    return head.eval()
