"""What is rehearsed: the texts, the policy, and what everything takes."""

from bisect import bisect_left
from dataclasses import dataclass

from node.economics import Measured
from proto.messages import Limits, Lookup, Policy, Role, Rule

NUM_TREE_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Text:
    """One session: its prompt and where it may end.

    read_len  tokens after the prompt with which its reader has found an end of its own and leaves;
              None: it reads them all
    """

    prompt: tuple[int, ...]
    limits: Limits
    read_len: int | None = None


@dataclass(frozen=True, slots=True)
class Forwards:
    """Seconds of a forward by its rows.

    known  (rows, seconds), ascending; one at least. Straight lines between them
    row_s  of each row beyond the last
    """

    known: tuple[tuple[int, float], ...]
    row_s: float = 0.0

    def of(self, num_rows: int) -> float:
        """Seconds of so many rows; of fewer than are known, as of the fewest."""
        last, last_s = self.known[-1]
        if num_rows >= last:
            return (num_rows - last) * self.row_s + last_s
        index = bisect_left(self.known, (num_rows, 0.0))
        above, above_s = self.known[index]
        if above == num_rows or index == 0:
            return above_s
        below, below_s = self.known[index - 1]
        return below_s + (above_s - below_s) * (num_rows - below) / (above - below)


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What things take at a node.

    forward     on its device
    host_s      on its host for each forward: messages, decisions, masks
    hop_s       of a message from or to the coordinator, one way
    timed_rows  forwards of which numbers of rows it times before its first text
    """

    forward: Forwards
    host_s: float = 0.0
    hop_s: float = 0.0
    timed_rows: tuple[int, ...] = ()

    @property
    def measured(self) -> Measured:
        """What it knows of its forwards before its first text."""
        return {rows: self.forward.of(rows) for rows in self.timed_rows}


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that the machines are given.

    drafter_max_len  most tokens of a text that a drafter can read
    temperature      only whether it is zero matters here
    blocking         a node reads its messages only between two forwards, as where the host computes
    lookup           how the target drafts by itself
    max_num_seqs     texts that are open at once
    drafter_lanes    of them, as many as a drafter has room for
    num_per_pass     most texts that share one
    is_head          the drafters are heads of the target
    submit_every_s   between two texts; 0: all at the start; None: each a while after the one before
                     is complete
    """

    policy: Policy
    texts: tuple[Text, ...]
    target: NodeCosts
    drafter: NodeCosts
    fixed_rows: int | None = None
    drafter_max_len: int = 1 << 20
    rule: Rule = Rule.COUPLED
    temperature: float = 0.0
    blocking: bool = False
    lookup: Lookup | None = None
    num_drafters: int = 1
    max_num_seqs: int = 1
    drafter_lanes: int = 1
    num_per_pass: int = 64
    submit_every_s: float | None = None
    is_head: bool = False

    def costs(self, role: Role) -> NodeCosts:
        """What things take at a node of this role."""
        return self.drafter if role is Role.DRAFTER else self.target

    def num_lanes(self, role: Role) -> int:
        """Texts at once that a node has room for."""
        return self.drafter_lanes if role is Role.DRAFTER else self.max_num_seqs

    @property
    def capacity(self) -> int:
        """Slots of a cache that is large enough."""
        return max(text.limits.max_len for text in self.texts) + NUM_TREE_SLOTS
