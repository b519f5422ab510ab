"""`python -m lab.synthetic.node`: a node with a synthetic model, whose loop notes every launch.

The process, the handshake, the state machines, the worker and its loop are the product's. The loop
is watched, but not where both models are in one process, and what the workers call of a model is
replaced: the executor, the functions that choose tokens, and what reads the vocabulary for
grammars.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from node.process import Heart, run_node
from proto.links.transport import Connection
from proto.messages import Role
from proto.node_config import NodeConfig


def work(config: NodeConfig, connection: Connection, heart: Heart) -> None:
    """Introduce the node to the coordinator, and serve until the process ends."""
    from drafter_node import worker as drafting
    from lab.synthetic import model  # takes seconds, so it is imported after the lifeline is set up
    from lab.synthetic.executor import engine_of
    from lab.synthetic.shared_device import maker_of, sharing_in
    from lab.synthetic.watched_loop import watched_loop
    from node.loading import introduce
    from target_node import home_worker
    from target_node import worker as verifying

    # Functions of these are replaced by ones with other types.
    changed: tuple[Any, ...] = (verifying, drafting, home_worker)
    changed[0].choose = model.choose
    changed[0].choose_later = lambda *what: partial(model.choose, *what)
    changed[1].rank_later = lambda *what, **named: partial(model.rank_scored, *what, **named)
    for one in changed:
        one.vocabulary_of = lambda _: None  # the folder has no model, and no text wants a grammar
    worker: Any = verifying if config.role is Role.TARGET else drafting
    folder = Path(config.model)
    worker.Loop = partial(watched_loop, folder / f"{config.role}.jsonl")
    sharing = sharing_in(folder)
    worker.SimulatedDevice = SimpleNamespace(of=maker_of(sharing))
    config = replace(config, shares_gpu=bool(sharing) and config.role is Role.TARGET)
    engine = engine_of(folder)
    if config.home_drafter:
        engine = replace(engine, home_drafter=engine_of(folder))
    heart.state = "ready"
    welcome = introduce(config, connection, engine, heart)
    worker.serve(config, engine, welcome, connection, heart)


if __name__ == "__main__":
    sys.exit(run_node(work))
