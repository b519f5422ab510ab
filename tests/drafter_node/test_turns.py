"""What a drafter does where the target computes on its core: they take turns."""

from dataclasses import replace

from drafter_node.compute import Compute
from node.events import Send
from proto.messages import Draft
from proto.policies import POLICIES
from tests.drafter_node.drafter import Drafter, chosen
from tests.texts import opening, verdict

AUTO = POLICIES["auto"].make(4, 16)
LIKELY, UNLIKELY = -0.1, -2.0  # logs of chances: 0.9 and 0.14


def in_turns(drafter: Drafter, least_chance: float = 0.3) -> None:
    """It drafts for a text, and the first verdict says that the models take turns."""
    drafter.hears(opening(1, 2, policy=AUTO))
    drafter.drafts(5)
    drafter.hears(replace(verdict((1, 2), 9, acked=1, awaits=4), least_chance=least_chance))


def steps(drafter: Drafter, *scores: float) -> tuple[int, list[Draft]]:
    """Let it draft, each token with one of these scores; returns how many steps it made, and said.

    It ends when the drafter makes no step.
    """
    said: list[Draft] = []
    for number, score in enumerate(scores):
        actions = drafter.ticks()
        computes = [action for action in actions if isinstance(action, Compute)]
        said += [one.message for one in actions if isinstance(one, Send)]  # type: ignore[misc]
        if not computes:
            return number, said
        ended = drafter.answers(computes[0].ticket, chosen(20 + number, score=score))
        said += [one.message for one in ended if isinstance(one, Send)]  # type: ignore[misc]
    return len(scores), said


def test_it_drafts_as_far_as_is_likely_enough_and_then_tells_once_that_it_is_done() -> None:
    drafter = Drafter()
    in_turns(drafter)
    number, (told,) = steps(drafter, LIKELY, UNLIKELY, LIKELY, LIKELY)
    assert number == 2, "below an unlikely draft it does not go on"
    assert (told.tokens, told.done, told.num_steps) == ((20, 21), True, 2)
    assert drafter.is_idle(), "the core is the target's now"


def test_it_stops_at_as_many_in_a_row_as_a_pass_verifies() -> None:
    drafter = Drafter()
    in_turns(drafter)
    number, (told,) = steps(drafter, *[LIKELY] * 8)
    assert number == AUTO.num_speculative_tokens
    assert told.tokens == (20, 21, 22, 23)
    assert not told.done, "the target has all that it waits for"
    assert drafter.is_idle()


def test_drafts_that_the_verdict_left_shorten_the_turn() -> None:
    drafter = Drafter()
    in_turns(drafter)
    _, (told,) = steps(drafter, *[LIKELY] * 8)
    base, number = (1, 2, 9), told.number
    drafter.hears(replace(verdict(base, 20, 21, acked=number, awaits=4), least_chance=0.3))
    number, (told,) = steps(drafter, *[LIKELY] * 8)
    assert number == 2, "two were there already"
    assert told.tokens == (20, 21)


def test_when_the_target_leaves_the_core_it_drafts_on() -> None:
    drafter = Drafter()
    in_turns(drafter)
    steps(drafter, LIKELY, UNLIKELY, LIKELY)
    drafter.hears(verdict((1, 2, 9), 20, acked=2))
    number, said = steps(drafter, *[LIKELY] * 8)
    assert number == 8, "not even the likely drafts in a row end it"
    assert len(said) == 8, "each is sent as soon as it is made"
