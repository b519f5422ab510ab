"""A recording that is made by hand: one round of a text, with every time known."""

from dataclasses import dataclass, field

from coordinator.tracing.tape import Passed, Recording
from proto import messages as m
from proto.codec import encode
from proto.stopwatch import Phase, Recorder, Stopwatch
from proto.tree import EMPTY_HASH, path_hash
from tests.policies import synchronous

TARGET, DRAFTER = b"target-1", b"drafter-1"
HOST = "here"
KEY = bytes(m.SESSION_KEY_BYTES)
MS = 1_000_000
PROMPT = (5, 6)


def name_of(tokens: tuple[int, ...]) -> int:
    """The path hash of a text."""
    found = EMPTY_HASH
    for token in tokens:
        found = path_hash(found, token, KEY)
    return found


OPEN = m.Open(1, 1, KEY, PROMPT, len(PROMPT), m.SamplingSpec(), synchronous(4), m.Limits(100, (2,)))
# Two drafts in a row, of which the text takes the first.
DRAFT = m.Draft(
    1, 2, 0, 1, 1, name_of(PROMPT), 2, (7, 8), (-1, 0), (-0.25, -0.5), done=True, model_us=10
)
VERDICT = m.Verdict(
    *(1, 1, 2, name_of(PROMPT), (7, 9), (m.Ack(0, 2, 1),), m.Cause.READY, 2, 1, 1, 0, 0, 0, 0),
    rejected=(8,),
    hit=m.Hit.HIT,
)


def hello(role: m.Role, host: str) -> m.Hello:
    """How a node introduces itself."""
    fingerprint = m.Fingerprint(100, "", (2,))
    return m.Hello(
        *(m.PROTOCOL_VERSION, role, "", fingerprint, 100, 100, "models/x", "float32", "cpu"),
        *(9, 9, 1, host),
    )


@dataclass
class Script:
    """Writes down what happened. Times are milliseconds of the coordinator's clock.

    ahead_ms  how far the nodes' clock is ahead of it
    host      where they run
    """

    ahead_ms: float = 0.0
    host: str = HOST
    recording: Recording = field(default_factory=lambda: Recording(0))

    def __post_init__(self) -> None:
        self._times = {b"": 0, TARGET: 0, DRAFTER: 0}
        self._watches: dict[bytes, Stopwatch] = {}
        self._recorders: dict[bytes, Recorder] = {}
        for node in self._times:
            self._watches[node] = Stopwatch(lambda node=node: self._times[node])  # type: ignore[misc]
            self._recorders[node] = Recorder()
            self.at(node, 0)
            self._watches[node].record(self._recorders[node])
        for role, node in ((m.Role.TARGET, TARGET), (m.Role.DRAFTER, DRAFTER)):
            self.recording.hellos[node] = encode(hello(role, self.host))

    def at(self, node: bytes, ms: float) -> Stopwatch:
        """The stopwatch of a node (of none: of the coordinator) at that time."""
        self._times[node] = round((ms + (self.ahead_ms if node else 0)) * MS)
        return self._watches[node]

    def phase(self, node: bytes, ms: float, phase: Phase) -> None:
        """A phase begins."""
        self.at(node, ms).enter(phase)

    def forward(self, node: bytes, start_ms: float, end_ms: float) -> None:
        """A forward of three rows, most of it in the model."""
        self.phase(node, start_ms, Phase.PREPARE)
        self.at(node, start_ms).forward(3, 3)
        self.phase(node, start_ms + 0.1, Phase.MODEL)
        self.phase(node, end_ms - 0.1, Phase.CHOOSE)
        self.phase(node, end_ms, Phase.DECIDE)

    def launches(self, node: bytes, start_ms: float, end_ms: float) -> None:
        """A forward of three rows on a device beside the host: prepared before `start_ms`, it is at
        work from then to `end_ms`. The host gives it the rows for 0.1 ms and waits."""
        self.phase(node, start_ms - 0.1, Phase.PREPARE)
        self.at(node, start_ms - 0.1).forward(3, 3)
        self.phase(node, start_ms, Phase.MODEL)
        self.at(node, start_ms).device_begins()
        self.at(node, start_ms).device_ends_in((end_ms - start_ms) / 1e3)
        self.phase(node, start_ms + 0.1, Phase.WAIT)

    def sends(self, node: bytes, message: m.Message, left_ms: float, came_ms: float) -> None:
        """A node sends a message to the coordinator, which reads it then."""
        frame = encode(message)
        self.phase(node, left_ms - 0.01, Phase.SEND)
        self.at(node, left_ms).sends(frame)
        self.phase(node, left_ms + 0.01, Phase.DECIDE)
        self.phase(b"", came_ms - 0.01, Phase.DECODE)
        self.recording.frames.append(Passed(round(came_ms * MS), node, is_sent=False, frame=frame))

    def tells(self, node: bytes, message: m.Message, left_ms: float, came_ms: float) -> None:
        """The coordinator sends a message to a node, which reads it then."""
        frame = encode(message)
        self.phase(b"", left_ms - 0.01, Phase.SEND)
        self.recording.frames.append(Passed(round(left_ms * MS), node, is_sent=True, frame=frame))
        self.phase(b"", left_ms + 0.01, Phase.WAIT)
        self.phase(node, came_ms - 0.01, Phase.DECODE)
        self.at(node, came_ms).received(frame)
        self.phase(node, came_ms + 0.01, Phase.DECIDE)

    def beats(self, node: bytes, way_ms: float, back_ms: float) -> None:
        """A heartbeat to a node and one back, the ways taking so long."""
        start_ms, held_ms = 1.0, 50.0
        heard_ms = start_ms + way_ms
        came_ms = heard_ms + held_ms + back_ms
        clock_us = round((heard_ms + held_ms + self.ahead_ms) * 1e3)
        stamps = {"stamp_us": round(start_ms * 1e3), "held_us": round(held_ms * 1e3)}
        beat = m.Heartbeat((), 1, "", clock_us=clock_us, **stamps)
        passed = Passed(round(came_ms * MS), node, is_sent=False, frame=encode(beat))
        self.recording.beats.setdefault(node, []).append(passed)

    def finished(self) -> Recording:
        """The recording, with what the nodes have recorded."""
        self.recording.own = self._recorders[b""].take()
        for node in (TARGET, DRAFTER):
            self.recording.parts[node] = [m.TracePart(1, 0, self._recorders[node].take())]
        return self.recording


def one_round(ahead_ms: float = 0.0, host: str = HOST) -> Script:
    """Opened at 10 ms; the drafter drafts from 12 to 20; verified from 24 to 34; read at 36.

    Every way takes a millisecond, and so does the draft's stay in the coordinator.
    """
    script = Script(ahead_ms, host)
    script.tells(TARGET, OPEN, 10, 11)
    script.phase(TARGET, 11.5, Phase.WAIT)
    script.tells(DRAFTER, OPEN, 10.05, 11)
    script.phase(DRAFTER, 11.5, Phase.WAIT)
    script.forward(DRAFTER, 12, 20)
    script.sends(DRAFTER, DRAFT, 20.5, 21.5)
    script.phase(DRAFTER, 21, Phase.WAIT)
    script.tells(TARGET, DRAFT, 22.5, 23.5)
    script.forward(TARGET, 24, 34)
    script.sends(TARGET, VERDICT, 35, 36)
    script.phase(TARGET, 35.5, Phase.WAIT)
    script.tells(DRAFTER, VERDICT, 36.1, 37)
    script.phase(DRAFTER, 37.5, Phase.WAIT)
    script.phase(DRAFTER, 50, Phase.DECIDE)
    script.phase(TARGET, 50, Phase.DECIDE)
    return script


def round_on_devices() -> Script:
    """`one_round`, where devices compute: the drafter's from 12 to 20, the target's from 24 to 34.

    The target decides under its pass for 3 ms, and the drafter under its step for 2.
    """
    script = Script()
    script.tells(TARGET, OPEN, 10, 11)
    script.phase(TARGET, 11.5, Phase.WAIT)
    script.tells(DRAFTER, OPEN, 10.05, 11)
    script.phase(DRAFTER, 11.5, Phase.WAIT)
    script.launches(DRAFTER, 12, 20)
    script.phase(DRAFTER, 14, Phase.DECIDE)
    script.phase(DRAFTER, 16, Phase.WAIT)
    script.sends(DRAFTER, DRAFT, 20.5, 21.5)
    script.phase(DRAFTER, 21, Phase.WAIT)
    script.tells(TARGET, DRAFT, 22.5, 23.5)
    script.launches(TARGET, 24, 34)
    script.phase(TARGET, 30, Phase.DECIDE)
    script.phase(TARGET, 33, Phase.WAIT)
    script.sends(TARGET, VERDICT, 35, 36)
    script.phase(TARGET, 35.5, Phase.WAIT)
    script.tells(DRAFTER, VERDICT, 36.1, 37)
    script.phase(DRAFTER, 37.5, Phase.WAIT)
    script.phase(DRAFTER, 50, Phase.DECIDE)
    script.phase(TARGET, 50, Phase.DECIDE)
    return script
