"""Reads a trace file: processes, messages, texts (pure).

It accepts only files that `chrome.py` writes; a trace of another program is refused.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coordinator.tracing.chrome import DEVICE_TID, FORMAT, VERSION
from proto.errors import ConfigurationError

OF_A_TEXT = ("num_prompt_tokens", "num_tokens")
OF_A_MESSAGE = ("message", "text", "from", "to")
OF_A_VERDICT = ("after", "tokens", "drafted", "accepted", "rolled_back")


class Busy(NamedTuple):
    """A span [start_ns, end_ns) in which a process's host did not wait; category as in the file."""

    start_ns: int
    end_ns: int
    category: str
    name: str


class Forward(NamedTuple):
    """A pass, a draft step or a part of a prefill, [start_ns, end_ns).

    on_device  True if a device ran it all the time while the host was free
    """

    start_ns: int
    end_ns: int
    name: str
    args: Mapping[str, Any]
    on_device: bool = False


class Moment(NamedTuple):
    """An event at one time, such as a rejection, a re-root or a fallback."""

    ns: int
    name: str
    args: Mapping[str, Any]


class Arrow(NamedTuple):
    """A link from a draft to its verdict, or from a verdict to a drafter, between process ids."""

    name: str
    sender: int
    start_ns: int
    receiver: int
    end_ns: int


@dataclass(slots=True)
class Process:
    """One process of the trace. All lists are in the order of time.

    recorded  recorded spans (ns): in them, the process waited whenever it was not busy
    """

    pid: int
    name: str
    role: str
    recorded: list[tuple[int, int]]
    about: Mapping[str, Any]
    busy: list[Busy] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Message:
    """A message on one link, from when it was sent until it was read.

    number  identifies the message, on both of its links
    text    1 and so on; 0: the message belongs to no text
    sender, receiver  process ids
    """

    number: int
    kind: str
    text: int
    sender: int
    receiver: int
    sent_ns: int
    received_ns: int
    args: Mapping[str, Any]


class TracedText(NamedTuple):
    """A generated text; its number is 1 and so on."""

    number: int
    policy: str
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The content of a trace file. Times are nanoseconds from its beginning."""

    processes: dict[int, Process]
    messages: list[Message]
    texts: list[TracedText]
    about: Mapping[str, Any]
    arrows: list[Arrow] = field(default_factory=list)

    def of_role(self, role: str) -> list[Process]:
        """Return the processes with this role."""
        return [one for one in self.processes.values() if one.role == role]


def parse(text: str, name: str) -> Trace:
    """Return the trace in a file's text; `name` is for messages. Raises ConfigurationError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name} is no JSON: {error}") from error
    about = found.get("otherData") if isinstance(found, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ConfigurationError(f"{name} is no trace of slipstream; make one with --trace")
    if about.get("version") != VERSION:
        raise ConfigurationError(
            f"{name} is a trace of version {about.get('version')}, this release reads {VERSION}"
        )
    try:
        return _parse(found["traceEvents"], about)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigurationError(
            f"{name} is a damaged trace ({type(error).__name__}: {error}); make it again"
        ) from error


def _integers(found: Mapping[str, Any], names: Iterable[str]) -> list[int]:
    """Return these values as integers. Raises ValueError if one is no integer."""
    values = [found[name] for name in names]
    if any(type(value) is not int for value in values):
        raise ValueError(f"expected integers, got {values!r:.80}")
    return values


def _ns(microseconds: float) -> int:
    """Return microseconds as nanoseconds."""
    return round(microseconds * 1000)


def _parse(events: list[dict[str, Any]], about: dict[str, Any]) -> Trace:
    """Build the trace from its events."""
    processes = {
        one["pid"]: Process(
            one["pid"],
            one["name"],
            one["role"],
            [(_ns(start), _ns(end)) for start, end in one["recorded"]],
            one,
        )
        for one in about["processes"]
    }
    texts = [
        TracedText(number, str(one["policy"]), *_integers(one, OF_A_TEXT))
        for number, one in enumerate(about["texts"], 1)
    ]
    trace = Trace(processes, [], texts, about)
    started: dict[int, tuple[int, int]] = {}
    for event in events:
        phase, start_ns = event["ph"], _ns(event["ts"])
        if phase == "s":
            started[event["id"]] = event["pid"], start_ns
        elif phase == "f":
            arrow = Arrow(event["name"], *started[event["id"]], event["pid"], start_ns)
            trace.arrows.append(arrow)
        elif phase == "X":
            _read_span(trace, event, start_ns, start_ns + _ns(event["dur"]))
        elif phase == "i" and event["pid"] in processes:
            moment = Moment(start_ns, event["name"], event["args"])
            processes[event["pid"]].moments.append(moment)
    return trace


def _read_span(trace: Trace, event: dict[str, Any], start_ns: int, end_ns: int) -> None:
    """Add a span of the file to the trace, as a message, a forward or a busy span."""
    category, name = event["cat"], event["name"]
    if category == "wire":
        args = event["args"]
        _integers(args, (*OF_A_MESSAGE, *(OF_A_VERDICT if name == "Verdict" else ())))
        ends = trace.processes[args["from"]].pid, trace.processes[args["to"]].pid
        read_ns = _ns(args["read_us"])  # its span ends earlier where the next message was sent
        message = Message(args["message"], name, args["text"], *ends, start_ns, read_ns, args)
        trace.messages.append(message)
        return
    process = trace.processes[event["pid"]]
    if category == "forward":
        on_device = event["tid"] == DEVICE_TID
        process.forwards.append(Forward(start_ns, end_ns, name, event["args"], on_device))
    else:
        process.busy.append(Busy(start_ns, end_ns, category, name))
