"""The end of a text that a drafter of another vocabulary knows in bytes: what dies, what is fed."""

from drafter_node.compute import Children
from drafter_node.tail import TextEnd
from engine.layout.slots import SlotMap
from proto.tree import SpeculationTree

KEY = bytes(16)
SAID = {1: b"h", 2: b"e", 3: b"l", 4: b"hel", 5: b"hello", 6: b"lo", 7: b"p", 8: b" "}
MODEL = 0


def follows(said: bytes, token: int) -> bytes | None:
    own = SAID[token]
    if len(own) >= len(said):
        return b"" if own.startswith(said) else None
    return said[len(own) :] if said.startswith(own) else None


class Text:
    """A text of two cached tokens, its tree and its end."""

    def __init__(self) -> None:
        self.tree = SpeculationTree(KEY, [8, 8], max_nodes=64)
        self.slots: SlotMap[int] = SlotMap(200)
        self.slots.feed_prefix([8, 8])
        self.end = TextEnd(self.tree, self.slots, MODEL)

    def drafts(self, parent: int, *tokens: int) -> list[int]:
        return self.tree.grow(parent, tokens, (-1.0,) * len(tokens), MODEL)

    def goes_on(self, tail: list[int], said: bytes) -> list[int]:
        self.end.prune(tail, said, follows)
        return self.end.grow(tail, said, may_be_longer=True)


def test_drafts_that_contradict_the_end_die_and_longer_ones_stay() -> None:
    text = Text()
    whole, part, other = text.drafts(text.tree.root, 5, 4, 7)
    (right,) = text.drafts(part, 6)
    (wrong,) = text.drafts(part, 7)
    text.goes_on([4, 3], b"hell")
    assert {whole, part, right} < set(text.tree.nodes)
    assert not {other, wrong} & set(text.tree.nodes)
    text.tree.check()


def test_children_that_come_too_late_are_compared_with_the_end_too() -> None:
    text = Text()
    (first, last) = text.goes_on([4, 3], b"hell")
    late = Children((3, 6, 7), (-1.0, -2.0, -3.0))
    assert text.end.fitting(first, late).tokens == (3, 6)
    assert text.end.fitting(last, late) == late
    assert text.end.fitting(text.tree.root, Children((5, 7), (-1.0, -1.0))).tokens == (5,)


def test_the_tail_is_fed_with_what_is_expanded_below_it() -> None:
    text = Text()
    (first, last) = text.goes_on([4, 3], b"hell")
    assert [node.key for node in text.end.unfed_above([last])] == [first]
    text.slots.feed((), text.tree.rows_of([text.tree.nodes[first]]))
    assert text.end.unfed_above([last]) == []


def test_what_lies_above_an_end_that_was_not_drafted_is_asked_for_longer_tokens() -> None:
    text = Text()
    (last,) = text.goes_on([4], b"hel")
    root = text.tree.root
    assert text.end.rest_behind(root) == b"hel"
    assert text.slots.prefix_len == 2
    assert text.end.asked_with([last]) == (root, last)
    assert text.slots.prefix_len == 1, "the last committed token is fed once more"
    assert text.end.asked_with([last]) == (last,), "once"


def test_an_end_that_was_drafted_or_has_longer_drafts_beside_it_is_not_asked_again() -> None:
    drafted = Text()
    drafted.drafts(drafted.tree.root, 4)
    (last,) = drafted.goes_on([4], b"hel")
    assert drafted.end.asked_with([last]) == (last,)
    longer = Text()
    longer.drafts(longer.tree.root, 5)
    (last,) = longer.goes_on([4], b"hel")
    assert longer.end.asked_with([last]) == (last,)


def test_a_node_of_the_tail_that_is_asked_again_leaves_the_cache() -> None:
    text = Text()
    (first,) = text.drafts(text.tree.root, 4)
    text.slots.feed((), text.tree.rows_of([text.tree.nodes[first]]))
    (_, last) = text.goes_on([4, 3], b"hell")
    assert first in text.slots
    assert text.end.asked_with([last]) == (first, last)
    assert first not in text.slots
    assert [node.key for node in text.end.unfed_above((first, last))] == [first]
