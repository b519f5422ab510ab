"""Small random models for tests, saved as folders that `load_model` reads.

They are initialised widely enough to have something to say: greedy text neither loops nor repeats.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.draws import first_good, made_once, stored

MAX_POSITIONS = 1024
MIN_DISTINCT = 40
NUM_DRAWS = 50
# How wide the matrices are drawn; plain feed-forward layers need more to leave a loop.
GAINS = {"qwen3_moe": 5.0, "gpt2": 5.0, "gpt_neox": 5.0, "opt": 5.0, "falcon": 5.0, "gptj": 5.0}

# Exact under tree masks; tests/engine/test_slot_cache.py holds each to a plain forward.
SUPPORTED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "gpt2",
    "gpt_neox",
    "opt",
    "phi3",
    "olmo",
    "cohere",
    "granite",
    "stablelm",
    "falcon",
)


def make_config(architecture: str, vocab: int = 199) -> Any:
    """Return the configuration of a model of three layers, 64 wide."""
    base: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    gpt = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": vocab, "eos_token_id": 2}
    gpt |= {"n_positions": MAX_POSITIONS, "bos_token_id": None}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    window = {"head_dim": 16, "sliding_window": 16}
    many_heads = {key: value for key, value in base.items() if key != "num_key_value_heads"}
    match architecture:
        case "llama":
            return hf.LlamaConfig(**base)
        case "qwen2":
            return hf.Qwen2Config(**base)
        case "qwen3" | "qwen3_wide":  # AMX computes the attention of wide heads
            return hf.Qwen3Config(**base, head_dim=32 if architecture == "qwen3_wide" else 16)
        case "qwen3_moe":
            return hf.Qwen3MoeConfig(**base, head_dim=16, **experts)
        case "mixtral":
            return hf.MixtralConfig(**base, num_local_experts=4, sliding_window=None)
        case "mistral":
            return hf.MistralConfig(**base, sliding_window=None)
        case "mistral_window":
            return hf.MistralConfig(**base, sliding_window=16)
        case "qwen2_window":
            return hf.Qwen2Config(**base, use_sliding_window=True, max_window_layers=1)
        case "gpt2":
            return hf.GPT2Config(**gpt)
        case "gptj":
            return hf.GPTJConfig(**gpt, rotary_dim=8)
        case "gpt_neox":
            return hf.GPTNeoXConfig(**many_heads)
        case "gpt_neo_global":
            sizes = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_size": vocab}
            return hf.GPTNeoConfig(**sizes, attention_types=[[["global"], 3]])
        case "opt":
            return hf.OPTConfig(**many_heads, ffn_dim=128, word_embed_proj_dim=64)
        case "phi3" | "olmo" | "granite":
            kinds = {"phi3": hf.Phi3Config, "olmo": hf.OlmoConfig, "granite": hf.GraniteConfig}
            return kinds[architecture](**base)
        case "cohere":
            return hf.CohereConfig(**base, logit_scale=1.0)
        case "stablelm":
            return hf.StableLmConfig(**base)
        case "falcon":
            return hf.FalconConfig(**many_heads, new_decoder_architecture=True, num_kv_heads=2)
        case "falcon_alibi":
            return hf.FalconConfig(**many_heads, alibi=True)
        case "bloom":
            return hf.BloomConfig(hidden_size=64, n_layer=3, n_head=4, vocab_size=vocab)
        case "gemma2" | "gemma3":
            gemma = hf.Gemma2Config if architecture == "gemma2" else hf.Gemma3TextConfig
            return gemma(**base, **window)
        case "gpt_oss":
            return hf.GptOssConfig(**base, num_local_experts=8, sliding_window=512)
        case "rwkv":
            return hf.RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=vocab)
        case "t5":
            return hf.T5Config(d_model=64, num_layers=2, num_heads=4, d_ff=128, vocab_size=vocab)
    raise ValueError(f"no recipe for {architecture!r}")


def make_model(
    architecture: str,
    folder: Path,
    seed: int = 0,
    *,
    vocab: int = 199,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Save a random small model of `architecture` in `folder` (without tokenizer); return `folder`.

    The draw is the first whose 128 greedy tokens show `MIN_DISTINCT` different ones (`draws.json`).
    scale  multiplies the standard deviation of all weight matrices; other than 1 it is the first
    """
    key = ("tiny", architecture, seed, vocab, scale, dtype)
    searched = architecture in SUPPORTED and scale == 1.0
    name = name_of(architecture, seed, vocab)

    def make(into: Path) -> None:
        number = stored().get(name) if searched else 0
        if number is None:
            number = search(architecture, seed, vocab)
        random_model(architecture, seed, vocab, scale, number).to(dtype).save_pretrained(into)

    return made_once(key, make, folder)


def name_of(architecture: str, seed: int = 0, vocab: int = 199) -> str:
    """The name of a recipe in `draws.json`."""
    return f"tiny {architecture} {seed} {vocab}"


def search(architecture: str, seed: int = 0, vocab: int = 199) -> int:
    """Return the number of the first draw whose text shows enough different tokens, or the last."""

    def is_good(number: int) -> bool:
        return _num_distinct(random_model(architecture, seed, vocab, 1.0, number)) >= MIN_DISTINCT

    found = first_good(is_good, NUM_DRAWS)
    return NUM_DRAWS - 1 if found is None else found


def random_model(architecture: str, seed: int, vocab: int, scale: float, number: int) -> Any:
    """Return the model of this draw, in float32. The random state of torch stays as it is."""
    kind: Any = hf.AutoModelForSeq2SeqLM if architecture == "t5" else hf.AutoModelForCausalLM
    random_state = torch.get_rng_state()
    torch.manual_seed(1000 * seed + number)
    model = kind.from_config(make_config(architecture, vocab)).float().eval()
    torch.set_rng_state(random_state)
    return widened(model, scale * GAINS.get(architecture, 2.0), 1000 * seed + number)


def make_noised(
    folder: Path, out: Path, sigma: float, seed: int = 0, load: Callable[[Path], Any] | None = None
) -> Path:
    """Save a copy of the model in `folder` as `out`, with noise on its weight matrices.

    load   reads the model; None: it is a causal language model
    sigma  standard deviation of the noise in units of each matrix's own; 0.1 to 0.3 makes a drafter
           that agrees with the original some of the time
    """
    model = add_noise((load or hf.AutoModelForCausalLM.from_pretrained)(folder), sigma, seed)
    model.save_pretrained(out)
    return out


def add_noise(model: Any, sigma: float, seed: int = 0) -> Any:
    """Add noise to a model's weight matrices, as `make_noised` does; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight += (sigma * weight.float().std() * noise).to(weight.dtype)
    return model


def make_overflowing(folder: Path, out: Path, token: int) -> Path:
    """Save a copy of the granite model in `folder` as `out`, which overflows at one token alone.

    All weights are finite. At every other token it says what the original says.
    """
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings /= 1e10
        embeddings[token] = 1e30
    model.config.embedding_multiplier *= 1e10
    model.save_pretrained(out)
    return out


def make_overflowing_llama(folder: Path, out: Path, token: int) -> Path:
    """Save a copy of the llama model in `folder` as `out`, which overflows at one token alone.

    All weights are finite. Two dimensions of the embeddings tell this token from all others, and
    one row of the first feed-forward block is open for it alone: what it lets through is infinite.
    """
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    embeddings, first = model.get_input_embeddings().weight, model.model.layers[0]
    with torch.no_grad():
        embeddings[:, :2] = torch.tensor((1.0, 0.0))
        embeddings[token, :2] = torch.tensor((0.0, 100.0))
        first.self_attn.o_proj.weight[:2] = 0.0  # so that they are the same behind it
        gate, up = (part.weight[0] for part in (first.mlp.gate_proj, first.mlp.up_proj))
        for row, values in ((gate, (-1e5, 1e5)), (up, (0.0, 1e38))):
            row.zero_()
            row[:2] = torch.tensor(values)  # 8 x 1e38 is more than float32 holds
    model.save_pretrained(out)
    return out


def widened(model: Any, gain: float, seed: int) -> Any:
    """Draw every weight matrix anew, with logits of a deviation of about `gain`; return the model.

    Tied embeddings are kept small: they would otherwise make the last token the likeliest next one.
    """
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    embeddings = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    spreads = {id(part.weight): 1.0 for part in embeddings}
    if head is not None and id(head.weight) in spreads:
        spreads[id(head.weight)] = 0.25
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                spread = spreads.get(id(weight), gain * min(weight.shape[-2:]) ** -0.5)
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return model


def remember(model: Any) -> None:
    """Let the running states of a model fade slowly, so that tokens far back still count."""
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("A_log"):
                one.copy_(torch.linspace(-6.0, -3.0, one.numel()).view(one.shape))


def _num_distinct(model: Any) -> int:
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=128,
            min_new_tokens=128,
            do_sample=False,
            pad_token_id=0,
        )
    return len(set(text[0, 3:].tolist()))
