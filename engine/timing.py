"""The clock by which forms of a computation are chosen when a model is loaded.

The rule: a clock may choose only among forms of one *order of sums*, which give the same bits, so
that no text depends on it. Where it chooses among others, the call says `any_order=True`, and why
(docs/decisions.md). Owns the clock and the rule; knows neither what is computed nor what for.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")

Run = Callable[[], object]
"""Function that runs a form once, to its end"""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to compute something.

    order  name of its order of sums: forms of one order give the same bits
    run    runs it once, to its end
    """

    name: str
    order: str
    run: Run


class Ordered(Protocol):
    """What the clock may choose: a `Form`, or another class of forms that says its order."""

    @property
    def order(self) -> str:
        """Return the name of its order of sums."""


F = TypeVar("F", bound=Ordered)

_WARM, _TIMED = 3, 20
_LONG_S = 0.5  # forms that take long are timed at least once each, and no longer than this


class Decide(Protocol):
    """Lets the ranks of a model agree, or returns what was found here (`as_timed`)."""

    def __call__(self, found: T, choices: Sequence[T], /) -> T:
        """Return the choice to use, given what was `found` here; all ranks must call it."""


def as_timed(found: T, _choices: Sequence[T]) -> T:
    """Return what was `found` here (ranks use another `Decide`)."""
    return found


def quickest(forms: Sequence[Form], decide: Decide, *, any_order: bool = False) -> str:
    """Return the name of the fastest form; of each the fewest seconds of up to 20 runs count.

    Runs on ranks may wait for each other (sums of all ranks), so `decide` also lets them agree on
    how many there are: by its own clock each rank would stop at another.

    Raises:
        ValueError: as `choose`.
    """
    runs = {form: form.run for form in forms}
    with torch.inference_mode():
        warm_s = sum(fewest_seconds(runs, _WARM).values())
        num_runs = min(max(int(_LONG_S / max(warm_s, 1e-9)) - _WARM, 1), _TIMED)
        num_runs = decide(num_runs, range(_TIMED + 1))
        found = choose(fewest_seconds(runs, num_runs), any_order=any_order)
    return decide(found.name, [form.name for form in forms])


def choose(taken_s: Mapping[F, float], *, any_order: bool = False) -> F:
    """Return the form that takes the fewest seconds.

    any_order  True: the clock may choose between texts at a near tie

    Raises:
        ValueError: the forms have several orders of sums, and that is not allowed.
    """
    orders = {form.order for form in taken_s}
    if len(orders) > 1 and not any_order:
        raise ValueError(
            f"a clock may not choose among orders of sums: {', '.join(sorted(orders))}"
        )
    return min(taken_s, key=taken_s.__getitem__)


def fewest_seconds(forms: Mapping[K, Run], num_runs: int) -> Mapping[K, float]:
    """Return the fewest seconds of so many runs of each form, which take turns; load adds time."""
    taken = dict.fromkeys(forms, math.inf)
    for _ in range(num_runs):
        for name, run in forms.items():
            started = time.perf_counter()
            run()
            taken[name] = min(taken[name], time.perf_counter() - started)
    return taken


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
