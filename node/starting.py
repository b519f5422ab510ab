"""What both nodes' programs do: signals and packages first, then whatever takes time to import.

This file is loaded before all others, so it imports nothing that takes time. Pythons that are too
old for the rest read it too (`proto/installation.py`).
"""

import gc
import sys
from typing import TYPE_CHECKING

from node.ending import end_at_once_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from node.loop import Serve
    from node.process import Heart
    from proto.links.transport import Connection
    from proto.node_config import NodeConfig


def start(role: str, load_serve: "Callable[[], Serve]") -> int:
    """Run `python -m target_node` or `drafter_node`; returns the exit status.

    role        target or drafter
    load_serve  what the node does; to import it takes seconds
    """
    is_by_hand = len(sys.argv) > 1
    if is_by_hand:
        end_at_once_on_signals(role)
    from proto.installation import EXIT_UNUSABLE, NODE, may_run

    if not may_run(f"{role}_node", NODE):
        return EXIT_UNUSABLE
    return _join(role, load_serve) if is_by_hand else _run(load_serve)


def _join(role: str, load_serve: "Callable[[], Serve]") -> int:
    """Serve one coordinator after another."""
    from node import joining
    from proto.messages import Role

    return joining.main(Role(role), load_serve)


def _run(load_serve: "Callable[[], Serve]") -> int:
    """Serve the coordinator that has started this process."""
    from node.process import run_node

    def work(config: "NodeConfig", connection: "Connection", heart: "Heart") -> None:
        from node import loop  # only here: by now the lifeline holds

        serve = load_serve()
        gc.freeze()
        loop.work(config, connection, heart, serve)

    return run_node(work)
