"""Drafters that rest are told nothing, and everything when they wake."""

from dataclasses import replace

from coordinator.text.session import Session
from coordinator.text.session_events import FaultArrived, NodeJoined, Send, VerdictArrived
from proto.codec import decode, encode
from proto.messages import (
    Cause,
    Fault,
    FaultCode,
    Limits,
    Open,
    Role,
    SessionMark,
    Verdict,
)
from proto.tree import SpeculationTree, path_hash
from tests.coordinator.text.test_session import DRAFTER, DRAFTER_OPEN, TARGET, TARGET_OPEN, begun
from tests.texts import name, verdict

LIMITS = Limits(max_len=100, stop_ids=())


def said(session: Session, *base: int, token: int, cause: Cause) -> list[Send]:
    """What the nodes are told after a verdict."""
    message = verdict(base, token, incarnation=TARGET_OPEN, cause=cause)
    return [one for one in session.handle(VerdictArrived(message), 0.1) if isinstance(one, Send)]


def resting() -> Session:
    """A text (1, 2) whose drafter has read 3, and has missed 4 and 5."""
    session = begun(1, 2, limits=LIMITS)
    assert not session.holds_back
    assert said(session, 1, 2, token=3, cause=Cause.RESTING) == []
    assert session.holds_back
    assert said(session, 1, 2, 3, token=4, cause=Cause.RESTING) == []
    assert said(session, 1, 2, 3, 4, token=5, cause=Cause.RESTING) == []
    assert session.holds_back
    return session


def test_the_first_verdict_after_a_rest_has_all_that_was_missed() -> None:
    session = resting()
    (told,) = said(session, 1, 2, 3, 4, 5, token=6, cause=Cause.QUIET)
    assert told.node == DRAFTER
    assert isinstance(told.message, Verdict)
    assert (told.message.base_len, told.message.base_hash) == (3, name(1, 2, 3))
    assert told.message.tokens == (4, 5, 6)
    assert decode(encode(told.message)) == told.message
    assert not session.holds_back
    assert said(session, 1, 2, 3, 4, 5, 6, token=7, cause=Cause.QUIET) == []


def test_a_heartbeat_says_what_a_resting_drafter_should_know() -> None:
    session = resting()
    assert session.mark_for(DRAFTER) == SessionMark(1, DRAFTER_OPEN, 3, name(1, 2, 3))
    assert session.mark_for(TARGET) == SessionMark(1, TARGET_OPEN, 5, name(1, 2, 3, 4, 5))


def test_a_drafter_that_is_told_the_text_meanwhile_is_told_to_rest_again() -> None:
    session = resting()
    lost = FaultArrived(DRAFTER, Fault(1, DRAFTER_OPEN, FaultCode.GAP, "lost"))
    (told,) = session.handle(lost, 0.2)
    assert isinstance(told, Send)
    assert isinstance(told.message, Open)
    assert told.message.tokens == (1, 2, 3, 4, 5)
    assert not session.holds_back, "the next verdict says that it should rest"
    assert said(session, 1, 2, 3, 4, 5, token=6, cause=Cause.RESTING) == []
    assert session.holds_back


def test_after_a_long_rest_a_drafter_finds_a_gap_and_asks() -> None:
    session = begun(1, 2, limits=replace(LIMITS, max_len=10_000))
    said(session, 1, 2, token=3, cause=Cause.RESTING)
    text, hash_ = [1, 2, 3], name(1, 2, 3)
    for token in (number % 90 for number in range(4200)):
        message = verdict((), token, incarnation=TARGET_OPEN, cause=Cause.RESTING)
        message = replace(message, base_len=len(text), base_hash=hash_)
        session.handle(VerdictArrived(message), 0.1)
        text.append(token)
        hash_ = path_hash(hash_, token, session.text.key)
    assert hash_ == name(*text)
    (told,) = said(session, *text, token=6, cause=Cause.QUIET)
    assert isinstance(told.message, Verdict)
    assert len(encode(told.message)) < 1 << 16
    tree = SpeculationTree(session.text.key, (1, 2, 3), max_nodes=8)
    news = tree.news(told.message.base_len, told.message.base_hash, told.message.tokens)
    assert news is not None
    tree.advance(news)
    text.append(6)
    assert tree.news(len(text), name(*text), (7,)) is None, "a gap"


def test_heads_are_told_every_verdict() -> None:
    session = begun(1, 2, limits=LIMITS)
    session.handle(NodeJoined(b"drafter-2", Role.DRAFTER, (-1,)), 0.0)
    message = verdict((1, 2), 3, incarnation=TARGET_OPEN, cause=Cause.RESTING)
    session.handle(VerdictArrived(message), 0.1)
    assert not session.holds_back
