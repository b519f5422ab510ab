"""Small models whose rotary embedding has a set of factors for short texts and one for long."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.tiny_models import make_config, widened

ORIGINAL, MOST = 64, 512
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [1.0 + i / 2 for i in range(8)]


def config_of(kind: str, short: list[float] = SHORT) -> Any:
    """That of a `phi3` or a `llama` with other factors for long texts."""
    stated = make_config(kind).to_dict() | {
        "max_position_embeddings": MOST,
        "original_max_position_embeddings": ORIGINAL,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": short,
            "long_factor": LONG,
        },
    }
    return hf.CONFIG_MAPPING[kind].from_dict(stated)


def make_long(kind: str, out: Path) -> Path:
    """Save a random model in `out`; return `out`."""
    torch.manual_seed(1)
    model: Any = hf.AutoModelForCausalLM.from_config(config_of(kind))
    widened(model.float().eval(), 3.0, 5).save_pretrained(out)
    return out


def with_one_set(kind: str, folder: Path) -> Any:
    """The model as transformers reads it, with the long factors at every length."""
    config, loader = config_of(kind, LONG), hf.AutoModelForCausalLM
    model: Any = loader.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval()


def plain(folder: Path) -> Any:
    """The model as transformers reads it."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
