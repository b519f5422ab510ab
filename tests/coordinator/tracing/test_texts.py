"""What became of a draft: when it was decided, and which verdict could use it."""

from dataclasses import replace

from coordinator.tracing.spans import Fate, Hop, Judged, fate_of, judged, texts_of
from proto.messages import Draft, Message, Open, Verdict
from tests.coordinator.tracing.recordings import DRAFT, OPEN, PROMPT, TARGET, VERDICT, name_of

TEXT = (*PROMPT, 7, 9, 4, 3)


def hop(number: int, message: Message, sent_ns: int) -> Hop:
    """On its way to the target, or from it."""
    is_to_node = isinstance(message, Open)
    kind = type(message).__name__
    return Hop(number, kind, TARGET, is_to_node, 9, message, sent_ns, sent_ns + 1)


def verdict(base_len: int, *tokens: int, num_accepted: int = 0) -> Verdict:
    return replace(
        VERDICT,
        base_len=base_len,
        tokens=tokens,
        num_drafted=num_accepted,
        num_accepted=num_accepted,
        rejected=(),
    )


FIRST = hop(2, verdict(2, 7, 9, num_accepted=1), 100)
SECOND = hop(3, verdict(4, 4, 3, num_accepted=1), 200)
HOPS = [hop(1, OPEN, 0), FIRST, SECOND]
(KNOWN,) = texts_of(HOPS).values()


def draft(parent_len: int, *tokens: int, parents: tuple[int, ...] = ()) -> Draft:
    """Drafts after the first so many tokens of the text."""
    return replace(
        DRAFT,
        parent_len=parent_len,
        parent_hash=name_of(TEXT[:parent_len]),
        tokens=tokens,
        parents=parents or tuple(range(-1, len(tokens) - 1)),
        scores=(-0.1,) * len(tokens),
    )


def test_a_text_grows_by_its_verdicts_and_by_what_is_new_in_them() -> None:
    assert tuple(KNOWN.tokens) == TEXT
    assert (KNOWN.decided, KNOWN.verdicts) == ([2, 4], [FIRST, SECOND])
    again = hop(4, verdict(2, 7, 9, 4, 3, 8), 300)  # told anew, it repeats
    beyond = hop(5, verdict(90, 1), 400)  # what is between is not known
    reopened = hop(6, replace(OPEN, incarnation=5, tokens=(*TEXT, 8, 1)), 500)
    (text,) = texts_of([*HOPS, HOPS[1], again, beyond, reopened]).values()
    assert tuple(text.tokens) == (*TEXT, 8, 1)
    assert text.verdicts == [FIRST, SECOND, again]


def test_a_draft_is_decided_by_the_verdict_that_passes_its_parent() -> None:
    assert fate_of(draft(2, 7, 8), KNOWN) == Fate(FIRST, 1)
    assert fate_of(draft(3, 9, 4, 3), KNOWN) == Fate(FIRST, 3)
    assert fate_of(draft(4, 1, 4, 3, parents=(-1, -1, 1)), KNOWN) == Fate(SECOND, 2)
    assert fate_of(replace(draft(4, 4), parent_hash=1), KNOWN) == Fate(SECOND, 0)
    assert fate_of(draft(6, 1), KNOWN) is None
    assert fate_of(draft(1, 6), KNOWN) is None


def test_a_draft_is_judged_by_the_first_verdict_that_could_use_it() -> None:
    assert judged(draft(2, 7, 8), 50, KNOWN) == Judged(FIRST, 1)
    # Read after the first verdict: what it says about the text beyond that may be used still.
    assert judged(draft(2, 7, 9, 4), 150, KNOWN) == Judged(SECOND, 1)
    assert judged(draft(2, 7, 1, 5), 150, KNOWN) == Judged(SECOND, 0)
    assert judged(draft(2, 7, 9), 150, KNOWN) is None  # it came too late
    assert judged(draft(4, 4), 250, KNOWN) is None  # there was none any more
