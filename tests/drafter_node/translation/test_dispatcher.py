"""A drafter with other tokens than its target, from message to message."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from drafter_node.compute import Action, Compute
from drafter_node.scheduling import Schedule
from drafter_node.translation.dispatcher import TranslatingDispatcher
from drafter_node.translation.text import Languages
from node.dispatcher import Dispatcher
from node.events import Send, gap
from proto.messages import Draft, Limits, Open, Rule
from tests.drafter_node.drafter import Drafter, part_of
from tests.simulation.languages import END
from tests.texts import SYNC_4, name, opening, verdict
from tests.words import ToyWords

AB, AB_DASH, CD, EOS = range(4)
TARGET = ToyWords(("ab", "ab-", "cd"), (END,))
LIMITS = Limits(max_len=40, stop_ids=(EOS,))


class Translating(Drafter):
    """A drafter that has all letters of the target's tokens, and these longer strings."""

    def __init__(self, *longer: str, begins: bool = True) -> None:
        super().__init__()
        strings = ("a", "b", "c", "d", "-", *longer)
        starts = (len(strings) + 1,) if begins else ()
        self.words = ToyWords(strings, (END, "<b>"), starts)
        languages = Languages(self.words, TARGET, (len(strings),))
        self.known = replace(self.known, is_translated=True)
        inner: Dispatcher = Dispatcher(self.lanes, Schedule(self.lanes, self.known, num_per_pass=1))
        self.dispatcher = TranslatingDispatcher(inner, languages, self.known.max_len)  # type: ignore[assignment]

    def writes(self, *strings: str) -> list[Draft]:
        """Run the model once for each of these strings; returns the drafts that were sent."""
        return self.drafts(*(self.words.read(string.encode())[0][0] for string in strings))

    def finishes(self, string: str) -> Draft:
        """Let the model say this over and over; returns the draft that says that no more come."""
        ((token, *_), _) = self.words.read(string.encode())
        while not (sent := said(actions := self.ticks())):
            (compute,) = actions
            assert isinstance(compute, Compute)
            self.proposes(compute.ticket, token)
        return sent[-1]

    def reads(self, actions: Sequence[Action]) -> str:
        """What the only forward that starts is given."""
        return "".join(self.words.bytes_of[one].decode() for one in part_of(actions).feed.tokens)  # type: ignore[union-attr]


def text(*tokens: int) -> Open:
    """Open of a text of the target."""
    return opening(*tokens, limits=LIMITS)


def said(actions: Sequence[Action]) -> list[Draft]:
    """The drafts among these actions."""
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Draft)]


def test_drafts_are_said_in_the_targets_tokens_as_soon_as_they_are_whole() -> None:
    drafter = Translating()
    drafter.hears(text(AB))
    sent = drafter.writes("a", "b", "c", "d", "a", "b")
    # The first one might become AB_DASH until it is clear how it goes on.
    assert [one.tokens for one in sent] == [(), (), (), (AB,), (), (CD,)]
    assert [one.parent_len for one in sent if one.tokens] == [1, 2]


def test_a_node_that_ends_within_what_is_known_by_now_is_not_drafted_on() -> None:
    drafter = Translating("cd")
    drafter.hears(text(AB))
    drafter.writes("c")
    drafter.hears(verdict((AB,), CD))
    assert drafter.reads(drafter.ticks()) == "cd"
    assert {node.token for node in drafter.machine.tree.nodes.values()} == {0, 1, 5}


def test_what_a_forward_says_behind_a_token_that_is_followed_by_now_is_dropped() -> None:
    drafter = Translating("cd")
    drafter.hears(text(AB))
    (compute,) = drafter.ticks()
    assert isinstance(compute, Compute)
    drafter.hears(verdict((AB,), CD))
    drafter.proposes(compute.ticket, 2)
    assert {node.token for node in drafter.machine.tree.nodes.values()} == {0, 1, 5}


def test_the_end_of_a_text_is_not_said_behind_what_the_target_cannot_say() -> None:
    drafter = Translating()
    drafter.hears(text(CD))
    assert [one.tokens for one in drafter.writes("a", "b", "-", END)][-1] == (AB_DASH, EOS)
    # The target has chosen another token that begins alike; none begins with the dash.
    drafter.hears(verdict((CD,), AB))
    assert EOS not in drafter.finishes("a").tokens


def test_no_draft_is_further_ahead_than_the_targets_window() -> None:
    drafter = Translating("abcd")
    drafter.hears(text(AB))
    sent = [one for action in drafter.writes(*["abcd"] * 4) for one in action.tokens]
    assert sent == [AB, CD, AB, CD]
    assert SYNC_4.window == 4


def test_a_token_that_was_settled_too_early_is_noticed_and_leaves_the_text_as_it_was() -> None:
    drafter = Translating("abc", begins=False)
    drafter.hears(text(AB))
    for said_again in (1, 2):
        assert drafter.hears(verdict((AB,), CD)) == [gap(1, 1, 1)], said_again
        (mark,) = drafter.dispatcher.marks
        assert (mark.length, mark.path_hash) == (1, name(AB))
    drafter.hears(replace(text(AB, CD), incarnation=2))
    assert [one.parent_len for one in drafter.writes(*"cdcd") if one.tokens] == [2]


def test_that_no_more_drafts_come_is_said_once_for_every_text_and_not_more_often() -> None:
    drafter = Translating()
    drafter.hears(text(AB))
    assert drafter.finishes("a").done
    told = verdict((AB,), CD, acked=40)
    drafter.hears(told)
    assert drafter.finishes("a").done
    drafter.hears(told)
    assert drafter.is_idle()


def test_a_choice_is_placed_where_the_target_makes_it() -> None:
    drafter = Translating()
    drafter.hears(text(AB))
    drafter.writes("c", "d", "a")
    (place,) = part_of(drafter.ticks()).places
    assert (place.position, place.begun) == (1, b"cd")


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_of_a_text_under_a_classical_rule_it_says_at_once_that_it_drafts_nothing(
    rule: Rule,
) -> None:
    drafter = Translating()
    drafter.hears(replace(text(AB, CD), rule=rule))
    (told,) = said(drafter.ticks())
    assert (told.done, told.tokens, told.proposals) == (True, (), ())
