"""The input of a rehearsal: the texts, the policy, and how long everything takes."""

from bisect import bisect_left
from dataclasses import dataclass

from drafter_node.translation.text import Languages
from node.costs import Measured
from proto.messages import Limits, Lookup, Policy, Role, Rule

NUM_TREE_SLOTS = 64
VOCABULARY = 1 << 10  # token ids of the toy models are below
MOST_PER_TOKEN = 4  # tokens of another vocabulary that say one of the target's


@dataclass(frozen=True, slots=True)
class Text:
    """One session: its prompt, and where it may end.

    read_len  number of tokens after the prompt with which its reader has found an end of its own,
              and stops reading; None: it reads all
    """

    prompt: tuple[int, ...]
    limits: Limits
    read_len: int | None = None


@dataclass(frozen=True, slots=True)
class Forwards:
    """The seconds of a forward by its number of rows, interpolated linearly.

    known  (rows, seconds) in ascending order, at least one
    row_s  seconds for each row beyond the last known number
    """

    known: tuple[tuple[int, float], ...]
    row_s: float = 0.0

    def of(self, num_rows: int) -> float:
        """Return the seconds of a forward of `num_rows` rows; never less than the first known."""
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
    """How long things take at a node, in seconds.

    forward     a forward on its device
    host_s      work on its host for each forward: messages, decisions, masks
    hop_s       a message from or to the coordinator, one way
    timed_rows  row counts for which it times a forward before its first text
    """

    forward: Forwards
    host_s: float = 0.0
    hop_s: float = 0.0
    timed_rows: tuple[int, ...] = ()

    @property
    def measured(self) -> Measured:
        """Return the seconds of forwards, by rows, that the node timed before its first text."""
        return {rows: self.forward.of(rows) for rows in self.timed_rows}


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that the state machines are given in a rehearsal.

    fixed_rows       rows of a decoding pass in reproducible mode; None: off
    drafter_max_len  most tokens of a text that a drafter can read
    temperature      only whether it is zero matters here
    blocking         True: a node reads messages only between two forwards, as if its host computed
    lookup           how the target drafts by copying; None: not
    max_num_seqs     most texts that are open at once at each target
    drafter_lanes    number of texts for which a drafter has room
    num_per_pass     most texts that share a pass
    is_head          True: the drafters are heads of the target
    languages        the vocabularies of drafters and target; None: they have the same
    submit_every_s   seconds between the submission of two texts; 0: all at the start; None: each
                     text a while after the one before is complete
    placement        "shared": passes run on the drafter's core too, so that the models take turns;
                     "auto": there or on other cores, whichever is faster; "": always on others
    expected         part of a forward's time after which it is expected to have ended; below 1, all
                     forwards are late
    by_hand          the targets are started by users: one that falls silent may wake again
    same_bits        the targets say that they compute the same bits
    keeps_bits       a text goes on only at a target that says so
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
    num_targets: int = 1
    max_num_seqs: int = 1
    drafter_lanes: int = 1
    num_per_pass: int = 64
    submit_every_s: float | None = None
    is_head: bool = False
    languages: Languages | None = None
    placement: str = ""
    expected: float = 1.0
    by_hand: bool = False
    same_bits: bool = True
    keeps_bits: bool = False

    def costs(self, role: Role) -> NodeCosts:
        """Return how long things take at a node of this role."""
        return self.drafter if role is Role.DRAFTER else self.target

    def num_lanes(self, role: Role) -> int:
        """Return for how many texts at once a node of this role has room."""
        return self.drafter_lanes if role is Role.DRAFTER else self.max_num_seqs

    def capacity(self, role: Role) -> int:
        """Return the number of slots with which a lane at such a node has room for every text."""
        longest = max(text.limits.max_len for text in self.texts)
        if role is Role.DRAFTER and self.languages is not None:
            longest *= MOST_PER_TOKEN
        return longest + NUM_TREE_SLOTS
