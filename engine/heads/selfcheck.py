"""Check made once, when a head is loaded: does it run, and to finite numbers?"""

import numpy as np
import torch

from engine.errors import ModelError, OutOfMemory
from engine.heads.eagle import EagleExecutor
from engine.heads.medusa_executor import MedusaExecutor
from engine.model import DTYPES
from engine.model_files import one_line
from engine.slots import Feed

_NUM_ROWS = 8
# What torch raises where settings do not fit together.
_MISFITS = (ValueError, RuntimeError, TypeError, LookupError, ArithmeticError)


def check_outputs(executor: EagleExecutor | MedusaExecutor) -> None:
    """Draft a chain from a feature as a target might compute it; only before a session.

    Its first row has the feature, those after it have what the head itself predicts.

    Raises:
        ModelError: the head does not run with its settings, or not to finite numbers.
        OutOfMemory: there is no room for what it computes.
    """
    loaded = executor.loaded
    if loaded.max_model_len <= _NUM_ROWS:
        raise ModelError(
            f"{loaded.name}: it takes {loaded.max_model_len} tokens (max_position_embeddings), "
            "too few to draft; use another head"
        )
    random = np.random.default_rng(0)
    numbers = torch.from_numpy(random.standard_normal(loaded.feature_size))
    feature = numbers.to(DTYPES[loaded.feature_dtype]).view(torch.uint8).numpy().tobytes()
    tokens = random.integers(0, loaded.vocab_size, _NUM_ROWS).tolist()
    try:
        rows = [
            executor.run(_feed(token, slot, feature), (0,)) for slot, token in enumerate(tokens, 1)
        ]
        # NaN and infinity show in the maximum; a token that is never drafted has minus infinity.
        is_finite = bool(torch.cat(rows).amax(1).isfinite().all())
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{loaded.name}: out of memory: {one_line(error)}") from error
    except _MISFITS as error:
        raise ModelError(
            f"{loaded.name}: the head does not run with the settings in config.json "
            f"({one_line(error)}); correct them"
        ) from error
    executor.forget()
    if not is_finite:
        raise ModelError(
            f"{loaded.name}: what the head computes is not finite: float16 overflows in some "
            "heads, use bfloat16 or float32; else its weights are damaged, or settings in "
            "config.json are wrong"
        )


def _feed(token: int, slot: int, feature: bytes) -> Feed:
    """A row behind the one before it; the first one is given a feature."""
    is_first = slot == 1
    return Feed(
        (token,),
        (slot,),
        (slot,),
        slot,
        (1,),
        before=(slot - 1,),
        features=(feature if is_first else b"",),
    )
