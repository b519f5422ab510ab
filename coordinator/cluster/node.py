"""What is known of one node process (pure)."""

from dataclasses import dataclass, field
from enum import Enum, auto

from coordinator.cluster.conduct import Conduct
from coordinator.cluster.round_trips import RoundTrips
from coordinator.text.session_events import NodeId
from proto.errors import printable
from proto.liveness import FaultDetector, pass_limit_s
from proto.messages import Heartbeat, Hello, Role, SessionMark


def place_of(node_id: NodeId) -> NodeId:
    """Return the name of a node's place, which processes have one after another.

    The first process in the place target-1 is called target-1, the next ones target-1.1, ...
    """
    return node_id.partition(b".")[0]


class Health(Enum):
    """Whether a node is expected, ready, silent or gone (see the top of this file)."""

    EXPECTED = auto()
    READY = auto()
    SILENT = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class UnderWay:
    """The forward pass that a node is in, by its last heartbeat; 0 rows: it is in none.

    took_s, expected_s  for how long, and how long it usually takes there (0: not known)
    """

    num_rows: int = 0
    took_s: float = 0.0
    expected_s: float = 0.0

    @classmethod
    def of(cls, beat: Heartbeat) -> "UnderWay":
        """Return the pass that a heartbeat tells of."""
        return cls(beat.pass_rows, beat.pass_us / 1e6, beat.pass_expected_us / 1e6)

    @property
    def is_overdue(self) -> bool:
        """True if it takes so long that it may never end."""
        return bool(self.num_rows) and self.took_s > pass_limit_s(self.expected_s)

    @property
    def words(self) -> str:
        """Return the pass and its time, for people."""
        usual = f"{self.expected_s:.1f} s are usual" if self.expected_s else "no time is known"
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows:,} rows"
        return f"its pass of {rows} has not ended in {self.took_s:.0f} s ({usual})"


@dataclass(slots=True)
class Node:
    """What is known of one node process.

    detector  measures for how long no message has come from it
    hello     its Hello message; None until it was accepted
    source    its source number in drafts and acks; -1 until it was accepted
    state     what the node says it is doing, for people
    progress  number of forward passes that it has finished
    marks     the sessions that it has open, by its last heartbeat
    under_way  the forward pass that it is in, by its last heartbeat
    times_us  time in each phase of its loop while no device computed, by its last heartbeat
    beside_us  the same while a device computed
    num_uncaptured  decode passes that fitted no captured CUDA graph, by its last heartbeat
    num_overruns    forwards that took longer than its simulated device, by its last heartbeat
    late_us         the sum of these extra times
    num_bad_frames  frames from it that could not be decoded, or were outside of their text
    num_garbled     those of them that could not be decoded
    conduct         when it was told of the others
    round_trips     how long a message to it and its answer take
    is_again        it replaces a node that has ended
    is_by_hand      a user starts it; another process may take its place under the same name
    is_awaited      no text begins before the node is there
    has_rival       a process that was refused has sent messages under its name
    joined_at       when it was accepted
    ready_at        when its first heartbeat came after it was accepted
    forerunner      the Hello of the process that it replaces; None: there was none
    news_at         when what it does has changed last
    has_ended       its process has ended
    failure         why it was given up before its process ended, for people; "": it was not
    num_forwards_before, num_overruns_before, late_us_before  sums of the nodes that it replaces
    """

    role: Role
    id: NodeId
    detector: FaultDetector
    health: Health = Health.EXPECTED
    hello: Hello | None = None
    source: int = -1
    state: str = "starting"
    progress: int = 0
    marks: tuple[SessionMark, ...] = ()
    under_way: UnderWay = UnderWay()
    times_us: tuple[int, ...] = ()
    beside_us: tuple[int, ...] = ()
    num_uncaptured: int = 0
    num_overruns: int = 0
    late_us: int = 0
    num_bad_frames: int = 0
    num_garbled: int = 0
    conduct: Conduct = field(default_factory=Conduct)
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    is_again: bool = False
    is_by_hand: bool = False
    is_awaited: bool = True
    has_rival: bool = False
    joined_at: float | None = None
    ready_at: float | None = None
    num_forwards_before: int = 0
    forerunner: Hello | None = None
    news_at: float = 0.0
    has_ended: bool = False
    failure: str = ""
    num_overruns_before: int = 0
    late_us_before: int = 0

    @property
    def place(self) -> NodeId:
        """Return the name of its place, which it shares with the processes before it."""
        return place_of(self.id)

    @property
    def known_hello(self) -> Hello | None:
        """Return its Hello, else that of the process that it replaces; None: there was none."""
        return self.hello or self.forerunner

    @property
    def num_lanes(self) -> int:
        """Return how many texts the node has room for at once; 0 before it was accepted."""
        return self.hello.num_lanes if self.hello is not None else 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the target's layers whose hidden states this drafter reads; (): it is no head."""
        return self.hello.layers if self.hello is not None else ()

    def may_say(self, hello: Hello) -> bool:
        """True if a node may introduce itself so: a process that was accepted is what it was.

        A node started by hand may be another process under the same name.
        """
        return self.is_by_hand or self.hello in (None, hello)

    def is_replaced_by(self, hello: Hello) -> bool:
        """True if the process that sends this Hello replaces another one."""
        return self.is_again if self.hello is None else self.hello != hello


def on_host(host: str) -> str:
    """Return " on HOST" with the host that a node names, printable; "" if it names none."""
    name = printable(host[:80])
    return f" on {name}" if name else ""


def begin_anew(node: Node) -> None:
    """Reset a node's figures, because a new process has taken its place; keep the old sums."""
    node.has_rival = False
    node.round_trips = RoundTrips()
    node.num_bad_frames = node.num_garbled = 0
    node.conduct = Conduct()
    node.num_forwards_before += node.progress
    node.num_overruns_before += node.num_overruns
    node.late_us_before += node.late_us
    node.progress = node.num_overruns = node.late_us = 0
