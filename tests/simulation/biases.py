"""Mistakes that bias every text and leave it plausible: the statistical mode must see each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from drafter_node import compute as drafter
from drafter_node.drafting import Drafting
from engine.choice.classical_rules import Distribution, Purpose, Trial, uniform
from proto.messages import MODEL_SOURCE, Rule
from proto.tree import SpeculationTree
from target_node import compute as target
from target_node.drafts_at_hand import Drafts
from tests.simulation.sampled import Sampling
from tests.simulation.statistics import DEAR_S, POLICIES, Case

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Bias:
    """A mistake, as a change of the models and of the machines, and the case where it shows.

    num_texts  that show it
    """

    name: str
    models: Callable[[], Sampling]
    case: Case
    plant: Callable[[Patch], None] = lambda patch: None
    num_texts: int = 4_000


class LeavesOutUnlikely(Sampling):
    """Drafts of low q are left out: the drafter draws again, once, if it does not like them."""

    def drafts(self, part: drafter.Part, q: Distribution) -> tuple[int, ...]:
        (token,) = super().drafts(part, q)
        return (token,) if q.of_token(token) > 0.3 else (q.pick(_second(part)),)


class NoiseOfPosition(Sampling):
    """Draft noise is a function of seed and position alone, so a second draft is as the first."""

    def draft_luck(self, part: drafter.Part) -> float:
        return uniform(part.opened.sampling.seed, Purpose.DRAFT, 0, part.positions[0])


class OneNoise(NoiseOfPosition):
    """The same number decides the draft and what corrects it."""

    def __init__(self) -> None:
        super().__init__()
        self._accepted = 0

    def judge(self, trial: Trial, part: target.Part, attempt: int = 0) -> int:
        self._accepted = super().judge(trial, part, attempt)
        return self._accepted

    def correction_luck(self, part: target.Part) -> float:
        position = part.positions[self._accepted]
        return uniform(part.opened.sampling.seed, Purpose.DRAFT, 0, position)


class JudgesTwice(Sampling):
    """A rejected draft gets a second chance."""

    def judge(self, trial: Trial, part: target.Part, attempt: int = 0) -> int:
        first = super().judge(trial, part, attempt)
        return max(first, super().judge(trial, part, attempt + 1))


class DraftsAgain(Sampling):
    """The drafter draws a second draft for a node whose first is unlikely, and sends both."""

    def drafts(self, part: drafter.Part, q: Distribution) -> tuple[int, ...]:
        (token,) = super().drafts(part, q)
        return (token,) if q.of_token(token) > 0.4 else (token, q.pick(_second(part)))


def _second(part: drafter.Part) -> float:
    """The number of a second draw."""
    assert part.sampled_in is not None
    return uniform(part.opened.sampling.seed, Purpose.DRAFT, part.sampled_in, part.number, 1)


def the_later_child_is_preferred(patch: Patch) -> None:
    """Of two drafts of one node the later one stays."""
    child_for = SpeculationTree._child_for

    def later(self: SpeculationTree, parent: int, length: int, token: int, *rest: Any) -> Any:
        if self.child(parent, token) is None:
            for key in list(self.children(parent)):
                for node in [*self.below(key), self.nodes[key]]:
                    del self.nodes[node.key]
                self.children(parent).remove(key)
        return child_for(self, parent, length, token, *rest)

    patch.setattr(SpeculationTree, "_child_for", later)


def judged_drafts_stay(patch: Patch) -> None:
    """After a rejection the drafts that hang on the path that came back are judged once more."""
    patch.setattr(SpeculationTree, "clear", lambda self: 0)


def unlikely_drafts_go_first(patch: Patch) -> None:
    """A draft is held back for a second one, but not if it is too unlikely to be drafted on."""
    patch.setattr(Drafting, "_holds_back", lambda self: len(self._unsent) < 2)


def rows_are_chosen_by_the_drafts(patch: Patch) -> None:
    """How many drafts are verified depends on which tokens they are."""
    patch.setattr(Drafts, "_kind_of", lambda self, node, copies: (MODEL_SOURCE, node.token))


SYNC, PIPELINED = POLICIES["sync"], POLICIES["pipelined"]
# Passes start often while the drafter is at work.
AT_ONCE = replace(PIPELINED, launch_min=1, min_score=-0.8)
BIASES = [
    Bias(
        "drafts of low q left out",
        LeavesOutUnlikely,
        Case(Rule.TOKEN, SYNC, False),
        num_texts=1_500,
    ),
    Bias(
        "noise of the position",
        NoiseOfPosition,
        Case(Rule.BLOCK, SYNC, False),
        num_texts=2_500,
    ),
    Bias(
        "one noise for draft and residual",
        OneNoise,
        Case(Rule.TOKEN, PIPELINED, False),
        num_texts=2_000,
    ),
    Bias(
        "a draft judged twice",
        JudgesTwice,
        Case(Rule.BLOCK, PIPELINED, False),
        num_texts=1_000,
    ),
    Bias(
        "the later of two drafts preferred",
        DraftsAgain,
        Case(Rule.TOKEN, SYNC, False),
        the_later_child_is_preferred,
        num_texts=1_500,
    ),
    Bias(
        "unlikely drafts go first",
        Sampling,
        Case(Rule.TOKEN, AT_ONCE, False, draft_s=0.025),
        unlikely_drafts_go_first,
    ),
    Bias(
        "rows chosen by the drafts",
        Sampling,
        Case(Rule.TOKEN, PIPELINED, False, row_s=DEAR_S),
        rows_are_chosen_by_the_drafts,
        num_texts=1_000,
    ),
]
