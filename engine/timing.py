"""Which of several forms of one computation is fastest here: timed, for processors differ.

Owns the clock. Knows neither what is computed nor for whom.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec

import torch

P = ParamSpec("P")

_WARM, _TIMED = 3, 20


def quickest(forms: Mapping[str, Callable[P, object]], *inputs: P.args, **named: P.kwargs) -> str:
    """Return the name of the form that takes least time, by the best of some turns of each."""
    best = dict.fromkeys(forms, math.inf)
    with torch.inference_mode():
        for turn in range(_WARM + _TIMED):
            for name, form in forms.items():
                started = time.perf_counter()
                form(*inputs, **named)
                if turn >= _WARM:
                    best[name] = min(best[name], time.perf_counter() - started)
    return min(best, key=best.__getitem__)
