"""The start of both nodes' programs: first signals and a check of packages, then slow imports.

This file is loaded before all others, so it imports nothing that takes time. Pythons that are too
old for the rest load it too (`proto/installation.py`).
"""

import os
import sys
from typing import TYPE_CHECKING

from node.ending import end_at_once_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from node.loading import Serve
    from node.process import Heart
    from proto.links.transport import Connection
    from proto.node_config import NodeConfig


# torch computes an operator on several threads, which wait for each other at its end. By default
# the first to be ready polls for milliseconds, and so takes the core that the last one needs as
# soon as anything else runs on this machine: passes then took a hundred times as long. Now it
# polls for some microseconds, enough where all cores are free, and sleeps after that.
THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


# Weights in memory pages of 2 MB instead of 4 KB, where Linux lets a program ask for them. Which
# small pages a process gets is luck: some decoded at half the speed of others for as long as they
# lived (docs/LOG.md).
PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


# Products of torch and of oneDNN keep each program that they made for a shape: a thousand of half a
# megabyte each, so that a node grows for hours. The shapes of a model need some two hundred.
KERNELS = {"LRU_CACHE_CAPACITY": "256", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


# transformers imports these wherever they are installed, for what a node never computes (the losses
# of object detectors): 0.3 seconds and more of each start.
UNUSED = ("scipy", "sklearn")


def leave_out_unused() -> None:
    """Let these packages seem not to be installed, in this process."""
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as Python defines it


def keep_few_kernels() -> None:
    """Let torch keep fewer programs, unless the user has decided; before it is loaded."""
    for name, value in KERNELS.items():
        os.environ.setdefault(name, value)


def use_large_pages() -> None:
    """Let torch ask for large memory pages, unless the user has decided; before it is loaded."""
    for name, value in PAGES.items():
        os.environ.setdefault(name, value)


def let_threads_sleep() -> None:
    """Set how torch's threads wait for each other, unless the user has; before torch is loaded."""
    if not THREADS.keys() & os.environ.keys():
        os.environ.update(THREADS)


def start(role: str, load_serve: "Callable[[], Serve]") -> int:
    """Run `python -m target_node` or `drafter_node`; returns the exit status.

    role        target or drafter
    load_serve  imports the node's worker, which takes seconds, and returns its `Serve` function
    """
    let_threads_sleep()
    use_large_pages()
    keep_few_kernels()
    leave_out_unused()
    is_by_hand = len(sys.argv) > 1
    if is_by_hand:
        end_at_once_on_signals(role)
    from proto.installation import EXIT_UNUSABLE, NODE, may_run

    if not may_run(f"{role}_node", NODE):
        return EXIT_UNUSABLE
    if is_by_hand:
        from node import joining
        from proto.messages import Role

        return joining.main(Role(role), load_serve)
    from node.process import run_node

    def work(config: "NodeConfig", connection: "Connection", heart: "Heart") -> None:
        from node import loading  # takes seconds; the lifeline (`process.py`) is watched by now

        loading.work(config, connection, heart, load_serve)

    return run_node(work)
