"""What comes next at a target: a function of what is there, and nothing else."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.costs import Costs, Prices
from node.economics import NUM_BETWEEN
from node.events import CopyPrefix
from node.placing import Place, Placing
from proto.messages import Cause, Policy, Rule
from proto.policies import POLICIES, without_prices
from target_node.deciding import (
    NUM_FIRST,
    TRY_AGAIN_AFTER,
    Awaited,
    Copy,
    Decision,
    HomeStep,
    LastPass,
    Read,
    Reader,
    Start,
    TextView,
    View,
    Wait,
    are_worth_drafting,
    awaited,
    decide,
    shared_out,
)
from tests.policies import autoregressive
from tests.texts import PIPELINED, SYNC_4

NOW = 10.0
COPY = CopyPrefix(1, 0, 100)


def text(session: int = 1, policy: Policy = PIPELINED, **changes: Any) -> TextView:
    """A text whose drafter is expected, has been heard, and has sent nothing for this root."""
    usual: dict[str, Any] = {
        "rule": Rule.COUPLED,
        "rests": False,
        "is_trial": False,
        "is_catching_up": False,
        "most": 4,
        "num_awaited": 2,
        "num_in_row": 0,
        "are_there": False,
        "are_all": False,
        "ready_at": NOW,
        "num_missing": 1,
        "went_along": False,
        "has_begun": False,
        "is_quiet": False,
        "num_in_vain": 0,
        "takes_turns": False,
    }
    return TextView(session, policy, **{**usual, **changes})


def test_a_drafter_is_ahead_of_a_pass_that_awaits_less_than_it_drafts() -> None:
    sync = POLICIES["sync"].make(4)
    assert text(policy=sync, num_awaited=2).is_ahead
    assert not text(policy=sync, num_awaited=4).is_ahead
    assert text(policy=PIPELINED, num_awaited=4).is_ahead
    assert not text(policy=PIPELINED, num_awaited=2, takes_turns=True).is_ahead


def view(*writers: TextView, costs: Costs | None = None, **changes: Any) -> View:
    """These texts, nothing else to do, and passes of 10 ms."""
    if costs is None:
        costs = Costs()
        costs.passed(1, 1, 1, 0.010, 0.010, is_plain=True)
        costs.reply.add(0.004)
    usual: dict[str, Any] = {
        "reader": None,
        "was_chunk": False,
        "held_since": None,
        "num_per_pass": 4,
        "p": 0.8,
        "prices": costs.at(),
        "placing": None,
    }
    return View(writers, **{**usual, **changes})


READER = Reader(9, PIPELINED, rests=False, is_trial=False, copy=None)


def causes(decision: Decision) -> dict[int, Cause | None]:
    """Of the texts of the pass that starts."""
    assert isinstance(decision.action, Start)
    return decision.action.causes


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rests": True}, Cause.RESTING),
        ({"policy": autoregressive()}, Cause.ALONE),
        ({"most": 0, "num_awaited": 0}, Cause.ALONE),
        ({"is_catching_up": True}, Cause.ALONE),
        ({"num_in_row": 2, "are_there": True}, Cause.READY),
        ({"are_all": True}, Cause.READY),
        ({"num_awaited": 0}, Cause.CHEAP),
        ({"num_awaited": 0, "are_there": True, "num_in_row": 1}, Cause.READY),
        ({"num_awaited": 0, "policy": POLICIES["amusd"].make()}, Cause.READY),
        ({"is_quiet": True}, Cause.QUIET),
        ({"ready_at": NOW - 9.0}, Cause.LATE),
        ({"ready_at": NOW - 9.0, "is_quiet": True}, Cause.QUIET),
    ],
)
def test_a_text_alone_has_a_reason_to_start(changes: dict[str, Any], cause: Cause) -> None:
    decision = decide(view(text(**changes)), NOW)
    assert causes(decision) == {1: cause}
    assert decision.awaiting == ()


@pytest.mark.parametrize("policy", [PIPELINED, SYNC_4, POLICIES["auto"].make()])
def test_without_a_reason_it_waits_up_to_a_limit(policy: Policy) -> None:
    asked = view(text(policy=policy))
    decision = decide(asked, NOW)
    assert isinstance(decision.action, Wait)
    assert decision.awaiting == (1,)
    assert NOW < decision.action.until < NOW + 0.1
    assert causes(decide(asked, decision.action.until)) == {1: Cause.LATE}


def dear() -> Costs:
    """Passes of 10 ms, and waits of 50."""
    costs = Costs()
    costs.passed(1, 1, 1, 0.010, 0.010, is_plain=True)
    costs.reply.add(0.050)
    for _ in range(NUM_FIRST):
        costs.waited(0.050)
    return costs


def test_a_wait_that_costs_more_than_it_brings_is_not_made() -> None:
    assert causes(decide(view(text(), costs=dear()), NOW)) == {1: Cause.CHEAP}


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": without_prices(PIPELINED)},
        {"rule": Rule.TOKEN},
        {"has_begun": True},
        {"takes_turns": True},
        {"num_in_vain": 9},
    ],
)
def test_but_it_is_where_costs_do_not_decide_or_it_has_begun(changes: dict[str, Any]) -> None:
    decision = decide(view(text(**changes), costs=dear()), NOW)
    assert isinstance(decision.action, Wait)


def test_no_drafts_are_awaited_that_would_not_be_verified() -> None:
    """Before any wait was measured, and where drafts were missing for long."""
    costs = Costs({1: 0.010, 5: 0.100})
    costs.passed(1, 1, 1, 0.010, 0.010, is_plain=True)
    costs.reply.add(0.004)
    for num_in_vain in (0, 9):
        asked = view(text(num_in_vain=num_in_vain), costs=costs)
        assert causes(decide(asked, NOW)) == {1: Cause.CHEAP}


def test_a_prompt_comes_first_but_not_twice_in_a_row() -> None:
    ready = text(num_in_row=2, are_there=True)
    assert decide(view(ready, reader=READER), NOW).action == Read(9, None)
    assert causes(decide(view(ready, reader=READER, was_chunk=True), NOW)) == {1: Cause.READY}
    waits = decide(view(text(), reader=READER, was_chunk=True), NOW)
    assert waits.action == Read(9, None), "meanwhile nothing else is to be done"
    assert waits.awaiting == (1,)


def test_what_another_lane_has_is_copied_and_not_read() -> None:
    copied = decide(view(reader=replace(READER, copy=COPY)), NOW)
    assert copied.action == Copy(9, COPY)


def test_where_there_is_no_text_only_a_message_helps() -> None:
    assert decide(view(), NOW).action == Wait(math.inf)


def test_a_pass_is_held_back_for_drafts_that_add_more_than_the_time_costs() -> None:
    ready, waits = text(1, num_in_row=2, are_there=True), text(2)
    decision = decide(view(ready, waits), NOW)
    assert decision.action == Wait(pytest.approx(NOW + 0.010 * 1.44 / 3.44))
    assert (decision.held_since, decision.awaiting) == (NOW, (2,))
    later = view(ready, waits, held_since=NOW - 1.0)
    started = decide(later, NOW)
    assert causes(started) == {1: Cause.READY, 2: None}, "the other joins"
    assert started.held_since is None


def test_nobody_joins_twice_in_a_row() -> None:
    ready, waits = text(1, num_in_row=2, are_there=True), text(2, went_along=True)
    assert causes(decide(view(ready, waits, held_since=NOW - 1.0), NOW)) == {1: Cause.READY}


def test_where_there_is_room_for_some_those_with_a_reason_come_first() -> None:
    texts = [text(1, num_missing=1, is_quiet=False, ready_at=NOW - 9.0), text(2, are_all=True)]
    waits = text(3)
    decision = decide(view(waits, *texts, num_per_pass=2, held_since=NOW - 1.0), NOW)
    assert causes(decision) == {1: Cause.LATE, 2: Cause.READY}


def test_the_cores_are_those_that_the_measurements_say() -> None:
    placing = Placing(fixed=Place.SHARED, has_drafters_core=True)
    start = decide(view(text(are_all=True), placing=placing), NOW).action
    assert isinstance(start, Start)
    assert start.cores is not None
    assert (start.cores.place, start.cores.takes_turns) == (Place.SHARED, True)
    assert (start.cores.is_drafted, start.cores.counts) == (True, True)
    counted = {}
    for rests in (True, False):
        tried = decide(view(text(rests=rests, are_all=True, is_trial=True), placing=placing), NOW)
        assert isinstance(tried.action, Start)
        assert tried.action.cores is not None
        counted[tried.action.cores.is_drafted] = tried.action.cores.counts
    assert counted == {False: True, True: False}, "drafts on trial say nothing about cores"


def after(
    *, took_turns: bool = False, all_accepted: bool = False, num_in_vain: int = 0
) -> LastPass:
    return LastPass(took_turns, all_accepted, num_in_vain, num_texts=1)


def measured(*, num_replies: int) -> Prices:
    """Prices of passes of 10 ms, draft steps of 0.5 ms, and answers after 1 ms."""
    costs = Costs({1: 0.010, 16: 0.010})
    costs.passed(1, 1, 1, 0.010, 0.010, is_plain=True)
    costs.draft.add(0.0005)
    for _ in range(num_replies):
        costs.reply.add(0.001)
    return costs.at()


def test_the_number_of_drafts_to_wait_for() -> None:
    auto, prices = POLICIES["auto"].make(), view().prices
    tell = {"rests": False, "p": 0.8, "prices": prices}
    pearl = POLICIES["pearl"].make(4)
    assert awaited(pearl, 4, after(), **tell) == Awaited(1)
    assert awaited(pearl, 4, after(all_accepted=True), **tell) == Awaited(4)
    assert awaited(pearl, 3, after(all_accepted=True), **tell) == Awaited(3)
    assert awaited(auto, 9, after(), **tell) == Awaited(auto.launch_min), "nothing was measured"
    costs = measured(num_replies=NUM_FIRST)
    sure = awaited(auto, 9, after(), rests=False, p=0.95, prices=costs)
    unsure = awaited(auto, 9, after(), rests=False, p=0.3, prices=costs)
    assert sure.num > unsure.num >= 1


def test_where_no_drafter_is_expected_nothing_is_priced() -> None:
    auto, costs = POLICIES["auto"].make(), measured(num_replies=NUM_FIRST)
    for most, rests in [(0, False), (9, True)]:
        last = after(took_turns=True)
        expected = Awaited(min(auto.launch_min, most))
        assert awaited(auto, most, last, rests=rests, p=0.95, prices=costs) == expected


def test_a_drafter_that_takes_turns_is_awaited_for_all_that_is_likely() -> None:
    auto, costs = POLICIES["auto"].make(), measured(num_replies=NUM_FIRST)
    last = after(took_turns=True)
    in_turns = awaited(auto, 9, last, rests=False, p=0.95, prices=costs)
    assert (in_turns.num, in_turns.takes_turns) == (9, True)
    assert 0 < in_turns.least_chance < 1


def test_drafts_that_are_missing_too_often_are_awaited_whatever_it_costs() -> None:
    auto, costs = POLICIES["auto"].make(), Costs({1: 0.0010, 16: 0.0010})
    costs.passed(1, 1, 1, 0.001, 0.001, is_plain=True)
    costs.draft.add(0.0005)
    for _ in range(NUM_FIRST):
        costs.reply.add(0.050)
    tell = {"rests": False, "p": 0.8, "prices": costs.at()}
    assert awaited(auto, 9, after(), **tell) == Awaited(0), "fifty passes are too long a wait"
    assert awaited(auto, 9, after(num_in_vain=4), **tell) == Awaited(auto.launch_min)


def test_rows_are_shared_out_by_price_where_the_policy_says_so() -> None:
    prices = Costs({1: 0.010, 2: 0.010, 3: 0.010, 4: 0.050}).at()
    likely = {11: 0.9, 12: 0.8, 13: 0.7, 14: 0.6}
    auto = POLICIES["auto"].make()
    assert shared_out([auto], [likely], 1, prices) == [2], "a fourth row costs four passes"
    fixed = without_prices(auto)
    assert shared_out([fixed], [likely], 1, prices) == [4]
    assert shared_out([fixed, auto], [{21: 0.5}, likely], 2, prices) == [1, 0]


def test_a_text_keeps_its_drafts_where_another_never_lets_a_pass_be_plain() -> None:
    costs = Costs()
    for _ in range(NUM_BETWEEN):
        costs.passed(2, 4, 4, 0.010, 0.010, is_plain=False)
    auto = POLICIES["auto"].make()
    likely, others = {11: 0.9}, {21: 0.5}
    assert shared_out([auto, auto], [likely, others], 2, costs.at()) == [0, 0], (
        "a plain pass is due"
    )
    assert shared_out([without_prices(auto), auto], [others, likely], 2, costs.at()) == [1, 1]


booleans = st.booleans()
texts = st.builds(
    text,
    session=st.integers(1, 9),
    policy=st.sampled_from([row.make() for row in POLICIES.values()]),
    rule=st.sampled_from(Rule),
    most=st.just(8),
    num_awaited=st.integers(0, 8),
    num_in_row=st.integers(0, 8),
    ready_at=st.floats(NOW - 1.0, NOW),
    num_in_vain=st.integers(0, 20),
    **dict.fromkeys(
        ("rests", "is_trial", "is_catching_up", "are_there", "are_all", "went_along"), booleans
    ),
    **dict.fromkeys(("has_begun", "is_quiet", "takes_turns"), booleans),
)


@given(
    st.lists(texts, max_size=4, unique_by=lambda one: one.session),
    st.booleans(),
    st.sampled_from([None, READER]),
    st.sampled_from([None, NOW - 0.5, NOW]),
    st.booleans(),
)
def test_whatever_is_there_the_answer_is_always_the_same_and_something_happens(
    writers: list[TextView],
    was_chunk: bool,  # noqa: FBT001 (hypothesis fills it)
    reader: Reader | None,
    held_since: float | None,
    is_dear: bool,  # noqa: FBT001
) -> None:
    asked = view(
        *writers,
        costs=dear() if is_dear else None,
        reader=reader,
        was_chunk=was_chunk,
        held_since=held_since,
    )
    decision = decide(asked, NOW)
    assert decide(asked, NOW) == decision
    known = {one.session for one in writers}
    assert set(decision.awaiting) <= known
    match decision.action:
        case Start(pass_causes):
            assert pass_causes
            assert set(pass_causes) <= known
            assert decision.held_since is None
            assert {s for s, cause in pass_causes.items() if cause is None} <= set(
                decision.awaiting
            )
        case Wait(until):
            assert until > NOW
            assert reader is None, "there is a prompt to read"
            assert (until == math.inf) == (not writers)
            assert decision.awaiting or not writers
        case Read(session):
            assert reader is not None
            assert session == reader.session


def test_what_was_held_back_once_is_no_reason_to_hold_less_later() -> None:
    alone = decide(view(text(), held_since=NOW - 1.0), NOW)
    assert alone.held_since is None, "no text is ready"


# -- a drafter at home -----------------------------------------------------------------------------

AUTO, TREE = (POLICIES[name].make() for name in ("auto", "tree"))


def is_worth_it(policy: Policy, *, p: float = 0.8, step_s: float = 0.001, **changes: Any) -> bool:
    """Whether a step of a drafter at home is made, where a pass takes 10 ms."""
    costs = Costs()
    costs.passed(1, 1, 1, 0.010, 0.010, is_plain=True)
    usual = {"chance": 0.5, "is_first": False, "num_since": 1}
    step = HomeStep(1, policy, **{**usual, **changes})
    return are_worth_drafting([step], 1, p, step_s, costs.at())


def test_a_further_step_at_home_is_made_if_it_saves_more_time_than_it_costs() -> None:
    assert is_worth_it(AUTO, chance=0.5)
    assert not is_worth_it(AUTO, chance=0.01)
    assert not is_worth_it(AUTO, chance=0.5, step_s=0.009)


def test_a_policy_that_weighs_no_costs_drafts_a_chain_to_its_end_but_no_tree() -> None:
    assert is_worth_it(SYNC_4, chance=1e-9, step_s=1.0)
    assert not is_worth_it(TREE, chance=1e-9, step_s=1.0)
    assert is_worth_it(TREE, is_first=True, p=0.0, step_s=1.0)


@pytest.mark.parametrize(
    ("num_since", "is_made"),
    [
        *((None, True), (0, True), (-3, True), (1, False)),
        *((TRY_AGAIN_AFTER - 1, False), (TRY_AGAIN_AFTER, True)),
    ],
)
def test_drafts_that_are_hardly_ever_right_are_tried_now_and_then(
    num_since: int | None,
    is_made: bool,  # noqa: FBT001
) -> None:
    assert is_worth_it(AUTO, is_first=True, p=0.001, num_since=num_since) == is_made
    assert is_worth_it(AUTO, is_first=True, p=0.8, num_since=num_since)
