"""Mistakes of the router that the simulator must catch."""

from collections.abc import Callable
from typing import Any

from coordinator.cluster import routing
from coordinator.cluster.node import Node
from coordinator.cluster.open_text import SessionNodes
from coordinator.cluster.registry import Registry
from coordinator.cluster.routing import Router
from coordinator.text.session_events import NodeId
from proto import codec
from proto.messages import MODEL_SOURCE, Role
from tests.simulation.faults import Fault, Patch


def of_the_first_text(router: Router) -> Callable[[bytes, int], list[int]]:
    """Reads every frame as one of the first open text, and its sender's life of that."""

    def head_of(frame: bytes, number: int) -> list[int]:
        session = next(iter(router.sessions), 0)
        return [session, *codec.head_of(frame, number)[1:]]

    return head_of


def a_draft_reaches_the_wrong_text(patch: Patch) -> None:
    forward = Router.forward

    def of_any_text(self: Router, node_id: NodeId, *what: Any) -> tuple[NodeId, ...]:
        with Patch.context() as inner:
            inner.setattr(routing, "head_of", of_the_first_text(self))
            return forward(self, node_id, *what)

    patch.setattr(Router, "forward", of_any_text)


def a_draft_reaches_a_node_that_does_not_have_its_text(patch: Patch) -> None:
    forward = Router.forward

    def everybody(self: Router, node_id: NodeId, *what: Any) -> tuple[NodeId, ...]:
        if not forward(self, node_id, *what):
            return ()
        return tuple(node.id for node in self.registry.nodes if node.id != node_id)

    patch.setattr(Router, "forward", everybody)


def a_source_number_is_used_twice(patch: Patch) -> None:
    patch.setattr(Registry, "free_source", lambda self, node, known: MODEL_SOURCE)


def a_source_number_is_free_again_while_its_text_goes_on(patch: Patch) -> None:
    free_source = Registry.free_source

    def forgetful(self: Registry, node: Node, known: Any) -> int | None:
        return free_source(self, node, ())

    patch.setattr(Registry, "free_source", forgetful)


def two_drafters_feed_a_text_under_a_classical_rule(patch: Patch) -> None:
    def always(self: Any, role: Role) -> bool:
        has_drafter = self.timed.machine.policy.has_drafter
        return has_drafter if role is Role.DRAFTER else not self.targets

    patch.setattr(SessionNodes, "has_room_for", always)


def a_lost_drafter_is_still_sent_verdicts(patch: Patch) -> None:
    patch.setattr(Router, "_lost", lambda self, node, now, but=0: None)


def a_text_that_waits_is_forgotten(patch: Patch) -> None:
    handle = Router.handle

    def once(self: Router, event: Any, now: float) -> Any:
        num_open = self._max_num_seqs
        if not isinstance(event, routing.TextSubmitted):
            self._max_num_seqs = 0
        try:
            return handle(self, event, now)
        finally:
            self._max_num_seqs = num_open

    patch.setattr(Router, "handle", once)


def a_text_is_open_at_two_targets(patch: Patch) -> None:
    def always(self: Any, role: Role) -> bool:
        return role is Role.TARGET or self.timed.machine.policy.has_drafter

    patch.setattr(SessionNodes, "has_room_for", always)
    patch.setattr(routing, "check", lambda texts, nodes: None)


def a_lost_targets_verdict_is_applied(patch: Patch) -> None:
    works_on = routing.works_on

    def or_has(texts: Any, session: int, node: Node) -> bool:
        is_target = node.role is Role.TARGET
        return works_on(texts, session, node) or (is_target and session in texts)

    patch.setattr(routing, "works_on", or_has)


def a_text_that_keeps_its_bits_moves_anyway(patch: Patch) -> None:
    patch.setattr(SessionNodes, "may_go_on_at", lambda self, target: True)


ROUTING_FAULTS = (
    Fault(a_draft_reaches_the_wrong_text, "a (Draft|Verdict) reaches a text that is not its own"),
    Fault(a_draft_reaches_a_node_that_does_not_have_its_text, "reaches a node that"),
    Fault(a_source_number_is_used_twice, "a source number is used twice"),
    Fault(
        a_source_number_is_free_again_while_its_text_goes_on,
        "a source number is used twice",
    ),
    Fault(
        two_drafters_feed_a_text_under_a_classical_rule,
        "two drafters feed a classical text",
    ),
    Fault(a_lost_drafter_is_still_sent_verdicts, "reaches a node that is gone"),
    Fault(a_text_that_waits_is_forgotten, "a text waits for nothing"),
    Fault(a_text_is_open_at_two_targets, "a text is told to two targets"),
    Fault(a_lost_targets_verdict_is_applied, "the verdict of a lost target is applied"),
    Fault(a_text_that_keeps_its_bits_moves_anyway, "a text goes on with other bits"),
)
