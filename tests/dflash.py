"""Small DFlash heads with random weights, in the published layout, and the same plainly.

What a head says behind a text is computed from all features of the text each time, row by row, with
sums and products alone: no cache, no slot, nothing of the engine.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.heads.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    VOCAB,
    Checkpoint,
    Tensors,
)

BLOCK, MASK = 5, 7
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, DIM, INNER = 2, 4, 2, 16, 96
THETA, EPSILON = 5000.0, 1e-5
TARGET_LAYERS = (0, 2)  # outputs of these layers; of the last one behind the last norm
WINDOW = 6
USUAL_TOKEN = 11  # of `save_right`
SECOND = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 12,
}
# Each changes what the first published heads have.
FORMS: dict[str, dict[str, Any]] = {
    "first": {},
    "windows": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
    },
    "windows both ways": {
        "layer_types": ["sliding_attention"] * NUM_LAYERS,
        "sliding_window": WINDOW,
        "is_causal": False,
    },
    "logits": {"final_logit_softcapping": 3.0, "output_multiplier": 0.5},
    "second": SECOND,
    "speculators": {},
}


def config_of(form: str) -> dict[str, Any]:
    """The config.json of a form."""
    inner = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": list(TARGET_LAYERS)}
    outer = ("layer_types", "sliding_window", "is_causal")
    more = FORMS[form]
    inner |= {name: value for name, value in more.items() if name not in outer}
    second = "2" if form == "second" else ""
    architecture = {"architectures": [f"DFlash{second}DraftModel"]}
    layers = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_target_layers": LAYERS,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        **{name: value for name, value in more.items() if name in outer},
    }
    if form != "speculators":
        return {**architecture, **layers, "dflash_config": inner}
    inner["aux_hidden_state_layer_ids"] = [i + 1 for i in inner.pop("target_layer_ids")]
    own = {"speculators_model_type": "dflash", "draft_vocab_size": DRAFT_VOCAB}
    return {**architecture, **own, **inner, "transformer_layer_config": layers}


def checkpoint(form: str = "first", seed: int = 0) -> Checkpoint:
    """A head for the small llama."""
    heads, kv_heads = NUM_HEADS * DIM, NUM_KV_HEADS * DIM
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TARGET_LAYERS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (heads, HIDDEN),
        "self_attn.k_proj.weight": (kv_heads, HIDDEN),
        "self_attn.v_proj.weight": (kv_heads, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, heads),
        "self_attn.q_norm.weight": (DIM,),
        "self_attn.k_norm.weight": (DIM,),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    if form == "second":
        mixed, groups = SECOND["conv_kernel_size"], HIDDEN // SECOND["conv_group_size"]
        for part in ("attention_conv", "mlp_conv"):
            of_layer[f"{part}.base_kernel"] = 2, mixed, HIDDEN
            of_layer[f"{part}.kernel_projection.weight"] = 2 * mixed * groups, HIDDEN
        for book in ("predecessor", "successor"):
            sizes[f"candidate_selector.{book}_codebook"] = VOCAB, SECOND["selector_rank"]
        sizes["candidate_selector.hidden_projection.weight"] = SECOND["selector_rank"], HIDDEN
    if form == "speculators":
        sizes["lm_head.weight"] = DRAFT_VOCAB, HIDDEN
    for layer in range(NUM_LAYERS):
        sizes |= {f"layers.{layer}.{name}": size for name, size in of_layer.items()}
    drawing = torch.Generator().manual_seed(seed)
    files: Tensors = {}
    for name, size in sizes.items():
        drawn = torch.randn(size, generator=drawing)
        # The books are wide, so that the token before decides now and then.
        width = 1.0 if "codebook" in name else 0.8 / size[-1] ** 0.5
        files[name] = 1 + 0.2 * drawn if len(size) == 1 else drawn * width
    if form == "speculators":
        drawn = torch.randperm(VOCAB, generator=drawing)[:DRAFT_VOCAB].sort().values
        files["d2t"] = drawn - torch.arange(DRAFT_VOCAB)
        files["t2d"] = torch.isin(torch.arange(VOCAB), drawn)
    return Checkpoint(config_of(form), files)


def save_right(llama: Path, target: Path, head: Path, form: str = "first") -> None:
    """Save a target that nearly always writes one token, and a head that knows it.

    llama  the folder of the small llama that becomes the target

    All embeddings have a direction in common, which alone decides, and no layer adds anything.
    """
    common = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    shutil.copytree(llama, target)
    tensors = load_file(target / "model.safetensors")
    for name, one in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            one.zero_()
    tensors["model.embed_tokens.weight"] += 4 * common
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] *= 0.3
    tensors["lm_head.weight"][USUAL_TOKEN] = 0.1 * common
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    made = checkpoint(form)
    for name, one in made.files.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "codebook")):
            one.zero_()
    made.files["norm.weight"] = torch.ones(HIDDEN)
    made.save(head)


@dataclass(frozen=True)
class Plain:
    """A head of a form, and what is the target's."""

    form: str
    weights: Tensors
    embeddings: torch.Tensor
    lm_head: torch.Tensor

    def behind(self, token: int, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [block - 1, V] behind a text, and the states that they are made of.

        token     the text's last one
        features  [tokens before it, 2 * hidden size]
        """
        w, more = self.weights, FORMS[self.form]
        text = [_norm(w["fc.weight"] @ one, w["hidden_norm.weight"]) for one in features]
        rows = [self.embeddings[token], *[self.embeddings[MASK]] * (BLOCK - 1)]
        kinds = more.get("layer_types", ["full_attention"] * NUM_LAYERS)
        for layer, kind in enumerate(kinds):
            is_near = kind == "sliding_attention"
            is_causal = more.get("is_causal", is_near)
            window = WINDOW if is_near else 1000
            rows = self._layer(f"layers.{layer}.", rows, text, window, is_causal=is_causal)
        states = torch.stack([_norm(row, w["norm.weight"]) for row in rows[1:]])
        if self.form == "speculators":
            found = torch.full((BLOCK - 1, len(self.embeddings)), -torch.inf)
            targets = torch.arange(DRAFT_VOCAB) + w["d2t"]
            found[:, targets] = states @ w["lm_head.weight"].T
            return found, states
        logits = states @ self.lm_head.T * more.get("output_multiplier", 1.0)
        if cap := more.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        return logits, states

    def drafted(self, before: int, logits: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Logits [V] of one place of the block, where the draft before it is known."""
        if self.form != "second":
            return logits
        w, name = self.weights, "candidate_selector."
        place = w[f"{name}hidden_projection.weight"] @ state
        found = torch.full_like(logits, -torch.inf)
        for token in logits.topk(SECOND["selector_top_k"]).indices.tolist():
            one = w[f"{name}predecessor_codebook"][before] * w[f"{name}successor_codebook"][token]
            found[token] = logits[token] + (one * place).sum()
        return found

    def _layer(
        self,
        name: str,
        rows: Sequence[torch.Tensor],
        text: Sequence[torch.Tensor],
        window: int,
        *,
        is_causal: bool,
    ) -> list[torch.Tensor]:
        w = {key.removeprefix(name): one for key, one in self.weights.items()}
        normed = [_norm(row, w["input_layernorm.weight"]) for row in rows]
        mixed, behind = self._mixed(w, "attention_conv", normed)
        start = len(text)
        seen = [*text, *mixed]
        keys = [
            self._heads(w, "k", one, NUM_KV_HEADS, position) for position, one in enumerate(seen)
        ]
        values = [(w["self_attn.v_proj.weight"] @ one).view(NUM_KV_HEADS, DIM) for one in seen]
        out = []
        for index, row in enumerate(mixed):
            position = start + index
            queries = self._heads(w, "q", row, NUM_HEADS, position)
            near = [
                at
                for at in range(len(seen))
                if abs(position - at) < window and (at <= position or not is_causal)
            ]
            parts = []
            for head, query in enumerate(queries):
                of = head // (NUM_HEADS // NUM_KV_HEADS)
                scores = torch.stack([keys[at][of] @ query for at in near]) / DIM**0.5
                parts.append(scores.softmax(0) @ torch.stack([values[at][of] for at in near]))
            out.append(w["self_attn.o_proj.weight"] @ torch.cat(parts))
        rows = [row + one for row, one in zip(rows, behind(out), strict=True)]
        normed = [_norm(row, w["post_attention_layernorm.weight"]) for row in rows]
        mixed, behind = self._mixed(w, "mlp_conv", normed)
        out = []
        for row in mixed:
            gate = w["mlp.gate_proj.weight"] @ row
            inner = gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ row)
            out.append(w["mlp.down_proj.weight"] @ inner)
        return [row + one for row, one in zip(rows, behind(out), strict=True)]

    def _heads(
        self, w: Tensors, part: str, row: torch.Tensor, num: int, position: int
    ) -> torch.Tensor:
        heads = (w[f"self_attn.{part}_proj.weight"] @ row).view(num, DIM)
        normed = torch.stack([_norm(head, w[f"self_attn.{part}_norm.weight"]) for head in heads])
        half = DIM // 2
        angles = position / THETA ** (torch.arange(half) / half)
        first, second, cos, sin = normed[:, :half], normed[:, half:], angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)

    def _mixed(self, w: Tensors, part: str, rows: Sequence[torch.Tensor]) -> Any:
        """The rows, mixed if this is the second version; and the same for what is made of them."""
        if self.form != "second":
            return rows, lambda made: made
        base, group = w[f"{part}.base_kernel"], SECOND["conv_group_size"]
        moved = [
            (w[f"{part}.kernel_projection.weight"] @ row).view(2, len(base[0]), HIDDEN // group)
            for row in rows
        ]

        def mix(made: Sequence[torch.Tensor], side: int) -> list[torch.Tensor]:
            found = []
            for at in range(len(made)):
                row = torch.zeros(HIDDEN)
                for back in range(min(len(base[0]), at + 1)):
                    weights = [
                        base[side, back, i] + moved[at][side, back, i // group]
                        for i in range(HIDDEN)
                    ]
                    row = row + torch.stack(weights) * made[at - back]
                found.append(row)
            return found

        return mix(rows, 0), lambda made: mix(made, 1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean() + EPSILON).sqrt()
