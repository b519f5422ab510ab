"""Arrows from a draft to its verdict and from there to the drafters, and what happened at a moment
(pure)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from coordinator.tracing.events import COORDINATOR_PID, Event, Scale
from coordinator.tracing.hops import Hop
from coordinator.tracing.texts import fate_of, judged
from coordinator.tracing.timeline import Timeline
from proto.messages import Cause, Draft, Fault, Open, Role, Verdict

FALLBACKS = {Cause.LATE, Cause.QUIET, Cause.CHEAP, Cause.RESTING}


def arrows(timeline: Timeline, scale: Scale) -> Iterator[Event]:
    """From each draft to the first verdict that could use it, and from each verdict to the
    drafters."""
    onwards = _onwards(timeline.hops)
    number = 0
    for hop in timeline.hops:
        if hop.is_to_node or hop.sent_ns is None or hop.received_ns is None:
            continue
        name, start = "verdict", (scale.pids[hop.node], hop.sent_ns)
        for on in onwards.get(hop.number, []):
            way = [start, *_along(on, scale)]
            match hop.message:
                case Draft() as draft if draft.session in timeline.texts and on.received_ns:
                    said = judged(draft, on.received_ns, timeline.texts[draft.session])
                    if said is None or said.verdict.sent_ns is None:
                        continue
                    way.append((scale.pids[said.verdict.node], said.verdict.sent_ns))
                    name = "accepted draft" if said.num_accepted else "draft"
                case Verdict() if on.received_ns is not None:
                    pass
                case _:
                    continue
            # Two clocks may disagree by a little.
            if all(a[1] <= b[1] for a, b in pairwise(way)):
                number += 1
                yield from _arrow(way, name, number, scale)


def _onwards(hops: Sequence[Hop]) -> dict[int, list[Hop]]:
    """The hops from the coordinator to nodes, by message."""
    found: dict[int, list[Hop]] = {}
    for hop in hops:
        if hop.is_to_node:
            found.setdefault(hop.number, []).append(hop)
    return found


def _along(hop: Hop, scale: Scale) -> list[tuple[int, int]]:
    """Where a message leaves the coordinator and comes to a node: process and time."""
    points = [] if hop.sent_ns is None else [(COORDINATOR_PID, hop.sent_ns)]
    if hop.received_ns is not None:
        points.append((scale.pids[hop.node], hop.received_ns))
    return points


def _arrow(way: Sequence[tuple[int, int]], name: str, number: int, scale: Scale) -> Iterator[Event]:
    last = len(way) - 1
    for index, (pid, ns) in enumerate(way):
        phase = "s" if index == 0 else "f" if index == last else "t"
        yield scale.flow(phase, pid, name, number, ns)


def instants(timeline: Timeline, scale: Scale) -> Iterator[Event]:
    """Rejections, re-roots, stale drafts and fallbacks of the target; what drafters rolled back."""
    told: set[tuple[int, bytes]] = set()  # the nodes that a text was opened on
    for hop in timeline.hops:
        pid = scale.pids[hop.node]
        text = {"text": scale.texts.get(hop.session, 0)}
        match hop.message:
            case Verdict() as verdict if not hop.is_to_node and hop.sent_ns is not None:
                found: dict[str, dict[str, object]] = {}
                if verdict.rejected:
                    found["rejection"] = {"tokens": len(verdict.rejected)}
                if verdict.num_rolled_back:
                    found["re-root"] = {"rolled_back": verdict.num_rolled_back}
                if verdict.num_stale:
                    found["stale drafts"] = {"tokens": verdict.num_stale}
                if verdict.cause in FALLBACKS:
                    found["fallback"] = {"cause": verdict.cause.name.lower()}
                for name, args in found.items():
                    yield scale.instant(pid, 1, name, "event", hop.sent_ns, {**text, **args})
            case Fault() as fault if hop.received_ns is not None:
                args = {**text, "code": fault.code.value, "detail": fault.detail}
                where = pid if hop.is_to_node else COORDINATOR_PID
                yield scale.instant(where, 1, "fault", "event", hop.received_ns, args)
            case Open() as opened if hop.received_ns is not None:
                if (opened.session, hop.node) in told:
                    args = {**text, "incarnation": opened.incarnation}
                    yield scale.instant(pid, 1, "opened anew", "event", hop.received_ns, args)
                told.add((opened.session, hop.node))
    yield from _rolled_back(timeline, scale)


def _rolled_back(timeline: Timeline, scale: Scale) -> Iterator[Event]:
    """Where a verdict comes to a drafter that had sent drafts which it makes worthless."""
    roles = {one.node: one.role for one in timeline.processes}
    wrong: dict[tuple[int, bytes], list[Hop]] = {}  # drafts, by the verdict against them and node
    for hop in timeline.hops:
        match hop.message:
            case Draft() as draft if not hop.is_to_node and draft.session in timeline.texts:
                fate = fate_of(draft, timeline.texts[draft.session])
                if fate is not None and fate.num_right < len(draft.tokens):
                    wrong.setdefault((fate.decided.number, hop.node), []).append(hop)
    for hop in timeline.hops:
        if not hop.is_to_node or hop.received_ns is None or roles.get(hop.node) != Role.DRAFTER:
            continue
        sent = [one for one in wrong.get((hop.number, hop.node), []) if one.sent_ns is not None]
        before = [one for one in sent if (one.sent_ns or 0) < hop.received_ns]
        if before:
            args = {"text": scale.texts.get(hop.session, 0), "drafts": len(before)}
            pid = scale.pids[hop.node]
            yield scale.instant(pid, 1, "roll back", "event", hop.received_ns, args)
