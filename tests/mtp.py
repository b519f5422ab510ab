"""Small random models whose checkpoints have layers for multi-token prediction, and these plainly.

Such a checkpoint is that of a model with more layers, whose last ones count as those for drafting:
so its tensors have the names and forms that are published.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicCache

from tests.engine.heads.plain import Given

VOCAB, SIZE = 97, 64
NUM_LAYERS = 3  # of the target itself
_USUAL: Mapping[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# The layer behind those of the target itself is the one for drafting: always one of attention.
_DELTA_RULE = {
    "head_dim": 16,
    "layer_types": [*["linear_attention"] * (NUM_LAYERS - 1), *["full_attention"] * 2],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SHARED = {"num_experts": 8, "shared_expert_intermediate_size": 64}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _LATENT,
    "glm4_moe": {**_ROUTED, "head_dim": 16, "use_qk_norm": True},
    "glm4_moe_lite": {
        **_LATENT,
        "mlp_layer_types": ["dense", *["sparse"] * (NUM_LAYERS - 1), "sparse"],
    },
    "hy_v3": {"head_dim": 16, "num_experts": 8, "num_shared_experts": 1},
    "mellum": {
        "head_dim": 16,
        "num_experts": 8,
        "sliding_window": 64,
        "layer_types": ["full_attention"] * NUM_LAYERS + ["sliding_attention"],
        "mlp_layer_types": ["sparse"] * (NUM_LAYERS + 1),
    },
    "exaone_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "sliding_window": 64,
        "layer_types": ["full_attention"] * NUM_LAYERS + ["sliding_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * (NUM_LAYERS - 1), "dense"],
    },
    "mimo_v2_flash": {
        "head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "sliding_window": 64,
        "layer_types": ["full_attention"] * NUM_LAYERS + ["sliding_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * (NUM_LAYERS - 1), "dense"],
    },
    "qwen3_5_moe_text": {**_DELTA_RULE, **_SHARED},
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": {**_DELTA_RULE, **_SHARED},
}
QWEN = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_ALONE = ("exaone_moe", "mellum", *QWEN)  # `mtp.` comes before all names
_BY_KIND = ("mellum", "mimo_v2_flash")  # rotary embeddings differ by the kind of layer
# Where config.json has the number of layers for drafting: that of Qwen3-Next does not state it.
_NUMBER = {"qwen3_5_moe_text": "mtp_num_hidden_layers", "qwen3_5_text": "mtp_num_hidden_layers"}

# Tensors of the layer that published checkpoints have and nobody needs.
COPIES = {
    "deepseek_v3": ("embed_tokens.weight", "shared_head.head.weight"),
    "glm4_moe": ("embed_tokens.weight", "shared_head.head.weight"),
    "hy_v3": ("shared_head.weight",),
}
# Matrices that quantised checkpoints leave as they are (`save_packed`).
PLAINLY = ("lm_head", "mlp.gate.", "shared_head")
# The matrices by which something is added to the hidden state.
_LEAVING = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")


@dataclass(frozen=True)
class Part:
    """A row in one layer for drafting: its key, its value, and what it hands on."""

    keys: torch.Tensor
    values: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class Row:
    """A row of the layers for drafting, by the number of the layer; not every layer has it."""

    parts: Mapping[int, Part]

    @property
    def state(self) -> torch.Tensor:
        """What the first of these layers hands on, of which logits are made."""
        return self.parts[min(self.parts)].state


class Plain:
    """Such a model, and its layers for drafting, computed from scratch row by row."""

    def __init__(
        self, family: str, num_drafting: int = 1, *, is_right: bool = False, seed: int = 0
    ) -> None:
        """Draw the weights.

        num_drafting  number of layers for drafting
        is_right  what the target writes follows from the last token alone, and the layers for
                  drafting always know it
        """
        torch.manual_seed(seed)
        fields = {**_USUAL, **FAMILIES[family], "num_hidden_layers": NUM_LAYERS + num_drafting}
        for kinds in ("layer_types", "mlp_layer_types"):
            if kinds in fields:
                fields[kinds] = [*fields[kinds], *fields[kinds][-1:] * (num_drafting - 1)]
        made: Any = hf.AutoConfig.for_model(family, **fields)
        kind: Any = hf.AutoModelForCausalLM
        self.whole = kind.from_config(made).float().eval()
        self.family, self.num_drafting = family, num_drafting
        self._window = FAMILIES[family].get("sliding_window", 0)
        self._centre = 1.0 if family in QWEN else 0.0  # what a norm adds to its weight
        with torch.no_grad():
            for name, one in self.whole.named_parameters():
                if is_right and name.endswith(_LEAVING):
                    one.mul_(1e-4)  # not zero, of which no scale can be made
                elif one.dim() > 1:
                    one.normal_(std=2.0 / one.shape[-1] ** 0.5)
                elif "norm" in name and not is_right:
                    one.add_(0.2 * torch.randn(one.shape))
        self.extra = [self._extra(is_right=is_right) for _ in range(num_drafting)]

    def _extra(self, *, is_right: bool) -> dict[str, torch.Tensor]:
        """What a layer for drafting has besides those of a usual layer."""
        one = torch.full((SIZE,), 1 - self._centre)
        norms = {name: one.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
        if is_right:
            joined = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), dim=1)
        else:
            joined = torch.randn(SIZE, 2 * SIZE) / SIZE**0.5
            norms = {name: one + 0.2 * torch.randn(SIZE) for name, one in norms.items()}
        return {f"{name}.weight": one for name, one in {**norms, "eh_proj": joined}.items()}

    def save(self, folder: Path) -> Path:
        """Save the target, with its layers for drafting, as published; return the folder."""
        self.whole.save_pretrained(folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for number, extra in enumerate(self.extra, NUM_LAYERS):
            last = f"model.layers.{number}."
            tensors |= {last + name: one for name, one in extra.items()}
            if self.family in COPIES:  # of the target's own matrices; other numbers, to be ignored
                names = COPIES[self.family]
                tensors |= {last + name: torch.randn(VOCAB, SIZE) for name in names}
        save_file({self._published(name): one for name, one in tensors.items()}, file)
        path = folder / "config.json"
        stated = json.loads(path.read_text())
        stated["num_hidden_layers"] = NUM_LAYERS
        if self.family not in ("mimo_v2_flash", "qwen3_next"):
            stated[_NUMBER.get(self.family, "num_nextn_predict_layers")] = self.num_drafting
        for kinds in ("layer_types", "mlp_layer_types"):
            if stated.get(kinds):
                is_silent = self.family in (*QWEN, "mimo_v2_flash") or (
                    self.family == "exaone_moe" and kinds == "mlp_layer_types"
                )
                own = {} if is_silent else {f"mtp_{kinds}": stated[kinds][NUM_LAYERS:]}
                stated |= own | {kinds: stated[kinds][:NUM_LAYERS]}
        path.write_text(json.dumps(stated))
        return folder

    def _published(self, name: str) -> str:
        """The name of a tensor as such checkpoints have it."""
        last = f"model.layers.{NUM_LAYERS}."
        if self.family == "hy_v3":
            return name.replace("shared_head.norm", "final_layernorm")
        if self.family == "mimo_v2_flash":
            return self._apart(name)
        if self.family not in _ALONE or not name.startswith(last):
            return name
        own = {
            "enorm.weight": "pre_fc_norm_embedding.weight",
            "hnorm.weight": "pre_fc_norm_hidden.weight",
            "eh_proj.weight": "fc.weight",
            "shared_head.norm.weight": "norm.weight",
        }
        rest = name.removeprefix(last)
        return "mtp." + own.get(rest, f"layers.0.{rest}")

    def _apart(self, name: str) -> str:
        """The name of a tensor in MiMo's files."""
        for number in range(self.num_drafting):
            last = f"model.layers.{NUM_LAYERS + number}."
            if name.startswith(last):
                rest = name.removeprefix(last).replace("shared_head.norm", "final_layernorm")
                rest = rest.replace("post_attention_layernorm", "pre_mlp_layernorm")
                return f"model.mtp.layers.{number}.{rest}"
        return name

    def row(self, above: Sequence["Row | None"], token: int, given: Given) -> "Row | None":
        """The row of a token behind the rows `above`; None if it is absent."""
        if not above or given is None:
            return None
        before = {} if above[-1] is None else above[-1].parts
        parts, last = {}, self.num_drafting - 1
        for number in range(self.num_drafting):
            if number == 0 and isinstance(given, torch.Tensor):
                state = given
            elif number - 1 in before:
                state = before[number - 1].state
            elif number == last and last in before and isinstance(given, bytes):
                state = before[last].state
            else:
                continue
            parts[number] = self._part(number, above, token, state)
        return Row(parts) if parts else None

    def _part(
        self, number: int, above: Sequence["Row | None"], token: int, state: torch.Tensor
    ) -> Part:
        """A row in one layer, for the state that it starts from."""
        place = len(above)
        inner, cache = self.whole.model, DynamicCache()
        seen = [
            (at, one.parts[number])
            for at, one in enumerate(above)
            if one is not None and number in one.parts
        ]
        if seen:
            keys, values = zip(*((one.keys, one.values) for _, one in seen), strict=True)
            cache.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), 0)
        mask = torch.zeros(1, 1, 1, len(seen) + 1)
        for index, (at, _) in enumerate(seen):
            if self._window and at <= place - self._window:
                mask[..., index] = -torch.inf
        block = inner.layers[NUM_LAYERS + number]
        block.self_attn.layer_idx = 0
        extra = self.extra[number]
        with torch.inference_mode():
            embedded = inner.embed_tokens.weight[token]
            pair = (
                self._norm(extra["enorm.weight"], embedded),
                self._norm(extra["hnorm.weight"], state),
            )
            entering = (extra["eh_proj.weight"] @ torch.cat(pair))[None, None]
            position = torch.tensor([[place]])
            kinds = {"layer_type": "sliding_attention"} if self.family in _BY_KIND else {}
            out = block(
                entering,
                attention_mask=mask,
                position_embeddings=inner.rotary_emb(entering, position_ids=position, **kinds),
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            out = out[0] if isinstance(out, tuple) else out
            layer: Any = cache.layers[0]
            own = layer.keys[:, :, -1:], layer.values[:, :, -1:]
            return Part(*own, self._norm(extra["shared_head.norm.weight"], out[0, 0]))

    def logits(self, row: "Row") -> torch.Tensor:
        """[V] of the target's vocabulary."""
        with torch.inference_mode():
            made: torch.Tensor = self.whole.lm_head.weight @ row.state
            return made

    def _norm(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        epsilon = self.whole.config.rms_norm_eps
        return x * (x.pow(2).mean() + epsilon).rsqrt() * (self._centre + weight)


def wrap(folder: Path) -> Path:
    """Make the text model of Qwen3.5 in a folder the language model of the published wrapper."""
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}"
        if name.startswith("model.")
        else name: one.clone()
        for name, one in load_file(file).items()
    }
    tensors["model.visual.patch_embed.proj.bias"] = torch.randn(3)  # a part that nobody reads
    save_file(tensors, file)
    text = json.loads(path.read_text())
    kind = text["model_type"].removesuffix("_text")
    path.write_text(
        json.dumps({"model_type": kind, "text_config": text, "tie_word_embeddings": False})
    )
    return folder
