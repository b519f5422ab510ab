"""Of how many rows forwards are: those that are timed and recorded at load, and prompts (pure)."""

from collections.abc import Mapping

from proto.messages import Role

# Of a prompt, read at once: on a CPU few, because nobody else gets a turn meanwhile; a GPU is idle
# with so few.
PREFILL_CHUNK = 256
PREFILL_CHUNKS: Mapping[str, int] = {"cpu": PREFILL_CHUNK, "cuda": 2048}

TIMED_ROWS: Mapping[Role, tuple[int, ...]] = {
    Role.TARGET: (1, 2, 3, 5, 9, 16),
    Role.DRAFTER: (1, 2, 4, 8),
}
# By backend. A program costs half a minute and a copy of the weights, a graph next to nothing.
RECORDED_ROWS: Mapping[Role, Mapping[str, tuple[int, ...]]] = {
    Role.TARGET: {"compiled": (1, 9), "graphs": (1, 2, 3, 5, 9, 17)},
    Role.DRAFTER: {"compiled": (1, 4), "graphs": (1, 2, 4, 8, 16)},
}
