"""The noise of the coupled choice, as the engine makes it on the host."""

from collections.abc import Sequence

import numpy as np

from engine.choice import coupling


def gumbel(
    seed: int, sample_index: int, positions: Sequence[int], token_ids: coupling.Ids
) -> coupling.Floats:
    """Return the noise [n, m] float32 of `token_ids` [n, m] at `positions` [n]."""
    keys = coupling.row_keys(seed, sample_index, positions)
    rows = zip(keys, token_ids, strict=True)
    return np.stack([coupling._gumbel(coupling._bits(key, ids)) for key, ids in rows])
