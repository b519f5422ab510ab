"""A small random pair with a tokenizer, whose drafter agrees with its target some of the time."""

from pathlib import Path

from tests.tiny_models import make_model, make_noised
from tests.tiny_tokenizer import VOCAB_SIZE, save_bytewise_tokenizer


def make_bytewise_pair(folder: Path, sigma: float) -> tuple[Path, Path]:
    """Save target and drafter in `folder`; return their folders. `sigma`: as for `make_noised`."""
    target = make_model("llama", folder / "target", vocab=VOCAB_SIZE)
    drafter = make_noised(target, folder / "drafter", sigma)
    for model in (target, drafter):
        save_bytewise_tokenizer(model)
    return target, drafter
