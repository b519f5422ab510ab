"""One line per thing that happened, short enough to read a run from top to bottom."""

from dataclasses import dataclass
from typing import Any

from coordinator.text.timed_session import Result, TimedSession
from drafter_node import compute as drafter
from engine.layout.slots import Feed
from proto import codec
from proto.messages import Draft, Fault, Features, Heartbeat, Open, Verdict, Welcome
from target_node import compute as target


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the story. `what`: a frame, a message, an event, an action or a word."""

    time: float
    who: str
    verb: str
    what: Any

    def __str__(self) -> str:
        return f"{self.time:9.4f} {self.who:10} {self.verb:8} {brief(self.what)}"


def brief(what: Any) -> str:
    """The message, event or action in few words."""
    match what:
        case bytes():
            return brief(codec.decode(what))
        case Open():
            return f"Open {_life(what)} text of {len(what.tokens)}"
        case Draft():
            numbers = f"{what.first_number}..{what.number}"
            done = ", done" if what.done else ""
            return f"Draft {_life(what)} {numbers} at {what.parent_len}: {_list(what.tokens)}{done}"
        case Verdict():
            acks = " ".join(f"{ack.incarnation}:{ack.number}" for ack in what.acks)
            return (
                f"Verdict {_life(what)} at {what.base_len}: {_list(what.tokens)} "
                f"{what.cause.name} {what.num_accepted}/{what.num_drafted} acks {acks or '-'}"
            )
        case Features():
            return f"Features {_life(what)} before the last {what.num_rows} of {what.end_len}"
        case target.FeatureRows():
            return f"features of {what.num_rows}"
        case Fault():
            return f"Fault {_life(what)} {what.code}: {what.detail}"
        case Welcome():
            return f"Welcome source {what.source}"
        case Heartbeat():
            marks = " ".join(f"{_life(mark)} {mark.length}" for mark in what.marks)
            return f"Heartbeat [{marks}] {what.progress}"
        case Feed():
            kind = "causal" if what.masks is None else f"behind {what.prefix_len}"
            where = f"at {what.positions[0]}" if what.positions else "nowhere"
            return f"{len(what.tokens)} rows {where} {kind}"
        case TimedSession():
            return f"text {what.machine.session} of {len(what.machine.text)}"
        case Result():
            return str(what.reason)
        case str():
            return what
        case target.Part() | drafter.Part():
            return f"{_life(what.opened)}: {brief(what.feed)} in lane {what.feed.lane}"
        case tuple() if what and hasattr(what[0], "__slots__"):
            return " | ".join(map(brief, what))
        case _ if hasattr(what, "__slots__"):
            return f"{type(what).__name__} {_fields(what)}"
        case _:
            return repr(what)


def _fields(what: Any) -> str:
    # An id of a node and a frame are both bytes.
    names = [name for name in what.__slots__ if name not in ("opened", "committed")]
    values = [getattr(what, name) for name in names]
    is_id = [name == "node" and isinstance(getattr(what, name), bytes) for name in names]
    return " ".join(
        value.decode() if node else brief(value) for value, node in zip(values, is_id, strict=True)
    )


def _life(what: Any) -> str:
    return f"{what.session}.{what.incarnation}"


def _list(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens)) or "nothing"
