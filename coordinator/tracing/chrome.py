"""Converts a timeline to a Chrome trace, which Perfetto and chrome://tracing open (pure).

The format is the Trace Event Format: `X` is a span, `i` an instant. `s`, `t` and `f` are the start,
the middle points and the end of an arrow; each belongs to the span around it. `M` names a track.
Times are microseconds from the first record, in steps of an eighth: such numbers and their sums are
exact in the floating-point numbers that viewers use. With other steps, `ts + dur` of a span can be
more than the `ts` of the span that follows it, and a viewer draws the one inside the other.

Each process is one track: waiting is left blank, and all other phases are spans inside forwards or
between them. Where a device computed and the host was free, forwards are on a second track, from
their launch to their end, and the host's work in that time is on the first track.

Each direction of a link is one track. A message is a span that ends when the message is read, or
when the next message is sent, if that is earlier; `read_us` says in any case when it was read.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coordinator.tracing.spans import Forward, Hop, RecordedText, Span, fate_of, judged
from coordinator.tracing.timeline import COORDINATOR, Process, Timeline
from proto.messages import Cause, Draft, Fault, Open, Role, Verdict
from proto.stopwatch import Phase

# -- events ----------------------------------------------------------------------------------------

# Makes the events of a Chrome trace, with their times and process ids.

Event = dict[str, Any]

COORDINATOR_PID, LINKS_PID = 1, 1000
HOST_TID, DEVICE_TID = 1, 2  # thread ids of a process's two tracks


STEP_NS, STEPS_PER_US = 125, 8  # times in the file are whole steps


def round_us(ns: int) -> float:
    """Return nanoseconds as microseconds, rounded to an eighth; a later time is never smaller."""
    return (ns + STEP_NS // 2) // STEP_NS / STEPS_PER_US


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts recorded times, nodes and sessions to the times and numbers in the file.

    start_ns  the time that is zero in the file
    pids      process ids in the file, by node
    texts     numbers of the texts from 1, by session
    """

    start_ns: int
    pids: Mapping[bytes, int]
    texts: Mapping[int, int]

    @classmethod
    def of(cls, timeline: Timeline) -> "Scale":
        """Return the scale of a timeline: time zero is the first record or message."""
        times = [one.track.recorded[0][0] for one in timeline.processes if one.track.recorded]
        times += [of.start_ns for one in timeline.processes for of in one.track.forwards]
        ends = [ns for hop in timeline.hops for ns in (hop.sent_ns, hop.received_ns)]
        times += [ns for ns in ends if ns is not None]
        pids = {one.node: COORDINATOR_PID + n for n, one in enumerate(timeline.processes)}
        texts = {session: n for n, session in enumerate(timeline.texts, 1)}
        return cls(min(times, default=0), pids, texts)

    def us(self, ns: int) -> float:
        """Return a time (nanoseconds) as microseconds since the file's zero."""
        return round_us(ns - self.start_ns)

    def span(
        self,
        pid: int,
        tid: int,
        name: str,
        category: str,
        start_ns: int,
        end_ns: int,
        args: Mapping[str, Any] | None = None,
    ) -> Event:
        """Return the event of a span (`X`) from `start_ns` to `end_ns`."""
        event: Event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category}
        start_us = self.us(start_ns)
        event |= {"ts": start_us, "dur": self.us(end_ns) - start_us}
        return event if args is None else event | {"args": args}

    def instant(
        self, pid: int, tid: int, name: str, category: str, ns: int, args: Mapping[str, Any]
    ) -> Event:
        """Return the event of an instant (`i`) at time `ns`."""
        event: Event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name}
        return event | {"cat": category, "ts": self.us(ns), "args": args}

    def flow(self, phase: str, pid: int, name: str, number: int, ns: int) -> Event:
        """Return the event of one point of arrow `number`, in the span of this process around `ns`.

        phase  "s": the arrow's start, "t": a middle point, "f": its end
        """
        event: Event = {"ph": phase, "id": number, "pid": pid, "tid": HOST_TID, "name": name}
        event |= {"cat": "flow", "ts": self.us(ns)}
        return event | {"bp": "e"} if phase == "f" else event


def of_verdicts(hops: Sequence[Hop], process: Process) -> dict[int, list[Hop]]:
    """Return the verdicts of each pass of a target, by the time at which the pass ended."""
    ends = [forward.end_ns for forward in process.track.forwards]
    found: dict[int, list[Hop]] = {}
    for hop in hops:
        is_own = hop.node == process.node and not hop.is_to_node
        if is_own and isinstance(hop.message, Verdict) and hop.sent_ns is not None:
            after = bisect_right(ends, hop.sent_ns)
            if after:
                found.setdefault(ends[after - 1], []).append(hop)
    return found


# -- arrows ----------------------------------------------------------------------------------------

# Arrows from a draft to its verdict and from a verdict to the drafters; and instants (pure).

FALLBACKS = {Cause.LATE, Cause.QUIET, Cause.CHEAP, Cause.RESTING}


def arrows(timeline: Timeline, scale: Scale) -> Iterator[Event]:
    """Yield arrows of drafts, to the first verdict that could use them, and of verdicts."""
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
            # Leave out an arrow that would go back in time because two clocks disagree.
            if all(a[1] <= b[1] for a, b in pairwise(way)):
                number += 1
                yield from _arrow(way, name, number, scale)


def _onwards(hops: Sequence[Hop]) -> dict[int, list[Hop]]:
    """Return the hops from the coordinator to nodes, by message number."""
    found: dict[int, list[Hop]] = {}
    for hop in hops:
        if hop.is_to_node:
            found.setdefault(hop.number, []).append(hop)
    return found


def _along(hop: Hop, scale: Scale) -> list[tuple[int, int]]:
    """Return (process id, ns) where a message to a node was sent and received, where known."""
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
    """Yield instants: rejections, re-roots, stale drafts, fallbacks, faults, rollbacks."""
    told: set[tuple[int, bytes]] = set()  # (session, node) that were sent an Open
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
                    yield scale.instant(pid, HOST_TID, name, "event", hop.sent_ns, {**text, **args})
            case Fault() as fault if hop.received_ns is not None:
                args = {**text, "code": fault.code.value, "detail": fault.detail}
                where = pid if hop.is_to_node else COORDINATOR_PID
                yield scale.instant(where, HOST_TID, "fault", "event", hop.received_ns, args)
            case Open() as opened if hop.received_ns is not None:
                if (opened.session, hop.node) in told:
                    args = {**text, "incarnation": opened.incarnation}
                    yield scale.instant(
                        pid, HOST_TID, "opened anew", "event", hop.received_ns, args
                    )
                told.add((opened.session, hop.node))
    yield from _rolled_back(timeline, scale)


def _rolled_back(timeline: Timeline, scale: Scale) -> Iterator[Event]:
    """Yield an instant where a verdict reaches a drafter that had sent drafts which it rejects."""
    roles = {one.node: one.role for one in timeline.processes}
    wrong: dict[tuple[int, bytes], list[Hop]] = {}  # wrong drafts by (verdict, node)
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
            yield scale.instant(pid, HOST_TID, "roll back", "event", hop.received_ns, args)


# -- chrome ----------------------------------------------------------------------------------------

FORMAT, VERSION = "slipstream trace", 3
# The order of the tracks from top to bottom; the links are below the drafters.
ORDER = {Role.DRAFTER.value: 0, Role.TARGET.value: 200, COORDINATOR: 300}
LINKS_ORDER = 100
NAMES = {
    Phase.DECODE: ("read", "codec"),
    Phase.DECIDE: ("decide", "decide"),
    Phase.PREPARE: ("prepare", "prepare"),
    Phase.MODEL: ("model", "model"),
    Phase.CHOOSE: ("sampling", "sampling"),
    Phase.MOVE: ("move cache rows", "move"),
    Phase.SEND: ("send", "codec"),
}
FORWARDS = {Role.TARGET.value: "pass", Role.DRAFTER.value: "draft step"}


def chrome_trace(timeline: Timeline, about: Mapping[str, object]) -> dict[str, Any]:
    """Return the trace of a timeline as the object that a JSON file holds.

    about  facts of the machine and the settings, which go into the file unchanged
    """
    scale = Scale.of(timeline)
    events: list[Event] = []
    for process in timeline.processes:
        events += _process(process, timeline, scale)
    events += _links(timeline, scale)
    events += arrows(timeline, scale)
    events += instants(timeline, scale)
    # Names first; of spans that begin together the longest first, because it contains the others.
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "version": VERSION,
            **about,
            "processes": [_about(one, scale) for one in timeline.processes],
            "links": {"pid": LINKS_PID},
            "texts": [_about_text(text, scale) for text in timeline.texts.values()],
            "num_frames_dropped": timeline.num_frames_dropped,
        },
    }


def _about(process: Process, scale: Scale) -> dict[str, Any]:
    clock = process.clock
    words: dict[str, Any] = {"is_same": True}
    if clock is None:
        words = {"is_same": False, "unknown": True}
    elif not clock.is_same:
        words = {
            "is_same": False,
            "ahead_us": round_us(clock.ahead_ns),
            "error_us": round_us(clock.error_ns),
            "num_exchanges": clock.num_exchanges,
        }
    return {
        "pid": scale.pids[process.node],
        "name": process.name,
        "role": process.role,
        "model": process.model,
        "host": process.host,
        "device": process.device,
        "clock": words,
        "recorded": [[scale.us(start), scale.us(end)] for start, end in process.track.recorded],
        "num_records_dropped": process.num_dropped,
        "num_parts_missing": process.num_missing,
    }


def _about_text(text: RecordedText, scale: Scale) -> dict[str, Any]:
    opened = text.opened
    return {
        "text": scale.texts[text.session],
        "policy": opened.policy.name,
        "rule": opened.rule.name.lower(),
        "temperature": opened.sampling.temperature,
        "num_prompt_tokens": opened.num_prompt,
        "num_tokens": len(text.tokens) - opened.num_prompt,
        "num_verdicts": len(text.verdicts),
    }


def _named(pid: int, name: str, order: int, threads: Iterable[tuple[int, str]]) -> Iterator[Event]:
    """Yield the events that name a process and its tracks and give their order."""
    start: Event = {"ph": "M", "pid": pid, "tid": 0, "ts": 0.0}
    yield {**start, "name": "process_name", "args": {"name": name}}
    yield {**start, "name": "process_sort_index", "args": {"sort_index": order}}
    for place, (tid, thread) in enumerate(threads):
        of_thread = {**start, "tid": tid}
        yield {**of_thread, "name": "thread_name", "args": {"name": thread}}
        yield {**of_thread, "name": "thread_sort_index", "args": {"sort_index": place}}


# -- processes ------------------------------------------------------------------------------------


def _process(process: Process, timeline: Timeline, scale: Scale) -> Iterator[Event]:
    pid = scale.pids[process.node]
    place = [one.node for one in timeline.processes].index(process.node)
    words = f"{process.name} ({process.model.rpartition('/')[2]})" if process.node else COORDINATOR
    threads = [(HOST_TID, "loop")]
    if any(forward.on_device for forward in process.track.forwards):
        threads.append((DEVICE_TID, "device"))
    yield from _named(pid, words, ORDER[process.role] + place, threads)
    yield from _apart(_phases(process, timeline, scale))
    verdicts = of_verdicts(timeline.hops, process)
    for number, forward in enumerate(process.track.forwards, 1):
        yield _forward(process, number, forward, verdicts.get(forward.end_ns, []), scale)


def _phases(process: Process, timeline: Timeline, scale: Scale) -> Iterator[Event]:
    kinds = _KindsAt(timeline.hops, process.node)
    for span in process.track.spans:
        name, category = NAMES[span.phase]
        if category == "codec" and (kind := kinds.within(span)):
            name = f"{name} {kind}"
        pid = scale.pids[process.node]
        yield scale.span(pid, HOST_TID, name, category, span.start_ns, span.end_ns)


def _apart(phases: Iterable[Event]) -> Iterator[Event]:
    """Yield the phases without those of no length, and with a step between equal ones that touch.

    speedscope would put the second of two equal spans into the first if it begins where that ends.
    """
    last: Event | None = None
    for phase in phases:
        if not phase["dur"]:
            continue
        if last is not None:
            if last["name"] == phase["name"] and last["ts"] + last["dur"] == phase["ts"]:
                last["dur"] -= 1 / STEPS_PER_US
            yield last
        last = phase
    if last is not None:
        yield last


def _forward(
    process: Process, number: int, forward: Forward, verdicts: Sequence[Hop], scale: Scale
) -> Event:
    """Return the span of a draft step, or of a pass with the results of its verdicts.

    number  tells it from the next: speedscope nests two equal spans if one follows at once
    """
    name = FORWARDS.get(process.role, "forward") if forward.num_asked else "prefill"
    args: dict[str, Any] = {
        "number": number,
        "rows": forward.num_rows,
        "asked": forward.num_asked,
    }
    said = [hop.message for hop in verdicts if isinstance(hop.message, Verdict)]
    if said:
        args |= {
            "texts": [scale.texts.get(one.session, 0) for one in said],
            "drafted": sum(one.num_drafted for one in said),
            "accepted": sum(one.num_accepted for one in said),
            "hit": ", ".join(one.hit.name.lower() for one in said),
            "cause": ", ".join(one.cause.name.lower() for one in said),
        }
    pid, tid = scale.pids[process.node], DEVICE_TID if forward.on_device else HOST_TID
    return scale.span(pid, tid, name, "forward", forward.start_ns, forward.end_ns, args)


class _KindsAt:
    """Finds which message a process reads or sends in a span. Ask it in the order of time."""

    def __init__(self, hops: Sequence[Hop], node: bytes) -> None:
        found: list[tuple[int, str]] = []
        for hop in hops:
            if node and hop.node != node:
                continue
            is_own_end = hop.is_to_node == bool(node)
            ns = hop.received_ns if is_own_end else hop.sent_ns
            if ns is not None:
                found.append((ns, hop.kind))
        self._found = sorted(found, reverse=True)

    def within(self, span: Span) -> str:
        """Return the kind of the message in this span; "" if unknown. Drops earlier messages."""
        while self._found and self._found[-1][0] < span.start_ns:
            self._found.pop()
        if self._found and self._found[-1][0] <= span.end_ns:
            return self._found.pop()[1]
        return ""


# -- links ----------------------------------------------------------------------------------------


def _links(timeline: Timeline, scale: Scale) -> Iterator[Event]:
    names = {one.node: one.name for one in timeline.processes}
    threads: list[tuple[int, str]] = []
    for tid, ((node, is_to_node), hops) in enumerate(_by_direction(timeline).items(), 1):
        ends = (COORDINATOR, names[node]) if is_to_node else (names[node], COORDINATOR)
        threads.append((tid, " \N{RIGHTWARDS ARROW} ".join(ends)))
        next_ns: int | None = None  # when the next message that came was sent
        for hop in sorted(hops, key=lambda one: one.sent_ns or 0, reverse=True):
            yield _wire(hop, next_ns, tid, timeline.texts, scale)
            if hop.received_ns is not None:
                next_ns = hop.sent_ns
    yield from _named(LINKS_PID, "links", LINKS_ORDER, threads)


def _by_direction(timeline: Timeline) -> dict[tuple[bytes, bool], list[Hop]]:
    """Return the hops by (node, is_to_node), drafters first: received messages, and known losses.

    A message counts as lost only between others of its direction that were received.
    """
    nodes = sorted((one for one in timeline.processes if one.node), key=lambda p: ORDER[p.role])
    found: dict[tuple[bytes, bool], list[Hop]] = {
        (one.node, is_to_node): [] for one in nodes for is_to_node in (False, True)
    }
    for hop in timeline.hops:
        if hop.sent_ns is not None and (hop.node, hop.is_to_node) in found:
            found[hop.node, hop.is_to_node].append(hop)
    for direction, hops in found.items():
        came = [hop.sent_ns or 0 for hop in hops if hop.received_ns is not None]
        first, last = min(came, default=0), max(came, default=0)
        found[direction] = [
            hop
            for hop in hops
            if hop.received_ns is not None or first <= (hop.sent_ns or 0) <= last
        ]
    return {direction: hops for direction, hops in found.items() if hops}


def _wire(
    hop: Hop, next_ns: int | None, tid: int, texts: Mapping[int, RecordedText], scale: Scale
) -> Event:
    """Return the span of a message on its way, or an instant where it was lost.

    next_ns  when the next message on this track was sent: the span ends then if not earlier
    """
    assert hop.sent_ns is not None
    args: dict[str, Any] = {
        "message": hop.number,
        "from": COORDINATOR_PID if hop.is_to_node else scale.pids[hop.node],
        "to": scale.pids[hop.node] if hop.is_to_node else COORDINATOR_PID,
        "bytes": hop.num_bytes,
        "text": scale.texts.get(hop.session, 0),
        **_contents(hop, texts),
    }
    if hop.received_ns is None:
        return scale.instant(LINKS_PID, tid, f"never came: {hop.kind}", "wire", hop.sent_ns, args)
    read_ns = max(hop.sent_ns, hop.received_ns)
    args["read_us"] = scale.us(read_ns)
    end_ns = read_ns if next_ns is None else min(read_ns, next_ns)
    return scale.span(LINKS_PID, tid, hop.kind, "wire", hop.sent_ns, end_ns, args)


def _contents(hop: Hop, texts: Mapping[int, RecordedText]) -> dict[str, Any]:
    match hop.message:
        case Draft() as draft:
            text = texts.get(draft.session)
            fate = fate_of(draft, text) if text is not None else None
            return {
                "source": draft.source,
                "numbers": [draft.first_number, draft.number],
                "after": draft.parent_len,
                "tokens": len(draft.tokens),
                "right": None if fate is None else fate.num_right,
            }
        case Verdict() as verdict:
            return {
                "after": verdict.base_len,
                "tokens": len(verdict.tokens),
                "drafted": verdict.num_drafted,
                "accepted": verdict.num_accepted,
                "rejected": len(verdict.rejected),
                "rolled_back": verdict.num_rolled_back,
                "stale": verdict.num_stale,
                "hit": verdict.hit.name.lower(),
                "cause": verdict.cause.name.lower(),
            }
        case _:
            return {}
