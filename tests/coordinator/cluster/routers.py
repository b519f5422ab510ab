"""Routers with nodes and texts, and what they say to them, for tests."""

from dataclasses import replace
from typing import Any

from coordinator.cluster.router_events import (
    Action,
    Arrived,
    Send,
    TextSubmitted,
)
from coordinator.cluster.routing import Router
from coordinator.text.session import Session
from coordinator.text.session_events import NodeId
from coordinator.text.timed_session import TimedSession
from proto.codec import encode
from proto.messages import (
    Close,
    Draft,
    Heartbeat,
    Limits,
    Message,
    Open,
    Policy,
    Role,
    Rule,
    SamplingSpec,
    SessionMark,
)
from tests.coordinator.test_behaviours import hello
from tests.texts import KEY, LIMITS, SYNC_4, verdict

TARGET, FIRST, SECOND = b"target-1", b"drafter-1", b"drafter-2"
SAMPLED = SamplingSpec(temperature=1.0)
NUM_IDS = 128  # logits of the target


def router_of(*drafters: NodeId, num_lanes: int = 8, **options: Any) -> Router:
    """A router whose target, with so many lanes, and drafters are ready."""
    router = Router("secret", **options)
    join(router, TARGET, Role.TARGET, num_lanes=num_lanes)
    for node in drafters:
        join(router, node, Role.DRAFTER)
    return router


def join(
    router: Router, node: NodeId, role: Role, now: float = 0.0, *, num_lanes: int = 8
) -> list[Action]:
    """A process is started and introduces itself."""
    router.registry.expect(role, node, now)
    return router.handle(Arrived(node, hello(role, num_lanes=num_lanes)), now)


def text(
    session: int = 1,
    *,
    policy: Policy = SYNC_4,
    rule: Rule = Rule.COUPLED,
    limits: Limits = LIMITS,
    submitted: float = 0.0,
) -> TimedSession:
    """The prompt (1, 2), of which nobody has been told."""
    sampling = SamplingSpec() if rule is Rule.COUPLED else SAMPLED
    machine = Session(
        session, KEY, (1, 2), sampling=sampling, policy=policy, limits=limits, rule=rule
    )
    return TimedSession(machine, submitted)


def begun(router: Router, timed: TimedSession) -> TimedSession:
    """The text, which the nodes have been told."""
    router.handle(TextSubmitted(timed), 0.0)
    return timed


def opened(
    node: NodeId, *tokens: int, session: int = 1, incarnation: int, **changes: Any
) -> Action:
    """A node is told the text."""
    sampling = SAMPLED if changes.get("rule", Rule.COUPLED) is not Rule.COUPLED else SamplingSpec()
    message = Open(session, incarnation, KEY, tokens, 2, sampling, SYNC_4, LIMITS, num_ids=NUM_IDS)
    return Send(node, encode(replace(message, **changes)))


def closed(node: NodeId, reason: str, session: int = 1) -> Action:
    """A node is told that the text is over."""
    return Send(node, encode(Close(session, reason)))


def beat(node: NodeId, *marks: SessionMark) -> Action:
    """A node is told how far its texts are."""
    return Send(node, encode(Heartbeat(marks, 0, "")))


def said(*tokens: int, session: int = 1) -> Message:
    """The target goes on with the prompt."""
    return replace(verdict((1, 2), *tokens, incarnation=1), session=session)


def forwarded(
    router: Router, node: NodeId, message: Message, now: float = 0.0
) -> tuple[NodeId, ...]:
    """To whom a message of a node goes on; a draft is of the node's own life and source."""
    if isinstance(message, Draft):
        message = own(router, node, message)
    return router.forward(node, type(message), encode(message), now) or ()


def own(router: Router, node: NodeId, message: Draft) -> Draft:
    """The draft as a drafter of the text sends it, with its own incarnation and source."""
    for text in router.open_texts:
        machine, sender = text.timed.machine, router.registry.find(node)
        if machine.session == message.session and sender and node in text.drafters:
            incarnation = machine.mark_for(node).incarnation
            return replace(message, incarnation=incarnation, source=sender.source)
    return message
