"""How many rows forwards have: those that are timed and recorded at load, and those of prompts."""

from collections.abc import Mapping

from proto.messages import Role
from proto.policies import TABLE

# Tokens of a prompt in one pass: few on a CPU, because the other texts wait meanwhile; with so few
# a GPU would be idle.
PREFILL_CHUNK = 256
PREFILL_CHUNKS: Mapping[str, int] = {"cpu": PREFILL_CHUNK, "cuda": 2048}

TIMED_ROWS: Mapping[Role, tuple[int, ...]] = {
    Role.TARGET: (1, 2, 3, 5, 9, 16),
    Role.DRAFTER: (1, 2, 4, 8, 12),
}
# Row counts for which a forward is recorded as a CUDA graph at load.
RECORDED_ROWS: Mapping[Role, tuple[int, ...]] = {
    Role.TARGET: (1, 2, 3, 5, 9, 17),
    Role.DRAFTER: (1, 2, 4, 8, 12, 16),
}
# Numbers of children that a drafter chooses of a node; these choices are recorded at load.
RECORDED_CHILDREN = tuple(sorted({row.branches for row in TABLE}))
# Numbers of draft steps that one recorded graph makes; no message is received during them.
# Four drafts are two launches: a step behind the tokens that the cache lacks, then three steps.
CHAINS = (4, 3, 2)
