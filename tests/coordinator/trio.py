"""Session, drafter and target joined by hand: scripted choices, no process, no model."""

from collections.abc import Mapping, Sequence

from coordinator.text import session_events as s
from coordinator.text.metrics import SessionCounts
from coordinator.text.session import Session
from drafter_node import compute as d
from drafter_node.drafting import Drafting
from drafter_node.known import Known as DrafterKnown
from drafter_node.scheduling import Schedule as DrafterSchedule
from node.dispatcher import Dispatcher
from node.events import Afterwards, Arrived, Send, Tick
from node.lanes import Lanes
from proto.messages import Limits, Message, Policy, Role, SamplingSpec, Verdict
from target_node import compute as t
from target_node.known import Known as TargetKnown
from target_node.scheduling import Schedule as TargetSchedule
from target_node.verifying import Verifying

DRAFTER, TARGET = b"drafter-1", b"target-1"
NUM_SLOTS = 256
MAX_STEPS = 10_000
LIKELY = -0.1


class Trio:
    """One text on the real machines.

    target, drafter  the token that each chooses at a position of the text
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        target: Mapping[int, int],
        drafter: Mapping[int, int],
        policy: Policy,
        limits: Limits,
    ) -> None:
        self.emitted: list[s.Emit] = []
        self.finish: s.Finish | None = None
        self._target_says = target
        self._drafter_says = drafter
        self._session = Session(
            1, bytes(16), tuple(prompt), sampling=SamplingSpec(), policy=policy, limits=limits
        )
        self._drafting = _drafter(Lanes(1, NUM_SLOTS))
        self._verifying = _target(Lanes(1, NUM_SLOTS))
        self._steps = 0

    @property
    def counts(self) -> SessionCounts:
        """What the session has counted."""
        return self._session.counts

    def run(self) -> list[s.Emit]:
        """From the first Open to the end; what every pass emitted."""
        self._tell(s.Started())
        self._tell(s.NodeJoined(TARGET, Role.TARGET))
        self._tell(s.NodeJoined(DRAFTER, Role.DRAFTER))
        while self.finish is None:
            self._steps += 1
            assert self._steps < MAX_STEPS, "the text does not end"
            # The drafter is so fast that it is always as far ahead as its window allows.
            while self._step_drafter(Tick()):
                pass
            self._step_target(Tick())
        return self.emitted

    def _tell(self, event: s.Event) -> None:
        for action in self._session.handle(event, 0.0):
            match action:
                case s.Send(node, message) if node == DRAFTER:
                    self._step_drafter(Arrived(message))
                case s.Send(_, message):
                    self._step_target(Arrived(message))
                case s.Emit():
                    self.emitted.append(action)
                case s.Finish():
                    self.finish = action
                case s.Fail(detail):
                    raise AssertionError(detail)

    def _step_drafter(self, event: Arrived | Tick | Afterwards | d.Proposed) -> bool:
        """Whether it computed."""
        has_computed = False
        for action in self._drafting.handle(event, 0.0):
            match action:
                case d.Compute():
                    has_computed = True
                    self._step_drafter(self._proposal(action))
                    self._step_drafter(Afterwards())
                case Send(message):
                    self._step_target(Arrived(message))
        self._drafting.check()
        return has_computed

    def _proposal(self, compute: d.Compute) -> d.Proposed:
        (part,) = compute.parts
        children = tuple(
            d.Children((self._drafter_says[position],), (LIKELY,)) for position in part.positions
        )
        return d.Proposed(compute.ticket, (children,), 0)

    def _step_target(self, event: Arrived | Tick | Afterwards | t.Computed) -> None:
        for action in self._verifying.handle(event, 0.0):
            match action:
                case t.Compute(ticket=ticket, parts=(part,)):
                    tokens = tuple(self._target_says[position] for position in part.positions)
                    self._step_target(t.Computed(ticket, (t.Outcome(tokens),), 0))
                    self._step_target(Afterwards())
                case Send(message):
                    self._heard_from_target(message)
        self._verifying.check()

    def _heard_from_target(self, message: Message) -> None:
        assert isinstance(message, Verdict)
        self._step_drafter(Arrived(message))
        self._tell(s.VerdictArrived(message))


def _drafter(lanes: Lanes) -> Dispatcher[Drafting, d.Proposed, d.Action]:
    known = DrafterKnown(max_len=NUM_SLOTS)
    return Dispatcher(lanes, DrafterSchedule(lanes, known, num_per_pass=1))


def _target(lanes: Lanes) -> Dispatcher[Verifying, t.Computed, t.Action]:
    return Dispatcher(lanes, TargetSchedule(lanes, TargetKnown(), num_per_pass=1))
