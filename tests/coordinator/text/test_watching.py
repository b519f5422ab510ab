"""When both devices computed, made from the messages of a text that is watched."""

from dataclasses import replace

from coordinator.text.session import Session
from coordinator.text.session_events import DraftArrived, Emit, Started, VerdictArrived
from coordinator.text.watching import DeviceSpan, DraftSpan, PassSpan
from tests.texts import KEY, LIMITS, SPEC, SYNC_4, draft, verdict

PROMPT = (1, 2)


def watched(*, is_watched: bool = True) -> Session:
    """A text that begins at time 10."""
    session = Session(
        1, KEY, PROMPT, sampling=SPEC, policy=SYNC_4, limits=LIMITS, is_watched=is_watched
    )
    session.handle(Started(), 10.0)
    return session


def drafted(
    session: Session, parent: tuple[int, ...], *tokens: int, now: float, ms: int, num_steps: int = 1
) -> None:
    """The drafter says a chain below a path, after so many milliseconds in its model."""
    said = draft(parent, *tokens, model_us=ms * 1000, num_steps=num_steps)
    session.handle(DraftArrived(said), now)


def spans(
    session: Session, base: tuple[int, ...], *tokens: int, now: float, **values: int
) -> tuple[DeviceSpan, ...]:
    """The spans that come with the next verdict."""
    said = verdict(base, *tokens, incarnation=1, **values)
    (emit,) = session.handle(VerdictArrived(replace(said, model_us=4000, host_us=1000)), now)
    assert isinstance(emit, Emit)
    return emit.spans


def near(one: DeviceSpan) -> DeviceSpan:
    """The span without the rounding of differences."""
    return replace(one, begin_s=round(one.begin_s, 6), end_s=round(one.end_s, 6))


def test_spans_end_when_their_messages_came_and_last_as_long_as_they_say() -> None:
    session = watched()
    drafted(session, PROMPT, 3, 4, now=10.010, ms=6, num_steps=2)
    step, done = spans(session, PROMPT, 3, 4, 5, now=10.020, num_drafted=2, num_accepted=2)
    assert near(step) == DraftSpan(
        1, 0.004, 0.010, num_steps=2, num_tokens=2, depth=2, position=0, source=0
    )
    assert isinstance(done, PassSpan)
    assert (round(done.begin_s, 6), round(done.end_s, 6)) == (0.015, 0.020)
    assert (done.num_drafted, done.num_accepted, done.num_tokens) == (2, 2, 3)
    assert done.decided == ((1, 2),)


def test_spans_of_one_device_never_overlap() -> None:
    session = watched()
    drafted(session, PROMPT, 3, now=10.010, ms=4)
    drafted(session, (*PROMPT, 3), 4, now=10.012, ms=4)
    first, second, done = spans(session, PROMPT, 3, now=10.013)
    (again,) = spans(session, (*PROMPT, 3), 4, now=10.015)
    assert (near(first).end_s, near(second).begin_s) == (0.010, 0.010)
    assert near(again).begin_s == near(done).end_s == 0.013


def test_a_draft_is_decided_at_its_first_wrong_token_or_when_all_are_written() -> None:
    session = watched()
    drafted(session, PROMPT, 3, 4, 5, now=10.01, ms=1)  # right for two tokens, and then wrong
    drafted(session, (*PROMPT, 3, 4, 5), 6, now=10.02, ms=1)  # below a path that will not be
    first = spans(session, PROMPT, 3, now=10.03)[-1]
    second = spans(session, (*PROMPT, 3), 4, 9, 8, now=10.04)[-1]
    assert isinstance(first, PassSpan)
    assert isinstance(second, PassSpan)
    assert first.decided == ()
    assert second.decided == ((1, 2), (2, 0))


def test_a_roll_back_is_when_drafts_died_and_none_leads_on() -> None:
    session = watched()
    drafted(session, PROMPT, 3, 4, 5, now=10.01, ms=1)
    on = spans(session, PROMPT, 3, 4, now=10.02)[-1]  # the drafts lead on to 5
    back = spans(session, (*PROMPT, 3, 4), 9, now=10.03)[-1]
    alone = spans(session, (*PROMPT, 3, 4, 9), 8, now=10.04)[-1]  # there were no drafts to lose
    drafted(session, (*PROMPT, 3, 4, 9, 8), 5, now=10.05, ms=1)
    bonus = spans(session, (*PROMPT, 3, 4, 9, 8), 5, 6, now=10.06)[-1]  # all were right
    found = [isinstance(one, PassSpan) and one.is_roll_back for one in (on, back, alone, bonus)]
    assert found == [False, True, False, False]


def test_a_late_draft_below_one_that_died_is_no_second_roll_back() -> None:
    session = watched()
    drafted(session, PROMPT, 3, 4, now=10.01, ms=1)
    back = spans(session, PROMPT, 9, now=10.02)[-1]
    drafted(session, (*PROMPT, 3, 4), 5, now=10.03, ms=1)  # it was on its way
    alone = [
        spans(session, (*PROMPT, 9, *range(20, 20 + at)), 20 + at, now=10.04 + at)[-1]
        for at in range(3)
    ]
    found = [isinstance(one, PassSpan) and one.is_roll_back for one in (back, *alone)]
    assert found == [True, False, False, False]
    decided = [one.decided for one in alone if isinstance(one, PassSpan)]
    assert decided == [(), ((2, 0),), ()]


def test_a_draft_that_is_said_again_was_no_work() -> None:
    session = watched()
    drafted(session, PROMPT, 3, now=10.01, ms=0, num_steps=0)
    (only,) = spans(session, PROMPT, 3, now=10.02)
    assert isinstance(only, PassSpan)


def test_a_text_that_is_not_watched_tells_nothing() -> None:
    session = watched(is_watched=False)
    drafted(session, PROMPT, 3, now=10.01, ms=1)
    assert spans(session, PROMPT, 3, now=10.02) == ()
