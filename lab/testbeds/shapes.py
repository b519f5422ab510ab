"""Published shapes of well-known models, for testbeds and for predictions.

Only the sizes that the models' config.json state are here, and no weights.
"""

from dataclasses import dataclass
from typing import Literal

Published = Literal[
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "qwen3-0.6b",
    "qwen3-32b",
]
Like = Literal["0.5b", Published]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model, by the names in its config.json; None: as in the model it is made from.

    tie_word_embeddings  True if one matrix serves as embeddings and as head
    """

    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool = True


LIKE: dict[Like, Sizes] = {
    "0.5b": Sizes(1024, 16, 8192, 16, 8, 64),  # about as large as the smallest of each family
    "llama-3.2-1b": Sizes(2048, 16, 8192, 32, 8, 64, 128_256),
    "llama-3.2-3b": Sizes(3072, 28, 8192, 24, 8, 128, 128_256),
    "llama-3.1-8b": Sizes(4096, 32, 14336, 32, 8, 128, 128_256, tie_word_embeddings=False),
    "llama-3.1-70b": Sizes(8192, 80, 28672, 64, 8, 128, 128_256, tie_word_embeddings=False),
    "llama-3.1-405b": Sizes(16384, 126, 53248, 128, 8, 128, 128_256, tie_word_embeddings=False),
    "qwen3-0.6b": Sizes(1024, 28, 3072, 16, 8, 128, 151_936),
    "qwen3-32b": Sizes(5120, 64, 25600, 64, 8, 128, 151_936, tie_word_embeddings=False),
}
# The smallest model of the same family; models that are the smallest have no usual drafter.
USUAL_DRAFTER: dict[Published, Published] = {
    **dict.fromkeys(("llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b"), "llama-3.2-1b"),
    "llama-3.1-405b": "llama-3.2-1b",
    "qwen3-32b": "qwen3-0.6b",
}


def num_read(like: Published) -> int:
    """Return how many parameters every pass reads: all layers and the head.

    Of the embeddings a pass reads only a few rows, which are not counted.
    """
    layers, width, head = _parts(like)
    return layers + width + head


def num_held(like: Published) -> int:
    """Return how many parameters the device holds: those that a pass reads, and embeddings.

    The embeddings are not counted again if they are the same matrix as the head.
    """
    embeddings = 0 if LIKE[like].tie_word_embeddings else _parts(like)[2]
    return num_read(like) + embeddings


def _parts(like: Published) -> tuple[int, int, int]:
    """Return the number of parameters of all layers, of the last norm, and of the head."""
    match LIKE[like]:
        case Sizes(int(width), int(layers), int(inner), int(heads), int(keys), int(dim), int(size)):
            layer = width * (2 * (heads + keys) * dim + 3 * inner + 2)
            return layers * layer, width, size * width
    raise AssertionError(f"{like} lacks a size")
