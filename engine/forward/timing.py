"""The clock by which forms of a computation are chosen when a model is loaded.

Where two forms have one order of sums, the choice changes no text. Owns the clock and the rule;
knows neither what is computed nor what for.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec

import torch

P = ParamSpec("P")

_WARM, _TIMED = 3, 20
_LONG_S = 0.5  # forms that take long are timed at least once each, and no longer than this


def quickest(forms: Mapping[str, Callable[P, object]], *inputs: P.args, **named: P.kwargs) -> str:
    """Return the name of the fastest form; of each the fewest seconds of up to 20 runs count."""
    best = dict.fromkeys(forms, math.inf)
    end = time.perf_counter() + _LONG_S
    with torch.inference_mode():
        for turn in range(_WARM + _TIMED):
            if turn > _WARM and time.perf_counter() > end:
                break
            for name, form in forms.items():
                started = time.perf_counter()
                form(*inputs, **named)
                if turn >= _WARM:
                    best[name] = min(best[name], time.perf_counter() - started)
    return min(best, key=best.__getitem__)


# Rows of the whole passes by which sets of forms are compared: a plain step, and one with one, four
# and eight drafts. A set is taken only if it is slower for none of them.
COMPARED_ROWS = (1, 2, 5, 9)
# A set of which a pass takes this much longer is slower: with less, equal sets would be told apart.
_AS_FAST = 1.05

Seconds = Mapping[int, float]
"""Number of rows -> the seconds of a whole pass"""


def is_never_slower(one: Seconds, other: Seconds) -> bool:
    """True if passes of no number of rows are slower by `one` set of forms than by the `other`."""
    return all(one[num_rows] <= _AS_FAST * other[num_rows] for num_rows in other)


Decide = Callable[[str, Sequence[str]], str]
"""Function: (name of the form that was fastest here, names of all) -> name of the form to use"""


def as_timed(name: str, _names: Sequence[str]) -> str:
    """Return `name`: use the form that was fastest here (ranks use another `Decide`)."""
    return name
