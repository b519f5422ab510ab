"""The critical path of a text: what it waited for, moment by moment (pure).

Theory of operation
-------------------
A text takes from when the coordinator sends its first `Open` until its last verdict arrives there.
Each verdict follows from the one before on the target. So the critical path is what the target does
from one verdict to the next; before the first it also has the way of the `Open`, and after the last
the way of that verdict. Every moment of it belongs to one share:

    target       the target's model, its sampling, moves of its cache
    drafter      the target waits for a draft, and its drafter's model is computing it
    wire         the target waits, and what it waits for is on its way
    host         all other work of the target, of the drafter it waits for, of the coordinator
    waiting      the target waits, and nobody works for it: a deadline, or a drafter that waits too
    unexplained  there is no record of the moment

The target waits for the last draft of the text that it reads before the pass begins (or for the
`Open`). Followed back in time, a draft is on its way from the coordinator, in the coordinator, and
on its way to it; before that its drafter was at work, or waited for a verdict, which is followed
back in the same way.

What the target does for other texts is the target's share in each of these texts.

Where a model runs on a device beside the host, each moment of a forward is the model's, from its
launch to its end. What the host does in that time delays nothing: it is in no share of its own, and
is reported beside the share of the model (`Round.beside_ns`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from coordinator.tracing.chrome import COORDINATOR_PID
from lab.trace.reading import Busy, Message, Process, Trace, TracedText

SHARES = ("target", "drafter", "wire", "host", "waiting", "unexplained")
MODELS = ("target", "drafter")
MODEL_CATEGORIES = {"model", "sampling", "move"}
FOREVER_NS = 1 << 62

ON_DEVICE, BESIDE = "on a device", "beside a device"  # categories of spans that this file adds


class Piece(NamedTuple):
    """A span of time [start_ns, end_ns), and the share that it belongs to.

    has_host_beside  True if the span is a model's on a device, and its host works at the same time
    """

    start_ns: int
    end_ns: int
    share: str
    has_host_beside: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """The time from one verdict of a text to the next.

    shares_ns  by the names of SHARES; their sum is the length of the round
    beside_ns  of the shares of MODELS, the part in which the model's host worked at the same time
    tokens     tokens that the verdict added
    drafted, accepted, rolled_back  drafts that its pass verified, accepted ones, nodes rolled back
    """

    start_ns: int
    end_ns: int
    shares_ns: dict[str, int]
    tokens: int
    drafted: int
    accepted: int
    rolled_back: int
    beside_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path of one text. The last round ends when the last verdict arrives."""

    text: int
    policy: str
    start_ns: int
    end_ns: int
    rounds: list[Round]

    @property
    def shares_ns(self) -> dict[str, int]:
        """Return the nanoseconds of each share over all rounds."""
        return {name: sum(one.shares_ns[name] for one in self.rounds) for name in SHARES}

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that were generated."""
        return sum(one.tokens for one in self.rounds)


def paths_of(trace: Trace) -> list[Path]:
    """Return the critical path of every text that has at least one token."""
    indexed = _Indexed(trace)
    return [path for text in trace.texts if (path := indexed.path(text)) is not None]


def overlap(trace: Trace) -> float | None:
    """Return the share of the target's model time in which a drafter's model ran as well, or None.

    None: there is no drafter, or the target's model never ran.
    """
    models = {
        role: [
            (one.start_ns, one.end_ns)
            for process in trace.of_role(role)
            for one in [*process.busy, *_on_device(process)]
            if one.category in ("model", ON_DEVICE)
        ]
        for role in MODELS
    }
    verifying, drafting = _merged(models["target"]), _merged(models["drafter"])
    total = sum(end - start for start, end in verifying)
    if not total or not drafting:
        return None
    ends = [end for _, end in drafting]
    both = 0
    for start, end in verifying:
        for other in drafting[bisect_right(ends, start) :]:
            if other[0] >= end:
                break
            both += min(end, other[1]) - max(start, other[0])
    return both / total


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans sorted, with overlapping ones joined."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _on_device(process: Process) -> list[Busy]:
    """Return the forwards that ran on a device beside the host, as spans of category ON_DEVICE."""
    return [
        Busy(one.start_ns, one.end_ns, ON_DEVICE, one.name)
        for one in process.forwards
        if one.on_device
    ]


def _with_device(process: Process) -> Process:
    """Return the process with spans in which its device is at work.

    They have the category BESIDE where the host works as well, otherwise ON_DEVICE. The host's
    phases of the model itself (MODEL_CATEGORIES) do not count as work of the host during a forward.
    """
    forwards = _on_device(process)
    if not forwards:
        return process
    found: list[Busy] = []
    # The host's phases do not overlap, nor do the device's forwards: between two of their ends
    # nothing changes.
    cuts = sorted({ns for one in [*forwards, *process.busy] for ns in (one.start_ns, one.end_ns)})
    phases, launched = _Pointer(process.busy), _Pointer(forwards)
    for start_ns, end_ns in pairwise(cuts):
        phase, forward = phases.at(start_ns), launched.at(start_ns)
        if forward is not None:
            is_other = phase is not None and phase.category not in MODEL_CATEGORIES
            found.append(Busy(start_ns, end_ns, BESIDE if is_other else ON_DEVICE, forward.name))
        elif phase is not None:
            found.append(Busy(start_ns, end_ns, phase.category, phase.name))
    return replace(process, busy=found)


class _Pointer:
    """Finds the current one of some spans that are in the order of time, for ascending times."""

    def __init__(self, spans: Sequence[Busy]) -> None:
        self._spans, self._index = spans, 0

    def at(self, ns: int) -> Busy | None:
        """Return the span that contains the moment `ns`; None if there is none."""
        while self._index < len(self._spans) and self._spans[self._index].end_ns <= ns:
            self._index += 1
        if self._index < len(self._spans) and self._spans[self._index].start_ns <= ns:
            return self._spans[self._index]
        return None


class _Indexed:
    """A trace with its messages indexed by receiver and text."""

    def __init__(self, trace: Trace) -> None:
        self._processes = {pid: _with_device(process) for pid, process in trace.processes.items()}
        self._starts = {
            pid: [one.start_ns for one in process.busy] for pid, process in self._processes.items()
        }
        self._sent: dict[int, Message] = {}  # messages from a node to the coordinator, by number
        self._to: dict[tuple[int, int], list[Message]] = {}  # by receiver and text, as read in time
        self._verdicts: dict[int, list[Message]] = {}  # by text
        self._opens: dict[int, list[Message]] = {}
        for one in sorted(trace.messages, key=lambda one: one.received_ns):
            if one.receiver != COORDINATOR_PID:
                if one.kind in ("Draft", "Verdict", "Open"):
                    self._to.setdefault((one.receiver, one.text), []).append(one)
                if one.kind == "Open":
                    self._opens.setdefault(one.text, []).append(one)
                continue
            self._sent[one.number] = one
            if one.kind == "Verdict":
                self._verdicts.setdefault(one.text, []).append(one)

    def path(self, about: TracedText) -> Path | None:
        """Return the critical path of a text; None if it has no token."""
        text, length = about.number, about.num_prompt_tokens
        start_ns = min((one.sent_ns for one in self._opens.get(text, [])), default=None)
        if start_ns is None:
            return None
        rounds: list[Round] = []
        at_ns = start_ns
        last: Message | None = None
        for verdict in self._verdicts.get(text, []):
            tokens = verdict.args["after"] + verdict.args["tokens"] - length
            if tokens <= 0 or verdict.args["after"] > length or verdict.sent_ns < at_ns:
                continue  # a repeated verdict, or one that does not continue the committed text
            rounds.append(_round(self._pieces(text, verdict, at_ns), verdict, at_ns, tokens))
            at_ns, length, last = verdict.sent_ns, length + tokens, verdict
        if last is None:
            return None
        tail = rounds.pop()
        wire_ns = tail.shares_ns["wire"] + last.received_ns - last.sent_ns
        shares_ns = {**tail.shares_ns, "wire": wire_ns}
        rounds.append(replace(tail, end_ns=last.received_ns, shares_ns=shares_ns))
        return Path(text, about.policy, start_ns, last.received_ns, rounds)

    def _pieces(self, text: int, verdict: Message, start_ns: int) -> Iterator[Piece]:
        """Yield what the target did from `start_ns` until it sent a verdict, without a gap."""
        target = self._processes[verdict.sender]
        launched_ns = _last_launch_ns(target, verdict.sent_ns)
        for start, end, busy in self._between(target, start_ns, verdict.sent_ns):
            if busy is None:
                yield Piece(start, end, "unexplained")
            elif busy.category:
                yield _of_busy(start, end, busy, "target")
            else:
                yield from self._wait(text, target, start, end, launched_ns)

    def _between(
        self, process: Process, start_ns: int, end_ns: int
    ) -> Iterator[tuple[int, int, Busy | None]]:
        """Yield (start, end, span): what a process did from `start_ns` to `end_ns`, without a gap.

        A span with an empty category means that it waited; None that nothing is recorded.
        """
        starts = self._starts[process.pid]
        index = max(0, bisect_right(starts, start_ns) - 1)
        at_ns = start_ns
        for busy in process.busy[index:]:
            if busy.start_ns >= end_ns:
                break
            if busy.end_ns <= at_ns:
                continue
            if busy.start_ns > at_ns:
                yield from _gap(process, at_ns, busy.start_ns)
            at_ns = max(at_ns, busy.start_ns)
            yield at_ns, min(end_ns, busy.end_ns), busy
            at_ns = min(end_ns, busy.end_ns)
        if at_ns < end_ns:
            yield from _gap(process, at_ns, end_ns)

    def _wait(
        self, text: int, target: Process, start_ns: int, end_ns: int, launched_ns: int
    ) -> Iterator[Piece]:
        """Yield what the target waits for in [start_ns, end_ns)."""
        awaited = self._last_read(target.pid, text, start_ns, launched_ns)
        if awaited is None:
            yield Piece(start_ns, end_ns, "waiting")
            return
        origin = self._sent.get(awaited.number)
        left_ns = awaited.sent_ns if origin is None else origin.sent_ns
        yield from _cut(self._way(awaited), max(start_ns, left_ns), end_ns)
        until_ns = min(end_ns, left_ns)
        if start_ns >= until_ns:
            return
        drafter = None if origin is None else self._processes.get(origin.sender)
        if drafter is None:
            # An Open begins at the coordinator; a draft should have a recorded sender.
            is_known = awaited.kind == "Open"
            yield Piece(start_ns, until_ns, "waiting" if is_known else "unexplained")
            return
        for start, end, busy in self._between(drafter, start_ns, until_ns):
            if busy is None:
                yield Piece(start, end, "unexplained")
            elif busy.category:
                yield _of_busy(start, end, busy, "drafter")
            else:
                yield from self._wait_of_drafter(text, drafter, start, end)

    def _wait_of_drafter(
        self, text: int, drafter: Process, start_ns: int, end_ns: int
    ) -> Iterator[Piece]:
        """Yield what a drafter waits for while the target waits for the drafter."""
        awaited = self._first_read(drafter.pid, text, end_ns)
        if awaited is None:
            yield Piece(start_ns, end_ns, "waiting")
        else:
            yield from _cut(self._way(awaited), start_ns, end_ns)

    def _way(self, message: Message) -> list[Piece]:
        """Return the share of each time around a message: wire, host (coordinator) or waiting."""
        origin = self._sent.get(message.number)
        points = [message.sent_ns, message.received_ns]
        names = ["waiting", "wire", "waiting"]
        if origin is not None:
            points = [origin.sent_ns, origin.received_ns, *points]
            names = ["waiting", "wire", "host", "wire", "waiting"]
        ends = [-FOREVER_NS, *points, FOREVER_NS]
        return [
            Piece(start, end, name)
            for (start, end), name in zip(pairwise(ends), names, strict=True)
        ]

    def _last_read(self, pid: int, text: int, after_ns: int, until_ns: int) -> Message | None:
        """Return the last message of a text that a process reads in (after_ns, until_ns].

        None: there is none.
        """
        messages = self._to.get((pid, text), [])
        index = bisect_right(messages, until_ns, key=lambda one: one.received_ns) - 1
        if index < 0 or messages[index].received_ns <= after_ns:
            return None
        return messages[index]

    def _first_read(self, pid: int, text: int, from_ns: int) -> Message | None:
        """Return the first message of a text that a process reads from `from_ns` on, or None."""
        messages = self._to.get((pid, text), [])
        index = bisect_left(messages, from_ns, key=lambda one: one.received_ns)
        return messages[index] if index < len(messages) else None


def _last_launch_ns(target: Process, sent_ns: int) -> int:
    """Return when the pass began whose verdict was sent at `sent_ns`."""
    index = bisect_right(target.forwards, sent_ns, key=lambda one: one.end_ns) - 1
    return target.forwards[index].start_ns if index >= 0 else sent_ns


def _gap(process: Process, start_ns: int, end_ns: int) -> Iterator[tuple[int, int, Busy | None]]:
    """Yield (start, end, waiting) of a gap's parts; None in place of waiting: not recorded."""
    at_ns = start_ns
    for first, last in process.recorded:
        low, high = max(at_ns, first), min(end_ns, last)
        if low < high:
            if at_ns < low:
                yield at_ns, low, None
            yield low, high, Busy(low, high, "", "wait")
            at_ns = high
    if at_ns < end_ns:
        yield at_ns, end_ns, None


def _cut(pieces: Sequence[Piece], start_ns: int, end_ns: int) -> Iterator[Piece]:
    """Yield the parts of the pieces that lie in [start_ns, end_ns)."""
    for start, end, name, _ in pieces:
        if max(start, start_ns) < min(end, end_ns):
            yield Piece(max(start, start_ns), min(end, end_ns), name)


def _of_busy(start_ns: int, end_ns: int, busy: Busy, model: str) -> Piece:
    """Return the piece of a busy span; `model` is the share of the process's model."""
    if busy.category in (ON_DEVICE, BESIDE):
        return Piece(start_ns, end_ns, model, busy.category == BESIDE)
    return Piece(start_ns, end_ns, model if busy.category in MODEL_CATEGORIES else "host")


def _round(pieces: Iterable[Piece], verdict: Message, start_ns: int, tokens: int) -> Round:
    """Return a round with the sums of its pieces."""
    shares = dict.fromkeys(SHARES, 0)
    beside = dict.fromkeys(MODELS, 0)
    for start, end, name, has_host_beside in pieces:
        shares[name] += end - start
        if has_host_beside:
            beside[name] += end - start
    return Round(
        start_ns,
        verdict.sent_ns,
        shares,
        tokens,
        verdict.args["drafted"],
        verdict.args["accepted"],
        verdict.args["rolled_back"],
        beside,
    )
