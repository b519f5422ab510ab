"""The state machine of heads beside that of their target, in one process (pure).

Theory of operation
-------------------
A head on a device of its own and a head in the target's process have the same state machine
(`drafter_node`) and the same messages. Here the messages are handed over within the process:

    Verdict, Features of the target's machine   go to the coordinator, and to the heads as well
    Draft of the heads                          goes to the target's machine
    Open                                        opens the text at both, as the target has it
    Tick                                        the heads draft first, then the target verifies
    Computed, Proposed                          are handled in full at once, because the next
                                                forward depends on them

Both take turns on one device. So the heads do not draft as far as they can: after each verdict they
go on as long as a step costs less than it saves (`step_pays`), or under a policy that does not
weigh costs until a chain has as many drafts as a pass verifies; then it is the target's turn. Heads
that are hardly ever right do not draft at all (`drafting_pays`), except for a step now and then,
which shows whether they have become better.

Actions for the heads are wrapped as `ForHeads`, and their results are `HeadsDone`. Heads that fail
(`HeadsFailed`) get no more actions and no more messages; the target goes on alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from drafter_node import compute as drafter
from drafter_node.drafting import Drafting
from drafter_node.statistics import Known
from node.dispatcher import Dispatcher
from node.economics import FIRST_OF_HEADS, drafting_pays, step_pays, token_s
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
from target_node.statistics import Known as TargetKnown
from target_node.verifying import Verifying

TRY_AGAIN_AFTER = 32  # number of tokens without a draft of the heads


@dataclass(frozen=True, slots=True)
class ForHeads:
    """Perform this action with the heads' model and cache."""

    action: MoveRows | CopyPrefix | Wipe | drafter.Compute


@dataclass(frozen=True, slots=True)
class HeadsFailed:
    """An action for the heads has failed: they draft no more.

    was_step  True: the action was a Compute
    """

    was_step: bool


@dataclass(frozen=True, slots=True)
class HeadsDone:
    """An action for the heads is done; `proposed` is the result of a Compute."""

    proposed: drafter.Proposed | None = None


Event = Arrived | Tick | Afterwards | target.Computed | HeadsDone | HeadsFailed
Action = target.Action | ForHeads
Targets = Dispatcher[Verifying, target.Computed, target.Action]
Heads = Dispatcher[Drafting, drafter.Proposed, drafter.Action]
Result = TypeVar("Result")
Done = TypeVar("Done")


class Home:
    """The state machine of a target with heads; takes the place of `node.dispatcher.Dispatcher`.

    known      properties and figures of the heads
    of_target  figures of the target, acceptance rates included
    layers     layers of the target whose features the heads read
    """

    def __init__(
        self,
        targets: Targets,
        heads: Heads,
        *,
        known: Known,
        of_target: TargetKnown,
        layers: tuple[int, ...],
    ) -> None:
        self._targets = targets
        self._heads = heads
        self._known = known
        self._costs = of_target.costs
        self._acceptance = of_target.acceptance
        self._layers = layers
        self._told: set[int] = set()  # texts whose features a drafter elsewhere wants as well
        self._drafted_at: dict[int, int] = {}  # a text's length when heads last began to draft
        self._is_busy = False  # a Compute is running
        self._place = Place.APART  # where the target's last pass ran
        self._have_failed = False  # the heads have failed, and get no more messages and actions

    @property
    def texts(self) -> Mapping[int, Verifying]:
        """Return the target's machines of the open texts, by session."""
        return self._targets.texts

    @property
    def marks(self) -> tuple[SessionMark, ...]:
        """Return how far each open text has come here, for a heartbeat."""
        return self._targets.marks

    def story(self, session: int | None = None) -> str:
        """Return the last events of a text, or of all, at target and heads, in one line."""
        stories = self._targets.story(session), self._heads.story(session)
        return "; at the heads ".join(filter(None, stories))

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        """Handle an event at `now` (seconds, monotonic); returns the actions that it asks for."""
        match event:
            case Tick():
                return () if self._is_busy else self._tick(now)
            case Afterwards():
                return ()
            case HeadsDone(proposed):
                if proposed is None:
                    return ()
                self._is_busy = False
                return self._of_heads(_both(self._heads, proposed, now), now)
            case HeadsFailed(was_step):
                self._have_failed = True
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
                return (*said, *self._tell_heads(event, now))
        return self._of_target(self._targets.handle(event, now), now)

    # -- texts ------------------------------------------------------------------------------------

    def _on_open(self, message: Open, now: float) -> Sequence[Action]:
        session = message.session
        if message.layers:
            self._told.add(session)
        else:
            self._told.discard(session)
        if not self._drafts_for(message):
            return self._of_target(self._targets.handle(Arrived(message), now), now)
        opened = replace(message, layers=self._layers)
        actions = self._of_target(self._targets.handle(Arrived(opened), now), now)
        text = self.texts.get(session)
        if text is None or text.opened is not opened:
            return actions  # the Open was ignored
        return (*actions, *self._open_for_heads(text, now))

    def _drafts_for(self, message: Open) -> bool:
        """True if the heads draft for a text; by a classical rule only if no other source does.

        If a drafter reads other features than the heads, the target's features are sent to it
        alone.
        """
        policy, is_coupled = message.policy, message.rule is Rule.COUPLED
        if self._have_failed:
            return False
        if not policy.num_speculative_tokens or message.layers not in ((), self._layers):
            return False
        return is_coupled or not (policy.has_drafter or message.lookup is not None)

    def _open_for_heads(self, text: Verifying, now: float) -> Sequence[Action]:
        """Open a text at the heads, with all tokens that the target has; return actions."""
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
        return self._tell_heads(Arrived(told), now)

    def _tell_heads(self, event: Arrived | Tick, now: float) -> Sequence[Action]:
        """Give the heads an event; returns the actions that follow."""
        if self._have_failed:
            return ()
        return self._of_heads(self._heads.handle(event, now), now)

    # -- turns ------------------------------------------------------------------------------------

    def _tick(self, now: float) -> Sequence[Action]:
        """Let the heads draft if that is worth it, else the target; returns actions."""
        said: Sequence[Action] = ()
        if self._is_heads_turn:
            said = self._tell_heads(Tick(), now)
            if self._is_busy:
                return said
        return (*said, *self._of_target(self._targets.handle(Tick(), now), now))

    @property
    def _is_heads_turn(self) -> bool:
        if self._have_failed:
            return False
        return any(self._is_worth_drafting(text) for text in self._heads.texts.values())

    def _is_worth_drafting(self, text: Drafting) -> bool:
        """True if one more draft step for a text is worth its time."""
        if text.rests or not (tips := text.tips):
            return False
        served = self.texts.get(text.opened.session)
        if served is None or served.finished:
            return False
        policy, step_s = served.opened.policy, self._known.steps.of(1)
        if tips[0].key == text.tree.root:
            return not policy.prices_waits or self._drafting_pays(served, step_s)
        if not policy.prices_waits and policy.branches == 1:
            return True  # no tips are left at the end of its window
        return step_pays(tips[0].chance, step_s, self._costs.pass_s(self._place))

    def _drafting_pays(self, text: Verifying, step_s: float) -> bool:
        """True if the heads should draft for this text; then note where they draft.

        They are right often enough, or were not tried on this text for long.
        """
        session, length = text.opened.session, len(text.tree.text)
        num_texts = sum(not other.finished for other in self.texts.values())
        passes = self._costs.passes(num_texts, self._place)
        each_s = token_s(passes.of(num_texts), num_texts, passes)
        p = self._acceptance.chance(FIRST_OF_HEADS)
        drafted_at = self._drafted_at.get(session, length - TRY_AGAIN_AFTER)
        # After a new Open a text may be shorter than it was.
        is_tried = 0 < length - drafted_at < TRY_AGAIN_AFTER
        if is_tried and not drafting_pays(p, step_s, num_texts * each_s):
            return False
        self._drafted_at[session] = length
        return True

    # -- routing of actions -----------------------------------------------------------------------

    def _of_target(self, actions: Iterable[target.Action], now: float) -> Sequence[Action]:
        """Route the target's actions: give verdicts and features to the heads, return the rest."""
        done: list[Action] = []
        for action in actions:
            match action:
                case Send(Verdict() | Features() as message):
                    session = message.session
                    if isinstance(message, Verdict) or session in self._told:
                        done.append(action)
                    done += self._tell_heads(Arrived(_for_heads(message)), now)
                    continue
                case target.Compute():
                    self._is_busy, self._place = True, action.place
            done.append(action)
        return done

    def _of_heads(self, actions: Iterable[drafter.Action], now: float) -> Sequence[Action]:
        """Route the heads' actions: drafts to the target's machine, the rest to the executor."""
        done: list[Action] = []
        for action in actions:
            match action:
                case Send(Draft() as message):
                    done += self._of_target(self._targets.handle(Arrived(message), now), now)
                case Send() | Allocate() | WaitUntil():
                    pass  # within the process no message is lost, so no repair is needed
                case drafter.Compute():
                    self._is_busy = True
                    done.append(ForHeads(action))
                case MoveRows() | CopyPrefix() | Wipe():
                    done.append(ForHeads(action))
        return done

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        self._targets.check()
        if self._have_failed:
            return
        self._heads.check()
        for session, text in self._heads.texts.items():
            if session in self.texts and not self.texts[session].finished:
                assert text.tree.text.tokens == self.texts[session].tree.text.tokens


def _both(
    dispatcher: Dispatcher[Any, Result, Done], result: Result, now: float
) -> Sequence[SharedAction | Done]:
    """Let a dispatcher handle a result, and right after that `Afterwards`; returns all actions."""
    return (*dispatcher.handle(result, now), *dispatcher.handle(Afterwards(), now))


def _for_heads(message: Verdict | Features) -> Verdict | Features:
    """Return the message as the heads get it: their target takes whatever drafts are there."""
    return replace(message, num_awaited=0) if isinstance(message, Verdict) else message


def policy_at_home(policy: Policy) -> Policy:
    """Return the policy for heads whose target waits for them: they draft what a pass verifies."""
    return replace(
        without_prices(policy),
        window=max(1, policy.num_speculative_tokens),
        launch_min=0,
        launch_hit=0,
        group=1,
    )
