"""`python -m rehearsal.lossless.careless_target`: a target whose token rule is wrong on purpose.

`verify-lossless` starts it in the place of the target, and its checks must reject what it writes.
"""

import sys
from collections.abc import Sequence

from engine.choice.classical_rules import Distribution, Trial, token_trial
from node.loading import Serve
from node.starting import start
from proto.messages import Rule


def careless_trial(
    targets: Sequence[Distribution], drafts: Sequence[int], proposals: Sequence[Distribution]
) -> Trial:
    """Judge drafts by the token rule, but wrongly: after the first, accept with probability 1."""
    trial = token_trial(targets, drafts, proposals)
    chances = (*trial.chances[:1], *(1.0 for _ in trial.chances[1:]))
    return Trial(targets, proposals, chances, trial.weights, whole=False)


def load_serve() -> Serve:
    """Import the target node's code, put the wrong token rule into it, and return `serve`."""
    from target_node.worker import TRIALS, serve

    TRIALS[Rule.TOKEN] = careless_trial
    return serve


if __name__ == "__main__":
    sys.exit(start("target", load_serve))
