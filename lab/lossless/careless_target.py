"""`python -m lab.lossless.careless_target`: a target node whose token rule is wrong on purpose.

`verify-lossless` starts it in the target's place, and must reject what it writes.
"""

import sys
from collections.abc import Sequence

from engine.choice.verification import Distribution, Trial, token_trial
from node.process import Heart, run_node
from proto.links.transport import Connection
from proto.messages import Rule
from proto.node_config import NodeConfig
from target_node import __main__ as right


def careless_trial(
    targets: Sequence[Distribution], drafts: Sequence[int], proposals: Sequence[Distribution]
) -> Trial:
    """Token verification that accepts every draft once the first is accepted."""
    trial = token_trial(targets, drafts, proposals)
    chances = (*trial.chances[:1], *(1.0 for _ in trial.chances[1:]))
    return Trial(targets, proposals, chances, trial.weights, whole=False)


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Do the target's work with the wrong rule."""
    from target_node.worker import TRIALS

    TRIALS[Rule.TOKEN] = careless_trial
    right.work(config, connection, heart)


if __name__ == "__main__":
    sys.exit(run_node(work))
