"""Mistakes that only a drafter with other tokens than its target shows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from drafter_node.drafting import Drafting
from drafter_node.tail import TextEnd
from drafter_node.translation.dispatcher import TranslatingDispatcher
from drafter_node.translation.text import Tail, Translation
from proto.messages import Draft, Verdict
from proto.tree import Node, SpeculationTree
from tests.simulation.faults import NO_SPEED, Fault, Patch

NOT_READ = "reads the text as its tokenizer does not"
NOT_MEANT = "drafts what its model does not say"


def the_tail_is_not_taken_back_when_the_text_contradicts_it(patch: Patch) -> None:
    patch.setattr(SpeculationTree, "prune", lambda self, tail, said, follows: None)


def the_tail_stays_as_it_was_when_the_text_was_opened(patch: Patch) -> None:
    on_verdict = TranslatingDispatcher._on_verdict

    def stale(self: TranslatingDispatcher, message: Verdict, now: float) -> Any:
        with Patch.context() as inner:
            inner.setattr(Drafting, "go_on", lambda self, *_, **__: ())
            return on_verdict(self, message, now)

    patch.setattr(TranslatingDispatcher, "_on_verdict", stale)


def a_tail_is_drafted_as_if_it_followed_the_text(patch: Patch) -> None:
    spoken = Translation._spoken

    def behind(self: Translation, tokens: Sequence[int]) -> Any:
        tail, self.tail = self.tail, Tail((), b"")
        found = spoken(self, tokens)
        self.tail = tail
        return found

    patch.setattr(Translation, "_spoken", behind)


def every_token_is_said_before_it_is_known_whether_it_is_whole(patch: Patch) -> None:
    say = Translation._say

    def early(self: Translation, path: Sequence[Node], *, is_last: bool) -> list[int]:
        del is_last
        return say(self, path, is_last=True)

    patch.setattr(Translation, "_say", early)


def the_end_is_never_said_again_after_a_verdict(patch: Patch) -> None:
    go_on = Drafting.go_on

    def silent(self: Drafting, *end: Any, **more: Any) -> Any:
        said_done = self._said_done
        actions = go_on(self, *end, **more)
        self._said_done = self.tree.root if said_done else 0
        return actions

    patch.setattr(Drafting, "go_on", silent)


def a_token_that_was_settled_too_early_is_not_noticed(patch: Patch) -> None:
    def careless(self: Translation) -> list[tuple[int, int]]:
        start = self._num_settled
        ids, ends = self._languages.own.read(bytes(self._text[start:]))
        return [(id_, start + end) for id_, end in zip(ids, ends, strict=True)]

    patch.setattr(Translation, "_unsettled_tokens", careless)


def drafts_that_were_lost_are_said_again_without_those_before_them(patch: Patch) -> None:
    draft = Translation.draft

    def only_new(self: Translation, message: Draft, tree: SpeculationTree) -> Draft:
        said = draft(self, replace(message, first_number=2), tree)
        return replace(said, first_number=message.first_number)

    patch.setattr(Translation, "draft", only_new)


def a_place_is_counted_from_the_beginning_of_the_tail(patch: Patch) -> None:
    place = Translation.place

    def shifted(self: Translation, tokens: Sequence[int]) -> Any:
        found = place(self, tokens)
        return replace(found, position=found.position + len(self.tail.tokens))

    patch.setattr(Translation, "place", shifted)


def what_is_certain_is_fed_without_what_is_above_it(patch: Patch) -> None:
    unfed: Callable[[TextEnd, Sequence[int]], list[Node]] = TextEnd.unfed_above
    patch.setattr(TextEnd, "unfed_above", lambda self, keys: unfed(self, keys)[1:])


def what_is_known_already_is_drafted_too(patch: Patch) -> None:
    patch.setattr(TextEnd, "fitting", lambda self, parent, chosen: chosen)


BEYOND = "a choice is placed beyond what is said"

TRANSLATION_FAULTS = (
    Fault(the_tail_is_not_taken_back_when_the_text_contradicts_it, BEYOND),
    Fault(the_tail_stays_as_it_was_when_the_text_was_opened, f"{BEYOND}|KeyError"),
    Fault(a_tail_is_drafted_as_if_it_followed_the_text, f"{BEYOND}|too many rows"),
    Fault(every_token_is_said_before_it_is_known_whether_it_is_whole, NOT_MEANT),
    Fault(the_end_is_never_said_again_after_a_verdict, NO_SPEED, oracle=True),
    Fault(a_token_that_was_settled_too_early_is_not_noticed, NOT_READ),
    Fault(
        drafts_that_were_lost_are_said_again_without_those_before_them,
        NO_SPEED,
        oracle=True,
    ),
    Fault(a_place_is_counted_from_the_beginning_of_the_tail, BEYOND),
    Fault(what_is_certain_is_fed_without_what_is_above_it, "KeyError"),
    Fault(what_is_known_already_is_drafted_too, BEYOND),
)
