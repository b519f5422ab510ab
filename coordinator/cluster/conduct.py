"""How a node keeps to the protocol: what it is told, and when a drafter is cut off (pure).

A message that breaks the terms of its text (`proto/terms.py`) is dropped, and its sender is told,
at most once in TELL_EVERY_S, and MAX_BAD_FRAMES times in FORGIVEN_S. A drafter that still goes on
is cut off: its texts go on without it. A target is not, because its texts would end; a text for
which nothing else comes ends by itself (`text/session.py`). (Frames that cannot be read at all cut
off both: `Router._on_garbled`.)

A drafter that sends far more than its text can use is cut off at once, because reading its messages
slows down all texts. An honest one sends one draft for each forward pass of its model at most.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, auto

from coordinator.text.session_events import NodeId
from proto.liveness import MAX_BAD_FRAMES

TELL_EVERY_S, FORGIVEN_S = 1.0, 60.0
# Of one drafter for one text, from one heartbeat to the next: its passes take 0.3 ms or more.
MOST_DRAFTS = 1 << 10


class Answer(Enum):
    """What follows from a message that was dropped."""

    NOTHING = auto()  # its sender has been told just now
    TELL = auto()
    ENOUGH = auto()  # its sender was told again and again


@dataclass(slots=True)
class Conduct:
    """When a node was told that its messages are dropped: at most MAX_BAD_FRAMES times."""

    told_at: deque[float] = field(default_factory=deque)

    def broke(self, now: float) -> Answer:
        """Note a message that was dropped, and return what follows."""
        told_at = self.told_at
        while told_at and now - told_at[0] >= FORGIVEN_S:
            told_at.popleft()
        if told_at and now - told_at[-1] < TELL_EVERY_S:
            return Answer.NOTHING
        if len(told_at) == MAX_BAD_FRAMES:
            return Answer.ENOUGH
        told_at.append(now)
        return Answer.TELL


@dataclass(slots=True)
class Flow:
    """The drafts of one text on their way to its target.

    last    the latest frame of each drafter
    counts  how many each has sent since `eased`
    """

    last: dict[NodeId, bytes] = field(default_factory=dict)
    counts: Counter[NodeId] = field(default_factory=Counter)

    def passes(self, node: NodeId, frame: bytes) -> bool:
        """Count a draft; False: it is dropped, as it repeats the last one or is one too many.

        Every draft has a number of its own, so that no honest drafter sends one frame twice.
        """
        self.counts[node] += 1
        if frame == self.last.get(node) or self.counts[node] > MOST_DRAFTS:
            return False
        self.last[node] = frame
        return True

    def eased(self) -> None:
        """Begin to count anew: a heartbeat's time has passed."""
        self.counts.clear()

    @property
    def floods(self) -> list[NodeId]:
        """Return the drafters that have sent more than any honest one."""
        return [node for node, count in self.counts.items() if count > MOST_DRAFTS]


# -- refusals --------------------------------------------------------------------------------------

MAX_REFUSALS_SAID = 8  # for one name, until a node of this name is accepted


@dataclass(slots=True)
class Refusals:
    """The reasons of refusals that people were told of, for each name since one was accepted."""

    said: dict[NodeId, set[str]] = field(default_factory=dict)

    def is_news(self, node: NodeId, reason: str) -> bool:
        """Return whether people should be told of this refusal, and note that they were."""
        said = self.said.setdefault(node, set())
        is_news = reason not in said and len(said) < MAX_REFUSALS_SAID
        if is_news:
            said.add(reason)
        return is_news

    def accepted(self, node: NodeId) -> None:
        """Note that a node of this name was accepted."""
        self.said.pop(node, None)
