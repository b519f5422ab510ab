"""`python -m lab.lossless.careless_target`: a target node whose token rule is wrong on purpose.

`verify-lossless` starts it in the target's place, and must reject what it writes.
"""

import sys
from collections.abc import Sequence

from engine.choice.verification import Distribution, Trial, token_trial
from node.loop import Serve
from node.starting import start
from proto.messages import Rule


def careless_trial(
    targets: Sequence[Distribution], drafts: Sequence[int], proposals: Sequence[Distribution]
) -> Trial:
    """Token verification that accepts every draft once the first is accepted."""
    trial = token_trial(targets, drafts, proposals)
    chances = (*trial.chances[:1], *(1.0 for _ in trial.chances[1:]))
    return Trial(targets, proposals, chances, trial.weights, whole=False)


def load_serve() -> Serve:
    """Import what the target does, and put the wrong rule into it."""
    from target_node.worker import TRIALS, serve

    TRIALS[Rule.TOKEN] = careless_trial
    return serve


if __name__ == "__main__":
    sys.exit(start("target", load_serve))
