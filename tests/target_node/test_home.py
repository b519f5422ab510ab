"""Heads at home: the target's machine and a drafter's in one process, in virtual time."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from drafter_node import compute as drafter
from drafter_node import scheduling as drafting
from drafter_node.known import Known as HeadsKnown
from node.costs import Costs, Passes
from node.dispatcher import Dispatcher
from node.events import Allocate, Arrived, CopyPrefix, MoveRows, Send, Tick, WaitUntil, Wipe
from node.lanes import Lanes
from proto.messages import (
    HEADS_SOURCE,
    Close,
    Draft,
    Features,
    Limits,
    Open,
    Policy,
    Rule,
    SamplingSpec,
    Verdict,
)
from proto.policies import POLICIES, as_chain, without_drafter
from rehearsal.cache import HeadCache, VirtualCache
from rehearsal.node import with_features
from target_node import compute as target
from target_node import scheduling as verifying
from target_node.at_home import DrafterDone, DrafterFailed, ForDrafter, Home
from target_node.known import Known
from tests.simulation.models import Deterministic
from tests.simulation.toys import ToyModel

MODEL = ToyModel(salt=3, vocab_size=7, agreement=0.8, num_children=3)
PROMPT = tuple(range(7)) * 4
MAX_LEN = 80
CAPACITY = MAX_LEN + 64
TREE = without_drafter(POLICIES["tree"].make())
PASS_S, STEP_S = 1.0, 0.1


@dataclass
class Node:
    """A target with heads: its machines, its caches, and a clock that forwards move on."""

    step_s: float = STEP_S
    num_lanes: int = 2
    model: ToyModel = MODEL
    now: float = 0.0
    said: list[Any] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    fails_at: int | None = None  # the step of the heads that fails, from 0 on
    wiped: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models = Deterministic(self.model)
        known = Known(costs=Costs({1: PASS_S}))
        lanes = Lanes(self.num_lanes, CAPACITY)
        targets = Dispatcher(lanes, verifying.Schedule(lanes, known, num_per_pass=self.num_lanes))
        of_heads = HeadsKnown(
            CAPACITY, HEADS_SOURCE, Passes({1: self.step_s}), is_head=True, is_at_home=True
        )
        lanes = Lanes(self.num_lanes, CAPACITY, is_head=True)
        schedule = drafting.Schedule(lanes, of_heads, num_per_pass=self.num_lanes)
        heads: Any = Dispatcher(lanes, schedule)
        self.home = Home(targets, heads, known=of_heads, of_target=known, layers=(-1,))
        self.num_steps = 0
        self.caches = [VirtualCache(CAPACITY) for _ in range(self.num_lanes)]
        self.heads = [HeadCache(CAPACITY) for _ in range(self.num_lanes)]

    def handle(self, event: Any) -> bool:
        """Returns whether anything was computed."""
        has_worked = False
        for action in self.home.handle(event, self.now):
            has_worked |= self._perform(action)
        self.home.check()
        return has_worked

    def run(self, limit: int = 2000) -> None:
        """Until there is nothing to do."""
        for _ in range(limit):
            if not self.handle(Tick()):
                return
        raise AssertionError("it never ends")

    def _perform(self, action: Any) -> bool:
        match action:
            case Send(message):
                self.said.append(message)
            case MoveRows(moves):
                for move in moves:
                    self.caches[move.lane].move(move)
            case CopyPrefix(source, to, length):
                self.caches[to].copy(self.caches[source], length)
            case ForDrafter(MoveRows(moves)):
                for move in moves:
                    self.heads[move.lane].move(move)
                self.handle(DrafterDone())
            case ForDrafter(CopyPrefix(source, to, length)):
                self.heads[to].copy(self.heads[source], length)
                self.handle(DrafterDone())
            case ForDrafter(Wipe(lane, start)):
                self.wiped.append((lane, start))
                self.heads[lane].wipe(start)
                self.handle(DrafterDone())
            case ForDrafter(drafter.Compute(ticket, parts)):
                self.turns.append("heads")
                if self.turns.count("heads") - 1 == self.fails_at:
                    self.handle(DrafterFailed(was_step=True))
                    return True
                children = [self._drafted(part) for part in parts]
                num_steps = 1
                if (first := parts[0]).ahead:
                    chain = list(children[0])
                    while first.is_followed(chain):
                        chain += self._drafted(first.after(chain))
                    children, num_steps = [tuple(chain)], len(chain)
                self.num_steps += num_steps
                self.now += num_steps * self.step_s
                proposed = drafter.Proposed(ticket, tuple(children), 1, num_steps)
                self.handle(DrafterDone(proposed))
                return True
            case target.Compute(ticket, parts):
                self.turns.append("target")
                self.now += PASS_S
                outcomes = []
                for part in parts:
                    seen = self.caches[part.feed.lane].run(part.feed)
                    outcome = self.models.verify(part, seen[len(seen) - part.num_asked :])
                    outcomes.append(with_features(part, outcome, seen))
                self.handle(target.Computed(ticket, tuple(outcomes), 1))
                return True
            case Allocate() | WaitUntil():
                pass
            case _:
                raise AssertionError(f"unknown action {action}")
        return False

    def _drafted(self, part: drafter.Part) -> tuple[drafter.Children, ...]:
        seen = self.heads[part.feed.lane].run(part.feed)
        return self.models.draft(part, seen[len(seen) - part.num_asked :], 0)

    def verdicts(self, session: int = 1) -> list[Verdict]:
        """What was said of a text."""
        found = [one for one in self.said if isinstance(one, Verdict) and one.session == session]
        assert not any(isinstance(one, Draft) for one in self.said), "drafts leave the process"
        return found

    def text(self, session: int = 1) -> tuple[int, ...]:
        """All tokens of a text behind its prompt."""
        return tuple(token for verdict in self.verdicts(session) for token in verdict.tokens)


def opening(session: int = 1, policy: Policy = TREE, **changes: Any) -> Open:
    """A text."""
    limits = Limits(MAX_LEN, ())
    key = bytes(15) + bytes([session])
    spec = SamplingSpec(0.0, 0, 1.0, 0, 0)
    made = Open(session, 1, key, PROMPT, len(PROMPT), spec, policy, limits)
    return replace(made, **changes)


def truth(model: ToyModel = MODEL) -> tuple[int, ...]:
    """What the target alone writes."""
    return model.complete(PROMPT, Limits(MAX_LEN, ()))[0][len(PROMPT) :]


def written(*openings: Open, **settings: Any) -> Node:
    """A node that has written these texts."""
    node = Node(**settings)
    for one in openings:
        node.handle(Arrived(one))
    node.run()
    return node


@pytest.mark.parametrize("name", ["auto", "sync", "pipelined", "amusd", "pearl", "ssd", "tree"])
def test_the_text_is_the_targets_and_drafts_are_accepted(name: Any) -> None:
    node = written(opening(policy=without_drafter(POLICIES[name].make())))
    assert node.text() == truth()
    accepted = [verdict for verdict in node.verdicts() if verdict.num_accepted]
    assert len(accepted) > 3
    assert {source for verdict in accepted for source in verdict.sources} == {HEADS_SOURCE}


def test_the_heads_draft_first_and_then_it_is_the_targets_turn() -> None:
    node = written(opening())
    first = node.turns.index("heads")
    turns = node.turns[first:]
    assert node.num_steps > turns.count("target") > 5
    pairs = list(pairwise(turns))
    assert ("target", "target") not in pairs[:-2], "a pass begins before the heads have drafted"


def test_steps_that_cost_more_than_they_save_are_not_made() -> None:
    cheap, dear = written(opening()), written(opening(), step_s=0.6 * PASS_S)
    assert dear.text() == cheap.text() == truth()
    per_pass = [node.num_steps / node.turns.count("target") for node in (cheap, dear)]
    assert per_pass[0] > 2 * per_pass[1] > 0


def test_heads_that_are_never_right_are_tried_and_then_hardly_ever() -> None:
    poor = replace(MODEL, agreement=0.0)
    for name in ("auto", "tree"):
        policy = without_drafter(POLICIES[name].make())
        good, bad = (written(opening(policy=policy), model=m, step_s=0.3) for m in (MODEL, poor))
        assert good.text() == truth()
        assert bad.text() == truth(poor)
        first = bad.turns.index("heads")
        assert bad.turns[first : first + 8].count("heads") >= 4, "it is not tried"
        num_first_steps = sum(pair == ("target", "heads") for pair in pairwise(good.turns))
        assert num_first_steps >= good.turns.count("target") - 3
        late = bad.turns[len(bad.turns) // 2 :]
        expected = name == "tree"  # without prices a policy drafts whatever comes of it
        assert (late.count("heads") > 5) == expected


def test_features_leave_the_process_only_if_somebody_asks_for_them() -> None:
    alone, asked = written(opening()), written(opening(layers=(-1,)))
    assert not any(isinstance(one, Features) for one in alone.said)
    assert any(isinstance(one, Features) for one in asked.said)
    assert alone.text() == asked.text() == truth()


def test_other_features_are_somebody_elses_and_the_heads_stay_away() -> None:
    node = written(opening(layers=(1, 2)))
    assert node.text() == truth()
    assert "heads" not in node.turns
    assert any(isinstance(one, Features) for one in node.said)


def test_where_somebody_asks_for_other_features_in_mid_text_they_go() -> None:
    node = Node()
    node.handle(Arrived(opening()))
    while node.turns.count("target") < 4:
        node.handle(Tick())
    num_drafted, so_far = node.turns.count("heads"), PROMPT + node.text()
    assert num_drafted > 0
    node.handle(Arrived(opening(tokens=so_far, incarnation=7, layers=(1, 2))))
    assert not node.home._drafters.texts
    node.run()
    assert node.turns.count("heads") == num_drafted
    assert node.text() == truth()


def test_without_drafts_the_heads_have_nothing_to_do() -> None:
    node = written(opening(policy=POLICIES["ar"].make()))
    assert node.text() == truth()
    assert "heads" not in node.turns


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_under_a_classical_rule_they_draft_where_nobody_else_does(rule: Rule) -> None:
    model = replace(MODEL, num_children=1)
    sampled = SamplingSpec(1.0, 0, 1.0, 0, 0)
    chain = as_chain(POLICIES["pipelined"].make())
    node = Node()
    node.models = Deterministic(model)
    node.handle(Arrived(opening(policy=without_drafter(chain), rule=rule, sampling=sampled)))
    node.run()
    assert node.text() == truth(model)
    assert sum(verdict.num_accepted for verdict in node.verdicts()) > 5
    other = Node()
    other.handle(Arrived(opening(policy=chain, rule=rule, sampling=sampled)))
    other.handle(Tick())
    assert "heads" not in other.turns


def test_several_texts_and_the_same_one_opened_anew() -> None:
    node = Node()
    for session in (1, 2):
        node.handle(Arrived(opening(session)))
    for _ in range(12):
        node.handle(Tick())
    so_far = PROMPT + node.text(1)
    node.handle(Arrived(opening(1, tokens=so_far[: len(PROMPT) + 2], incarnation=7)))
    node.run()
    repeated = {v.base_len: v for v in node.verdicts(1)}  # what is said again is the same
    assert node.text(2) == truth()
    tokens = list(PROMPT)
    for verdict in sorted(repeated.values(), key=lambda one: one.base_len):
        tokens[verdict.base_len :] = verdict.tokens
    assert tuple(tokens[len(PROMPT) :]) == truth()
    node.handle(Arrived(Close(1, "")))
    node.handle(Arrived(opening(3)))
    node.run()
    assert node.text(3) == truth()
    assert sum(verdict.num_accepted for verdict in node.verdicts(3)) > 5


def test_the_story_of_a_text_has_what_its_heads_have_met_too() -> None:
    node = written(opening(1))
    at_target, at_heads = node.home.story(1).split("; at the drafter ")
    assert "Computed" in at_target
    assert "Proposed" in at_heads
    assert node.home.story(2) == ""


@pytest.mark.parametrize("name", ["auto", "sync", "pipelined", "tree"])
@pytest.mark.parametrize("fails_at", [0, 1, 7])
def test_heads_that_fail_draft_no_more_and_the_texts_go_on(name: Any, fails_at: int) -> None:
    policy = without_drafter(POLICIES[name].make())
    node = Node(fails_at=fails_at)
    for session in (1, 2):
        node.handle(Arrived(opening(session, policy=policy, layers=(-1,) if session == 2 else ())))
    node.run()
    assert node.text(1) == node.text(2) == truth()
    assert node.turns.count("heads") == fails_at + 1, "they are asked again"
    told = {one.session for one in node.said if isinstance(one, Features)}
    assert told == {2}, "features are for whoever else asked for them"
    node.handle(Arrived(Close(1, "")))
    node.handle(Arrived(opening(3, policy=policy)))
    node.run()
    assert node.text(3) == truth()
    assert node.turns.count("heads") == fails_at + 1
    assert not node.home.texts[3].opened.layers, "its features are computed for nobody"


def test_a_move_of_heads_that_fails_does_not_let_a_pass_begin_twice() -> None:
    node = Node()
    node.handle(Arrived(opening()))
    while not node.turns.count("heads"):
        node.handle(Tick())
    started = node.home.handle(Tick(), node.now)
    assert any(isinstance(one, ForDrafter | target.Compute) for one in started)
    assert node.home.handle(DrafterFailed(was_step=False), node.now) == ()
    assert node.home.handle(Tick(), node.now) == (), "what was begun has not come back"


@pytest.mark.parametrize("name", ["auto", "sync", "tree"])
@pytest.mark.parametrize("from_", [1, 6])
def test_heads_whose_logits_are_not_finite_draft_no_more_and_the_text_goes_on(
    name: Any, from_: int
) -> None:
    node = Node()
    real, calls = node.models, []

    class Failing:
        """From some step on nothing is finite."""

        verify = real.verify

        def draft(self, part: Any, digests: Any, index: int) -> Any:
            calls.append(part)
            if len(calls) >= from_:
                return (drafter.NOTHING,) * part.num_asked
            return real.draft(part, digests, index)

    node.models = Failing()  # type: ignore[assignment]
    node.handle(Arrived(opening(policy=without_drafter(POLICIES[name].make()))))
    node.run()
    assert node.text() == truth()
    assert node.wiped
    assert len(calls) < from_ + 8, "it goes on trying"
