"""A target node with a mistake in it, named by SLIPSTREAM_TEST_BIAS, for tests that must see it."""

import os
import sys

from engine.choice.classical_rules import Distribution, Trial
from node.starting import start
from target_node.__main__ import load_serve


def wrong_residual() -> None:
    """A rejection is corrected from p itself."""
    Trial.following = lambda self, n: self.targets[n]  # type: ignore[method-assign]


def accept_all_after_first() -> None:
    """Every draft is accepted once the first one is."""
    count = Trial.num_accepted

    def careless(self: Trial, luck: list[float]) -> int:
        return len(luck) if luck and luck[0] < self.chances[0] else count(self, luck)

    Trial.num_accepted = careless  # type: ignore[method-assign, assignment]


def truncated_after_sampling() -> None:
    """What was sampled from all of q is judged as if it were from its likeliest two."""
    make = Distribution.of

    def cut(ids: object, weights: object) -> Distribution:
        whole = make(ids, weights)  # type: ignore[arg-type]
        if len(whole.ids) < 3:
            return whole
        kept = sorted(whole.probs.argsort()[-2:])
        share = whole.probs[kept] / whole.probs[kept].sum()
        # A token that is outside has been sent all the same: a tiny chance avoids the division.
        probs = whole.probs * 0 + 1e-9
        probs[kept] = share
        return Distribution(whole.ids, probs)

    Distribution.of = staticmethod(cut)  # type: ignore[method-assign, assignment]


BIASES = (wrong_residual, accept_all_after_first, truncated_after_sampling)

if __name__ == "__main__":
    {bias.__name__: bias for bias in BIASES}[os.environ["SLIPSTREAM_TEST_BIAS"]]()
    sys.exit(start("target", load_serve))
