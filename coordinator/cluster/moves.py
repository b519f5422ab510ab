"""Which target writes a text, and what people are told when another goes on with it (pure).

A text moves only if its target is lost. Both targets write the same text if they compute the same
bits; where that is not known, two tokens that are almost equally probable may come out differently.
"""

from collections import Counter
from dataclasses import dataclass, field

from coordinator.cluster.fitting import same_bits
from coordinator.cluster.node import Node
from coordinator.text.session_events import NodeId
from proto.messages import Hello

STRANDED = "no other target is known to compute the same bits"
NEAR_TIES = "equal but for near ties: the two are not known to compute the same bits"


@dataclass(frozen=True, slots=True)
class Home:
    """The target that writes a text, or the one that wrote it last.

    place  the place of its process (`Node.place`)
    hello  what the process has said of itself
    """

    place: NodeId
    hello: Hello

    @classmethod
    def of(cls, target: Node) -> "Home":
        """Return a target as a home. It has been accepted."""
        assert target.hello is not None
        return cls(target.place, target.hello)

    def is_like(self, target: Node) -> bool:
        """True if the target goes on with exactly this one's text.

        It computes the same bits, or is a process in the same place, which has the same settings.
        """
        hello = target.known_hello
        is_same = hello is None or same_bits(self.hello, hello)
        return target.place == self.place or is_same


@dataclass(slots=True)
class Moves:
    """The texts that went on at another target since people were told last.

    counts   number of texts, by (the place that lost them, the target that has them, is it equal)
    waiting  number of texts that no other target could take, by (the place, need they its bits)
    """

    counts: Counter[tuple[NodeId, NodeId, bool]] = field(default_factory=Counter)
    waiting: Counter[tuple[NodeId, bool]] = field(default_factory=Counter)

    def note(self, home: Home | None, target: Node) -> None:
        """Note that a text with this home, or that is new (None), is opened at a target."""
        if home is not None and home.place != target.place:
            self.counts[home.place, target.place, home.is_like(target)] += 1

    def waits(self, target: Node, *, is_bound: bool) -> None:
        """Note that a text of a target that was lost waits; `is_bound`: it needs the same bits."""
        self.waiting[target.place, is_bound] += 1

    def told(self) -> list[str]:
        """Return a line for each pair of targets, for people, and forget the moves."""
        lines = []
        for (left, is_bound), number in self.waiting.items():
            why = "a target that computes the same bits" if is_bound else "room at another target"
            lines.append(f"{_texts(number)} of {left.decode()} must wait for {why}")
        for (left, taken, is_equal), number in self.counts.items():
            line = f"{taken.decode()} goes on with {_texts(number)} of {left.decode()}"
            lines.append(line if is_equal else f"{line}, {NEAR_TIES}")
        self.counts.clear()
        self.waiting.clear()
        return lines


def _texts(number: int) -> str:
    return "1 text" if number == 1 else f"{number} texts"
