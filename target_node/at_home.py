"""A drafter at home: its machine beside that of the target, in one process (pure).

Theory of operation
-------------------
A drafter in the target's process has the state machine of every drafter (`drafter_node`), and the
same messages. Here they are handed over within the process:

    Open, Close, Heartbeat, Welcome   of the coordinator, are for both, the target first
    Verdict, Features                 of the target, go on to the coordinator and to the drafter
    Draft                             of the drafter, goes to the target's machine

Both use one device, so they take turns: `are_worth_drafting` (`deciding.py`) says whose turn it is
at each Tick. Computed and Proposed are handled in full at once, because the next forward depends
on them.

Actions for the drafter are wrapped as `ForDrafter`, and their results are `DrafterDone`. A drafter
that fails (`DrafterFailed`) gets no more actions and no more messages; the target goes on alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from drafter_node import compute as drafter
from drafter_node.drafting import Drafting
from drafter_node.known import Known
from node.dispatcher import Dispatcher
from node.economics import FIRST_OF_HEADS
from node.events import (
    Afterwards,
    Allocate,
    Arrived,
    CopyPrefix,
    MoveRows,
    Send,
    SharedAction,
    Tick,
    WaitUntil,
    Wipe,
)
from node.placing import Place
from proto.messages import (
    Close,
    Draft,
    Features,
    Heartbeat,
    Open,
    Policy,
    Rule,
    SessionMark,
    Verdict,
    Welcome,
)
from proto.policies import without_prices
from target_node import compute as target
from target_node.deciding import HomeStep, are_worth_drafting, least_at_home
from target_node.known import Known as TargetKnown
from target_node.verifying import Verifying


@dataclass(frozen=True, slots=True)
class ForDrafter:
    """Perform this action with the drafter's model and cache."""

    action: MoveRows | CopyPrefix | Wipe | drafter.Compute


@dataclass(frozen=True, slots=True)
class DrafterDone:
    """An action for the drafter is done; `proposed` is the result of a Compute."""

    proposed: drafter.Proposed | None = None


@dataclass(frozen=True, slots=True)
class DrafterFailed:
    """An action for the drafter has failed: it drafts no more.

    was_step  True: the action was a Compute
    """

    was_step: bool


Event = Arrived | Tick | Afterwards | target.Computed | DrafterDone | DrafterFailed
Action = target.Action | ForDrafter
Targets = Dispatcher[Verifying, target.Computed, target.Action]
Drafters = Dispatcher[Drafting, drafter.Proposed, drafter.Action]
Result = TypeVar("Result")
Done = TypeVar("Done")


class Home:
    """The state machine of a target and a drafter; takes the place of `node.dispatcher.Dispatcher`.

    known      properties and figures of the drafter
    of_target  figures of the target, acceptance rates included
    layers     layers of the target whose features the drafter reads; (): it reads none
    """

    def __init__(
        self,
        targets: Targets,
        drafters: Drafters,
        *,
        known: Known,
        of_target: TargetKnown,
        layers: tuple[int, ...],
    ) -> None:
        self._targets = targets
        self._drafters = drafters
        self._known = known
        self._costs = of_target.costs
        self._acceptance = of_target.acceptance
        self._layers = layers
        self._told: set[int] = set()  # texts whose features a drafter elsewhere wants as well
        self._drafted_at: dict[int, int] = {}  # a text's length when its root was last expanded
        self._is_busy = False  # a Compute is running
        self._place = Place.APART  # where the target's last pass ran
        self._has_failed = False  # the drafter has, and gets no more messages and actions

    @property
    def texts(self) -> Mapping[int, Verifying]:
        """Return the target's machines of the open texts, by session."""
        return self._targets.texts

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return how far each open text has come here, for a heartbeat."""
        return self._targets.marks

    def story(self, session: int | None = None) -> str:
        """Return the last events of a text, or of all, at both, in one line."""
        stories = self._targets.story(session), self._drafters.story(session)
        return "; at the drafter ".join(filter(None, stories))

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        """Handle an event at `now` (seconds, monotonic); returns the actions that it asks for."""
        match event:
            case Tick():
                return () if self._is_busy else self._tick(now)
            case Afterwards():
                return ()
            case DrafterDone(proposed):
                if proposed is None:
                    return ()
                self._is_busy = False
                return self._of_drafter(_both(self._drafters, proposed, now), now)
            case DrafterFailed(was_step):
                self._has_failed = True
                self._is_busy = self._is_busy and not was_step
                return ()
            case target.Computed():
                self._is_busy = False
                return self._of_target(_both(self._targets, event, now), now)
            case Arrived(Open() as message):
                return self._on_open(message, now)
            case Arrived(message) if isinstance(message, Close | Heartbeat | Welcome):
                if isinstance(message, Close):
                    self._told.discard(message.session)
                    self._drafted_at.pop(message.session, None)
                said = self._of_target(self._targets.handle(event, now), now)
                return (*said, *self._tell_drafter(event, now))
        return self._of_target(self._targets.handle(event, now), now)

    # -- texts ------------------------------------------------------------------------------------

    def _on_open(self, message: Open, now: float) -> Sequence[Action]:
        session = message.session
        if message.layers:
            self._told.add(session)
        else:
            self._told.discard(session)
        if not self._drafts_for(message):
            if session in self._drafters.texts:
                # It has drafted for the last life of the text, whose features it could read.
                self._tell_drafter(Arrived(Close(session, "features of other layers")), now)
            return self._of_target(self._targets.handle(Arrived(message), now), now)
        opened = replace(message, layers=self._layers)
        actions = self._of_target(self._targets.handle(Arrived(opened), now), now)
        text = self.texts.get(session)
        if text is None or text.opened is not opened:
            return actions  # the Open was ignored
        return (*actions, *self._open_for_drafter(text, now))

    def _drafts_for(self, message: Open) -> bool:
        """True if the drafter drafts for a text; by a classical rule only if no other source does.

        If a drafter elsewhere reads other features, the target's features are sent to it alone.
        """
        policy, is_coupled = message.policy, message.rule is Rule.COUPLED
        if self._has_failed:
            return False
        if not policy.num_speculative_tokens or message.layers not in ((), self._layers):
            return False
        return is_coupled or not (policy.has_drafter or message.lookup is not None)

    def _open_for_drafter(self, text: Verifying, now: float) -> Sequence[Action]:
        """Open a text at the drafter, with all tokens that the target has; return actions."""
        opened, tokens = text.opened, tuple(text.tree.text.tokens)
        if len(tokens) >= opened.limits.max_len:
            return ()
        told = replace(
            opened,
            tokens=tokens,
            policy=policy_at_home(opened.policy),
            attempt=text.drafts.attempt,
            lookup=None,
            layers=(),
        )
        return self._tell_drafter(Arrived(told), now)

    def _tell_drafter(self, event: Arrived | Tick, now: float) -> Sequence[Action]:
        """Give the drafter an event; returns the actions that follow."""
        if self._has_failed:
            return ()
        return self._of_drafter(self._drafters.handle(event, now), now)

    # -- turns ------------------------------------------------------------------------------------

    def _tick(self, now: float) -> Sequence[Action]:
        """Let the drafter draft if that is worth it, else the target compute; returns actions."""
        said: Sequence[Action] = ()
        steps = self._steps()
        if self._are_worth_it(steps):
            said = self._tell_drafter(Tick(), now)
            if self._is_busy:
                self._note_begun(steps, said)
                return said
        return (*said, *self._of_target(self._targets.handle(Tick(), now), now))

    def _steps(self) -> Sequence[HomeStep]:
        """Return the next draft step of each text that has one to make."""
        if self._has_failed:
            return ()
        return [step for text in self._drafters.texts.values() if (step := self._step(text))]

    def _are_worth_it(self, steps: Sequence[HomeStep]) -> bool:
        """True if some of these steps are worth their time; False: it is the target's turn."""
        prices = self._costs.at(self._place)
        return are_worth_drafting(steps, self._num_texts, self._p, self._step_s, prices)

    def _note_begun(self, steps: Sequence[HomeStep], begun: Sequence[Action]) -> None:
        """Note how long the texts are whose first step below a committed token was begun."""
        computes = [one.action for one in begun if isinstance(one, ForDrafter)]
        parts = [part for one in computes if isinstance(one, drafter.Compute) for part in one.parts]
        sessions = {part.opened.session for part in parts}
        for step in steps:
            if step.is_first and step.session in sessions:
                self._drafted_at[step.session] = len(self.texts[step.session].tree.text)

    def _for_drafter(self, message: Verdict | Features) -> Verdict | Features:
        """Return the message as the drafter gets it: how far to draft before the next pass.

        The target takes whatever drafts are there then, so it awaits no number of them.
        """
        if isinstance(message, Features):
            return message
        policy = self.texts[message.session].opened.policy
        known = self._num_texts, self._p, self._step_s, self._costs.at(self._place)
        least = least_at_home(policy, *known)
        awaited = policy.num_speculative_tokens if least else 0
        return replace(message, num_awaited=awaited, least_chance=min(1.0, least))

    @property
    def _num_texts(self) -> int:
        return max(1, sum(not text.finished for text in self.texts.values()))

    @property
    def _p(self) -> float:
        return self._acceptance.chance(FIRST_OF_HEADS)

    @property
    def _step_s(self) -> float:
        return self._known.steps.of(1)

    def _step(self, text: Drafting) -> HomeStep | None:
        """Return the next draft step of a text; None: there is none to make."""
        session = text.opened.session
        served = self.texts.get(session)
        if text.rests or served is None or served.finished or not (tips := text.tips):
            return None
        tip, drafted_at = tips[0], self._drafted_at.get(session)
        num_since = None if drafted_at is None else len(served.tree.text) - drafted_at
        is_first = tip.key == text.tree.root
        return HomeStep(session, served.opened.policy, tip.chance, is_first, num_since)

    # -- routing of actions -----------------------------------------------------------------------

    def _of_target(self, actions: Iterable[target.Action], now: float) -> Sequence[Action]:
        """Route the target's actions: verdicts and features to the drafter; return the rest."""
        done: list[Action] = []
        for action in actions:
            match action:
                case Send(Verdict() | Features() as message):
                    session = message.session
                    if isinstance(message, Verdict) or session in self._told:
                        done.append(action)
                    done += self._tell_drafter(Arrived(self._for_drafter(message)), now)
                    continue
                case target.Compute():
                    self._is_busy, self._place = True, action.place
            done.append(action)
        return done

    def _of_drafter(self, actions: Iterable[drafter.Action], now: float) -> Sequence[Action]:
        """Route the drafter's actions: drafts to the target's machine, the rest to the executor."""
        done: list[Action] = []
        for action in actions:
            match action:
                case Send(Draft() as message):
                    done += self._of_target(self._targets.handle(Arrived(message), now), now)
                case Send() | Allocate() | WaitUntil():
                    pass  # within the process no message is lost, so no repair is needed
                case drafter.Compute():
                    self._is_busy = True
                    done.append(ForDrafter(action))
                case MoveRows() | CopyPrefix() | Wipe():
                    done.append(ForDrafter(action))
        return done

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self._targets.check()
        if self._has_failed:
            return
        self._drafters.check()
        for session, text in self._drafters.texts.items():
            if session in self.texts and not self.texts[session].finished:
                assert text.tree.text.tokens == self.texts[session].tree.text.tokens


def _both(
    dispatcher: Dispatcher[Any, Result, Done], result: Result, now: float
) -> Sequence[SharedAction | Done]:
    """Let a dispatcher handle a result, and right after that `Afterwards`; returns all actions."""
    return (*dispatcher.handle(result, now), *dispatcher.handle(Afterwards(), now))


def policy_at_home(policy: Policy) -> Policy:
    """Return the policy for a drafter whose target waits for it: it drafts what a pass verifies."""
    return replace(
        without_prices(policy),
        window=max(1, policy.num_speculative_tokens),
        launch_min=0,
        launch_accepted=0,
        group=1,
    )
