"""`python -m lab.synthetic.node`: a node with a synthetic model, whose loop notes every launch.

The process, the handshake, the state machines, the worker and its loop are the product's. The loop
is watched, and what the worker calls of a model is replaced: the executor, the two functions that
choose tokens, and what reads the vocabulary for grammars.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from node.process import Heart, run_node
from proto.links.transport import Connection
from proto.messages import Role
from proto.node_config import NodeConfig


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Introduce the node to the coordinator, and serve until the process ends."""
    from lab.synthetic import model  # takes seconds, so it is imported after the lifeline is set up
    from lab.synthetic.executor import engine_of
    from lab.synthetic.watched_loop import watched_loop
    from node.loading import introduce

    worker: Any  # its functions are replaced by ones with other types
    if config.role is Role.TARGET:
        from target_node import worker

        worker.choose = model.choose
    else:
        from drafter_node import worker

        worker.rank_scored = model.rank_scored
    folder = Path(config.model)
    worker.Loop = partial(watched_loop, folder / f"{config.role}.jsonl")
    worker.vocabulary_of = lambda _: None  # the folder has no model, and no text wants a grammar
    engine = engine_of(folder)
    heart.state = "ready"
    welcome = introduce(config, connection, engine, heart)
    worker.serve(config, engine, welcome, connection, heart)


if __name__ == "__main__":
    sys.exit(run_node(work))
