"""Which nodes of the drafter's tree come next."""

from dataclasses import replace

from drafter_node.compute import Children, Compute
from drafter_node.frontier import Pace
from node.events import Send, WaitUntil
from node.rows import PREFILL_CHUNK
from proto import codec
from proto.messages import MAX_NODES_PER_DRAFT, Draft, Limits
from proto.policies import POLICIES
from target_node import drafts_at_hand
from tests.drafter_node.drafter import Drafter, chosen, part_of
from tests.texts import STOP, opening, verdict

NUMBERS = {"width": 2, "branches": 2, "min_score": -3.0}  # e^-3 is 0.050
TREE = POLICIES["tree"].make(8, 16, options=NUMBERS)
AUTO = POLICIES["auto"].make(8, 16, options=NUMBERS)


def proposes(drafter: Drafter, compute: Compute, *rows: dict[int, float]) -> list[Draft]:
    """The model has answered, row by row: tokens and their scores; returns what is sent."""
    (part,) = compute.parts
    assert part.num_asked == len(rows)
    children = tuple(Children(tuple(row), tuple(row.values())) for row in rows)
    actions = drafter.answers_rows(compute.ticket, children)
    sent = [action.message for action in actions if isinstance(action, Send)]
    return [message for message in sent if isinstance(message, Draft)]


def forward(drafter: Drafter) -> Compute:
    """The forward that starts."""
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    return compute


def tokens_of(compute: Compute) -> tuple[int, ...]:
    """What it feeds."""
    return compute.parts[0].feed.tokens


def grown() -> Drafter:
    """1 2, and below it 5 (likely) and 6, with 7 and 8 below 5."""
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=TREE))
    proposes(drafter, forward(drafter), {5: -0.1, 6: -1.5})
    step = forward(drafter)
    assert tokens_of(step) == (5, 6)
    proposes(drafter, step, {7: -0.2, 8: -2.0}, {9: -0.3, 4: -1.6})
    return drafter


def test_the_likeliest_nodes_come_next_wherever_they_hang() -> None:
    drafter = grown()
    # 5 7: -0.3; 6 9: -1.8; 5 8: -2.1; 6 4: -3.1
    assert tokens_of(forward(drafter)) == (7, 9)


def test_siblings_do_not_see_each_other() -> None:
    part = part_of(grown().ticks())
    assert part.feed.positions == (3, 3)
    # 5 and 6 lie in the first two slots behind the text.
    assert part.feed.masks == (0b0101, 0b1010)


def test_what_survives_a_verdict_is_expanded_no_second_time() -> None:
    drafter = grown()
    drafter.hears(verdict((1, 2), 6, acked=2))
    step = forward(drafter)
    assert tokens_of(step) == (9, 4), "9 and 4 below 6 are left, and nothing of 5"
    assert step.parts[0].feed.prefix_len == 3, "6 is read already"


def test_a_verdict_off_the_tree_begins_at_the_root() -> None:
    drafter = grown()
    drafter.hears(verdict((1, 2), 3, acked=2))
    step = forward(drafter)
    assert tokens_of(step) == (3,)
    assert drafter.machine.tree.nodes == {}


def test_nothing_follows_the_end_of_a_text_nor_paths_that_are_too_unlikely_together() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=TREE))
    proposes(drafter, forward(drafter), {STOP: -0.1, 6: -3.1})
    (said,) = drafter.ticks()
    assert isinstance(said, Send)
    assert isinstance(said.message, Draft)
    assert said.message.done


def test_nodes_that_are_each_unlikely_are_worth_a_step_together() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=TREE))
    proposes(drafter, forward(drafter), {5: -3.1, 6: -3.2})  # 0.045 and 0.041
    assert tokens_of(forward(drafter)) == (5, 6)


def test_a_chain_is_not_followed_below_a_path_that_is_too_unlikely() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=replace(TREE, width=1, branches=1)))
    proposes(drafter, forward(drafter), {5: -2.9})
    proposes(drafter, forward(drafter), {6: -0.2})
    (waits,) = drafter.ticks()
    assert isinstance(waits, WaitUntil)


def test_behind_one_detour_only_first_children_are_expanded() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=replace(TREE, detours=1, width=8, min_score=-9.0)))
    proposes(drafter, forward(drafter), {5: -0.1, 6: -0.2})
    proposes(drafter, forward(drafter), {7: -0.1, 8: -0.2}, {9: -0.1, 4: -0.2})
    # 6 is a second child, and 4 is one again.
    assert sorted(tokens_of(forward(drafter))) == [7, 8, 9]


def test_nodes_of_several_parents_are_one_message_with_the_paths_to_them() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=TREE))
    proposes(drafter, forward(drafter), {5: -0.1, 6: -1.5})
    (said,) = proposes(drafter, forward(drafter), {7: -0.2, 8: -2.0}, {9: -0.3, 4: -1.6})
    assert said.parent_len == 2
    at = {token: index for index, token in enumerate(said.tokens)}
    assert {token: said.parents[at[token]] for token in (7, 8)} == {7: at[5], 8: at[5]}
    assert {token: said.parents[at[token]] for token in (9, 4)} == {9: at[6], 4: at[6]}
    assert (said.parents[at[5]], said.parents[at[6]]) == (-1, -1)


def test_a_full_tree_waits_for_a_verdict() -> None:
    drafter = Drafter()
    wide = replace(TREE, width=16, branches=8, min_score=-1e9, window=64)
    drafter.hears(opening(1, 2, policy=wide))
    for _ in range(30):
        actions = drafter.ticks()
        if not actions or not isinstance(actions[0], Compute):
            break
        number = actions[0].parts[0].num_asked
        row = {token: -1.0 - token / 64 for token in range(10, 18)}
        proposes(drafter, actions[0], *[row] * number)
    assert MAX_NODES_PER_DRAFT - 8 < len(drafter.machine.tree.nodes) <= MAX_NODES_PER_DRAFT
    # The target lacks what was sent: all of it is said again, in one message.
    drafter.hears(verdict((1,), 2))
    (said,) = drafter.hears(verdict((1,), 2))
    assert isinstance(said, Send)
    assert isinstance(said.message, Draft)
    assert len(said.message.tokens) == len(drafter.machine.tree.nodes)
    assert codec.decode(codec.encode(said.message)) == said.message
    assert drafts_at_hand.MAX_NODES > MAX_NODES_PER_DRAFT, (
        "the target has room for all, and for copies"
    )
    drafter.hears(verdict((1, 2), 3))
    assert tokens_of(forward(drafter)) == (3,)


def test_the_target_has_drafts_as_soon_as_there_are_as_many_as_it_says() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=TREE))
    proposes(drafter, forward(drafter), {5: -0.1, 6: -0.2})
    drafter.hears(verdict((1, 2), 3, acked=1, awaits=2))
    assert proposes(drafter, forward(drafter), {7: -0.1, 8: -4.1}) == []
    (said,) = proposes(drafter, forward(drafter), {9: -3.1, 4: -3.2}, {9: -4.1, 4: -4.2})
    assert sorted(said.tokens) == [4, 4, 7, 8, 9, 9]
    drafter.hears(verdict((1, 2, 3), 17, acked=2, awaits=1))
    (said,) = proposes(drafter, forward(drafter), {7: -0.1, 8: -4.1})
    assert said.tokens == (7, 8), "one draft in a row is all that is waited for"


def test_who_prices_its_waits_has_every_draft_at_once_and_is_told_the_end() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=AUTO))
    proposes(drafter, forward(drafter), {5: -0.1, 6: -0.2})
    drafter.hears(verdict((1, 2), 3, acked=1, awaits=3))
    (said,) = proposes(drafter, forward(drafter), {7: -0.1, 8: -4.1})
    assert said.tokens == (7, 8), "a pass that does not wait takes what is there"
    (said,) = proposes(drafter, forward(drafter), {9: -4.1, 4: -4.2}, {9: -4.1, 4: -4.2})
    assert (len(drafter.machine.tree.best_chain(8)), said.done) == (2, False)
    (end,) = drafter.ticks()
    assert isinstance(end, Send)
    assert isinstance(end.message, Draft)
    assert end.message.done, "two are there, and three are waited for"


def test_who_waits_for_no_more_than_is_there_is_not_told_the_end() -> None:
    drafter = Drafter()
    drafter.hears(opening(1, 2, policy=AUTO))
    proposes(drafter, forward(drafter), {5: -0.1, 6: -0.2})
    drafter.hears(verdict((1, 2), 3, acked=1, awaits=2))
    proposes(drafter, forward(drafter), {7: -0.1, 8: -4.1})
    proposes(drafter, forward(drafter), {9: -4.1, 4: -4.2}, {9: -4.1, 4: -4.2})
    assert [type(action) for action in drafter.ticks()] == [WaitUntil]


# -- pace -----------------------------------------------------------------------------------------


def pace_of(num_steps: int, num_verdicts: int = 40) -> Pace:
    """Of a tree of 64 places, after so many steps between any two verdicts."""
    pace = Pace(64)
    for _ in range(num_verdicts):
        for _ in range(num_steps):
            pace.stepped()
        pace.heard()
    return pace


def test_a_tree_lasts_until_the_next_verdict() -> None:
    assert Pace(64).num_nodes(12) == 12, "nothing is known yet"
    assert [pace_of(steps).num_nodes(12) for steps in (1, 5, 6, 7, 12, 40)] == [12, 12, 10, 9, 8, 8]
    assert pace_of(40).num_nodes(4) == 4, "a policy that is narrower stays so"


def test_verdicts_without_a_step_between_are_no_pace_until_there_was_one() -> None:
    assert pace_of(0).num_nodes(12) == 12


def test_the_pace_follows_what_comes() -> None:
    pace = pace_of(12)
    for _ in range(40):
        for _ in range(4):
            pace.stepped()
        pace.heard()
    assert pace.num_nodes(12) == 12


def test_a_drafter_that_makes_many_steps_makes_narrow_ones() -> None:
    drafter = Drafter(max_len=400)
    policy = replace(TREE, width=12, branches=4, window=32, min_score=-9.0)
    text = (1, 2)
    drafter.hears(opening(*text, policy=policy, limits=Limits(390, ())))
    widths: list[int] = []
    token = 10
    for round_ in range(12):
        for _ in range(10):
            actions = drafter.ticks()
            compute = next((one for one in actions if isinstance(one, Compute)), None)
            if compute is None:
                break
            (part,) = compute.parts
            if round_ == 11:
                widths.append(part.num_asked)
            children = []
            for _ in range(part.num_asked):
                children.append(chosen(*range(token, token + 4), score=-1.4))
                token += 4
            drafter.answers_rows(compute.ticket, tuple(children))
        drafter.hears(verdict(text, token))
        text = (*text, token)
        token += 1
    assert max(widths) == 8


def test_what_reads_a_long_prompt_is_no_step() -> None:
    text = tuple(range(12 * PREFILL_CHUNK))
    drafter = Drafter(max_len=len(text) + 200)
    policy = replace(TREE, width=12, branches=4, window=32, min_score=-9.0)
    drafter.hears(opening(*text, policy=policy, limits=Limits(len(text) + 100, ())))
    token, widths = len(text), list[int]()
    while len(widths) < 3:
        compute = forward(drafter)
        (part,) = compute.parts
        children = []
        for _ in range(part.num_asked):
            children.append(chosen(*range(token, token + 4), score=-1.4))
            token += 4
        drafter.answers_rows(compute.ticket, tuple(children))
        if part.num_asked:
            widths.append(part.num_asked)
            if len(widths) == 2:
                drafter.hears(verdict(text, len(text)))
    assert widths[0] == 1
    assert len(forward(drafter).parts[0].positions) == 12
