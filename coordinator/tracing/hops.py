"""Messages on their way: what left here is what came there, by its checksum (pure).

Every message crosses the coordinator, whose frames are kept; a node says the checksum of what it
has sent and received. A frame that is passed on is one message with several hops.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.tracing.tape import Passed
from coordinator.tracing.tracks import Note
from proto.codec import decode, kind_of, session_of
from proto.errors import RemoteProtocolError
from proto.messages import Features, Message

FEATURES = Features.__name__


@dataclass(frozen=True, slots=True)
class Hop:
    """A message on one link. Times on the coordinator's clock, in nanoseconds.

    number      of the message: on its next hop it is the same
    node        at the other end of the link than the coordinator
    is_to_node  the direction
    message     None: it never came to the coordinator, is garbled, or features, which nobody reads
    session     of what text it is; 0: of none
    sent_ns, received_ns  None: nobody has said so; a message that was lost was never received. As
                far as two clocks disagree, it may have come before it was sent
    """

    number: int
    kind: str
    node: bytes
    is_to_node: bool
    num_bytes: int
    message: Message | None
    sent_ns: int | None
    received_ns: int | None
    session: int = 0


def hops_of(
    frames: Sequence[Passed], notes: Mapping[bytes, Sequence[Note]], slack_ns: int = 0
) -> list[Hop]:
    """The hops of all frames that passed the coordinator, in the order in which they did, and then
    those of frames that left a node and never came there.

    slack_ns  so much earlier than it was sent may a frame seem to have come, by two clocks
    """
    matches = _Matches(frames, notes, slack_ns)
    hops: list[Hop] = []
    numbers: dict[bytes, int] = {}  # of the message in a frame
    messages: dict[int, Message | None] = {}
    for index, passed in enumerate(frames):
        frame = passed.frame
        if not passed.is_sent or frame not in numbers:
            numbers[frame] = number = len(messages) + 1
            messages[number] = None if _kind(frame[:1]) == FEATURES else decoded(frame)
        number = numbers[frame]
        ends: tuple[int | None, int | None] = matches.sent[index], passed.ns
        if passed.is_sent:
            ends = passed.ns, matches.received[index]
        kind, message = _kind(frame[:1]), messages[number]
        session = _session(frame) if kind == FEATURES else getattr(message, "session", 0)
        what = number, kind, passed.node, passed.is_sent, passed.num_bytes, message
        hops.append(Hop(*what, *ends, session))
    for node, note in matches.lost:
        number = len(messages) + 1
        messages[number] = None
        kind = _kind(bytes([note.kind]))
        hops.append(Hop(number, kind, node, False, 0, None, note.ns, None))
    return hops


class _Matches:
    """What a node says of the frames that passed.

    sent      by frame that came from a node, when that says it sent it
    received  by frame that was sent to a node, when that says it came
    lost      what nodes say they sent, and never came
    """

    def __init__(
        self, frames: Sequence[Passed], notes: Mapping[bytes, Sequence[Note]], slack_ns: int
    ) -> None:
        self.sent: dict[int, int | None] = defaultdict(lambda: None)
        self.received: dict[int, int | None] = defaultdict(lambda: None)
        self.lost: list[tuple[bytes, Note]] = []
        passed: dict[tuple[bytes, bool, int], list[int]] = defaultdict(list)
        for index, one in enumerate(frames):
            passed[one.node, one.is_sent, one.checksum].append(index)
        said: dict[tuple[bytes, bool, int], list[Note]] = defaultdict(list)
        for node, of_node in notes.items():
            for note in of_node:
                said[node, not note.is_sent, note.checksum].append(note)
        for key, of_key in said.items():
            node, is_to_node, _ = key
            indices = passed.get(key, [])
            here, there = [frames[index].ns for index in indices], [note.ns for note in of_key]
            if is_to_node:
                for mine, theirs in _pairs(here, there, slack_ns):
                    self.received[indices[mine]] = there[theirs]
            else:
                pairs = _pairs(there, here, slack_ns)
                for theirs, mine in pairs:
                    self.sent[indices[mine]] = there[theirs]
                came = {theirs for theirs, _ in pairs}
                self.lost += [(node, one) for n, one in enumerate(of_key) if n not in came]


def _pairs(sent: Sequence[int], received: Sequence[int], slack_ns: int) -> list[tuple[int, int]]:
    """Which of the same frames that were sent is which that came: the latest that was sent before,
    so that one that is sent again because it was lost does not seem to have come late."""
    pairs: list[tuple[int, int]] = []
    last = len(sent) - 1
    for index in range(len(received) - 1, -1, -1):
        while last >= 0 and sent[last] > received[index] + slack_ns:
            last -= 1
        if last < 0:
            break
        pairs.append((last, index))
        last -= 1
    return pairs


def decoded(frame: bytes) -> Message | None:
    """The message of a frame; None: it is garbled."""
    try:
        return decode(frame)
    except RemoteProtocolError:
        return None


def _session(frame: bytes) -> int:
    """The text that features are of; 0: they are garbled."""
    try:
        return session_of(frame)
    except RemoteProtocolError:
        return 0


def _kind(first: bytes) -> str:
    try:
        return kind_of(first).__name__
    except RemoteProtocolError:
        return "garbled frame"
