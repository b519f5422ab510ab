"""What people are told when a node dies or falls silent, and whether texts go on (pure).

Theory of operation
-------------------
A death is noticed in one of these ways:

    its process has ended              the launcher sees it                    -> NodeEnded
    it says that it has failed         Fault about no text                     -> Router._on_message
    it keeps breaking the protocol     it is cut off, and counts as dead       -> Router._cut_off
    its frames cannot be read          more than MAX_BAD_FRAMES of them        -> Router._on_garbled
    it does not fit the others         its Hello is refused                    -> Router._refused
    nothing is heard of it             Registry.newly_silent; it may come back -> Router._on_tick

This file says what comes of it:

    a drafter's death or silence       texts go on without it                        -> Warn
    a drafter that can never work      the user made a mistake                       -> Abort
    a target's, another one is ready   its texts go on there (`Router._lost`)        -> Warn
    a target's, others are awaited     texts wait for it, or for another             -> Warn
    a target's silence, started here   the router ends its process, so that another begins
    a target's, none is awaited        nobody is left who could go on                -> Abort

Then `Router._lost` takes the texts from the node and offers them to others. Each text's session is
told (`NodeLost`, `text/session.py`). A node that was started here is started again
(`launching/restarts.py`), a target a few times in a row; then none is awaited any more. A node that
comes back is given its texts again (`Router._joined`): it learns of them by an Open with all their
tokens, so nothing of a dead node is needed.
"""

from collections.abc import Sequence

from coordinator.cluster.node import Health, Node
from coordinator.cluster.router_events import Abort, NodeEnded, Warn
from proto.errors import NodeError
from proto.messages import Role


class Deaths:
    """Says what comes of each death.

    awaits_target  if the target is lost, texts wait for another one; else the coordinator ends
    """

    def __init__(self, *, awaits_target: bool) -> None:
        self._awaits_target = awaits_target
        self._last = ""  # how the latest drafter ended, as it was reported

    def of(
        self, node: Node, end: NodeEnded, others: Sequence[Node], num_tokens: int
    ) -> Warn | Abort | None:
        """Return what comes of a node's end; None: texts go on, and people know already.

        If a drafter that was never ready is unusable, the user made a mistake, and the coordinator
        ends.

        others      the other nodes of its role that are there or awaited
        num_tokens  tokens that the open texts have so far
        """
        line = end.line
        was_ready = node.health is not Health.EXPECTED or node.is_again
        if node.role is Role.DRAFTER and (was_ready or not end.is_unusable):
            # If restarts fail again and again in the same way, only the first is reported.
            is_news = node.hello is not None or line != self._last
            self._last = line
            if not is_news:
                return None
            # For a node that was silent, people know already how the texts go on.
            if node.health is Health.SILENT:
                return Warn(line)
            return Warn(f"{line}; {_without_drafter(others)}")
        if was_ready and _are_ready(others):
            return Warn(f"{line}; going on without it")
        if was_ready and self._awaits_target and (others or not end.is_last):
            return Warn(f"{line}; waiting for another")
        line = node.failure or line  # a silence, before the process was killed for it
        return Abort(NodeError(f"{line} (after {num_tokens} tokens)" if was_ready else line))

    def of_silence(self, node: Node, line: str, others: Sequence[Node]) -> Warn | Abort:
        """Return what comes of a node's silence; `line` says of whom, and for how long.

        others  the other nodes of its role that are there or awaited
        """
        if node.role is Role.DRAFTER:
            return Warn(f"{line}; {_without_drafter(others)}")
        if _are_ready(others):
            return Warn(f"{line}; going on without it")
        if self._awaits_target:
            again = "waiting for it, or for another" if node.is_by_hand else "it is replaced"
            return Warn(f"{line}; {again}")
        return Abort(NodeError(f"{line}; is it stopped?"))


def _are_ready(others: Sequence[Node]) -> bool:
    return any(one.health is Health.READY for one in others)


def _without_drafter(others: Sequence[Node]) -> str:
    """Return how texts go on after a drafter was lost, in words for people."""
    return f"going on without {'it' if _are_ready(others) else 'drafts'}"
