"""Would two draft steps in flight pay? A simulation of a tree of drafts in which only times count.

    python -m lab.measure.steps_in_flight [--costs 5/1] [--tokens N] [--seeds N]

The drafter expands the likeliest nodes of its tree, step after step; the target verifies the
likeliest nodes that have arrived, pass after pass. Caches cost nothing, no message is lost, and a
draft is right, depending on its rank, with the chances `CHANCES`. Besides, there are only the times
in `Times`, as they were measured with real processes (docs/LOG.md). So the simulation says what a
change of one of these times would bring, and what happens if the next draft step is launched before
the result of the running one is read. The unit is tokens in the time of one pass. It runs on any
machine, in virtual time.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from statistics import fmean
from typing import Literal

CHANCES = (0.70, 0.12, 0.05, 0.03)  # that the target chooses the drafter's first choice, second ...
ELSE = 0.01  # assumed chance of a token that is none of the drafter's choices
WIDTH, ROWS, MOST_NODES = 12, 16, 700
LEAST = 0.006  # nodes with a smaller chance (from the root) are not expanded
LOGS = tuple(map(math.log, CHANCES))

Form = Literal["one", "two in flight", "chained"]
TWO: Form = "two in flight"
CHAINED: Form = "chained"


@dataclass(frozen=True, slots=True)
class Times:
    """The costs of target and drafter, in milliseconds.

    pass_, step    a target pass and a draft step on their devices
    between_passes, between_steps  idle time of the device between two of them
    verdict, draft  time from the end of a forward until the other side uses its result
    """

    pass_: float
    step: float
    between_passes: float = 0.2
    between_steps: float = 0.15
    verdict: float = 0.8
    draft: float = 0.5


@dataclass(slots=True, eq=False)
class Node:
    """A drafted token, or the root.

    log_chance   log of the chance that the text reaches this node
    choice       rank of the target's next token; -1: none of its children; None: not drawn yet
    is_expanded  None while the draft step that expands it runs
    arrived      time at which the target has it
    number       order in which nodes are made
    """

    rank: int
    log_chance: float
    children: "list[Node]" = field(default_factory=list)
    choice: int | None = None
    is_expanded: bool | None = False
    arrived: float = math.inf
    number: int = field(default_factory=count().__next__)


class Race:
    """An event-driven simulation of drafter and target on one text.

    form  how draft steps follow each other: one at a time, two in flight, or chained on the device
    """

    def __init__(self, times: Times, form: Form, seed: int) -> None:
        self._times = times
        self._form = form
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.now = 0.0
        self.num_tokens = self.num_passes = 0
        self._root = self._known_root = Node(-1, 0.0)  # the root at the target; at the drafter
        self._is_verifying = False
        self._root_before = self._known_root  # the drafter's root when it launched its newest step
        self._free_at = 0.0  # time at which the drafter's device will have ended all its steps
        self._num_running = 0

    def run(self, num_tokens: int) -> float:
        """Simulate until there are `num_tokens` tokens; return tokens in the time of one pass."""
        self._draft()
        self._verify()
        while self.num_tokens < num_tokens:
            self.now, _, happen = heappop(self._events)
            happen()
        return self.num_tokens * self._times.pass_ / self.now

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        """Schedule `happen` for virtual time `when`."""
        self._num_events += 1
        heappush(self._events, (when, self._num_events, happen))

    # -- drafter ----------------------------------------------------------------------------------

    def _draft(self, *, follows: bool = False) -> None:
        """Launch draft steps, as many as may be in flight, for nodes that wait for no result.

        follows  True if another step has just ended
        """
        most = 2 if self._form == TWO else 1
        while self._num_running < most:
            # A chained step may expand all nodes that the step before has made, with no host time
            # in between; but it was launched when that step began, and knows only the root of then.
            is_chained = follows and self._form == CHAINED
            tips = self._tips(self._root_before if is_chained else self._known_root)
            if is_chained and not tips:
                is_chained, tips = False, self._tips(self._known_root)
            if not tips:
                return
            for tip in tips:
                tip.is_expanded = None
            self._root_before = self._known_root
            # A step that is launched while another one runs begins when that one ends.
            begins = self._free_at
            if self._num_running == 0 and not is_chained:
                begins = self.now + self._times.between_steps
            self._free_at = begins + self._times.step
            self._num_running += 1
            self._at(self._free_at, partial(self._drafted, tips))

    def _tips(self, root: Node) -> list[Node]:
        """Return at most WIDTH likeliest nodes to expand; [] also if the tree is full."""
        open_: list[Node] = []
        found = [root]
        for node in found:
            if node.is_expanded:
                found += node.children
            elif node.is_expanded is False:
                open_.append(node)
        if len(found) > MOST_NODES:
            return []
        open_.sort(key=lambda node: -node.log_chance)
        least = root.log_chance + math.log(LEAST)
        return [node for node in open_[:WIDTH] if node.log_chance >= least]

    def _drafted(self, tips: list[Node]) -> None:
        """Handle the end of a draft step: send its drafts to the target, launch the next step."""
        self._num_running -= 1
        for tip in tips:
            tip.is_expanded = True
            tip.children = [Node(rank, tip.log_chance + log) for rank, log in enumerate(LOGS)]

        def arrive() -> None:
            for tip in tips:
                for child in tip.children:
                    child.arrived = self.now
            self._verify()

        self._at(self.now + self._times.draft, arrive)
        self._draft(follows=True)

    # -- target -----------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Launch a pass with the drafts that have arrived, if the target's device is free."""
        if self._is_verifying:
            return
        self._is_verifying = True
        rows = self._likeliest()
        ends = self.now + self._times.between_passes + self._times.pass_
        self._at(ends, partial(self._verified, rows))

    def _likeliest(self) -> set[int]:
        """Return the numbers of the nodes that the next pass verifies, at most ROWS."""
        found: set[int] = set()
        open_ = [(-node.log_chance, node.number, node) for node in self._there(self._root)]
        heapify(open_)
        while open_ and len(found) < ROWS:
            _, number, node = heappop(open_)
            found.add(number)
            for child in self._there(node):
                heappush(open_, (-child.log_chance, child.number, child))
        return found

    def _there(self, node: Node) -> list[Node]:
        """Return those children of a node that have arrived at the target."""
        return [child for child in node.children if child.arrived <= self.now]

    def _verified(self, rows: set[int]) -> None:
        """End a pass: commit right rows and one token, send the verdict, launch the next pass."""
        node, self.num_passes, self._is_verifying = self._root, self.num_passes + 1, False
        while (right := self._right_child(node)) is not None and right.number in rows:
            node, self.num_tokens = right, self.num_tokens + 1
        self.num_tokens += 1
        if right is None:  # the target's token was not drafted
            rank = self._choice_of(node)
            right = Node(rank, node.log_chance + (LOGS[rank] if rank >= 0 else math.log(ELSE)))
        self._root = right
        self._at(self.now + self._times.verdict, partial(self._heard, right))
        self._verify()

    def _heard(self, root: Node) -> None:
        """Handle a verdict at the drafter: move its root and draft on."""
        self._known_root = root
        self._draft()

    def _right_child(self, node: Node) -> Node | None:
        """Return the child that is the target's next token; None if it was not drafted."""
        choice = self._choice_of(node)
        return next((child for child in node.children if child.rank == choice), None)

    def _choice_of(self, node: Node) -> int:
        """Return the rank of the target's next token after a node, drawn when first asked."""
        if node.choice is None:
            ranks = (*range(len(CHANCES)), -1)
            weights = (*CHANCES, 1.0 - sum(CHANCES))
            (node.choice,) = self._random.choices(ranks, weights)
        return node.choice


def speed(times: Times, num_tokens: int, num_seeds: int, form: Form = "one") -> float:
    """Return the mean over some seeds of the tokens in the time of one pass."""
    return fmean(Race(times, form, seed).run(num_tokens) for seed in range(num_seeds))


def changes(times: Times) -> dict[str, tuple[Times, Form]]:
    """Return the variants that are compared, by name: their times and form of drafting."""
    halved = {
        name: getattr(times, name) / 2
        for name in ("between_passes", "between_steps", "verdict", "draft")
    }
    return {
        "as measured": (times, "one"),
        "two steps in flight": (times, TWO),
        "levels chained on the device": (times, CHAINED),
        "a verdict 0.15 ms earlier": (replace(times, verdict=times.verdict - 0.15), "one"),
        "a draft 0.15 ms earlier": (replace(times, draft=times.draft - 0.15), "one"),
        "steps 0.05 ms closer": (replace(times, between_steps=times.between_steps - 0.05), "one"),
        "passes 0.1 ms closer": (replace(times, between_passes=times.between_passes - 0.1), "one"),
        "all of these halved": (replace(times, **halved), "one"),
        "no time of the host": (Times(times.pass_, times.step, *(0.0,) * 4), "one"),
    }


def main() -> int:
    """Print the comparison; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.steps_in_flight",
        description="Computes the tokens in the time of a pass, from times alone.",
    )
    parser.add_argument(
        "--costs",
        action="append",
        metavar="TARGET/DRAFT",
        help="milliseconds of a target pass and of a draft step; may be given several times",
    )
    parser.add_argument(
        "--tokens", type=int, default=6000, metavar="N", help="tokens of a text (default 6000)"
    )
    parser.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="how many texts (default 5)"
    )
    options = parser.parse_args()
    for costs in options.costs or ("3/0.5", "5/1", "12/1"):
        target, _, draft = costs.partition("/")
        try:
            times = Times(float(target), float(draft))
        except ValueError:
            parser.error(f"--costs: expected milliseconds as 5/1, got {costs!r}")
        sys.stdout.write(f"a pass of {target} ms, a draft step of {draft} ms\n")
        for name, (changed, form) in changes(times).items():
            made = speed(changed, options.tokens, options.seeds, form)
            sys.stdout.write(f"  {name:28} {made:.2f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
