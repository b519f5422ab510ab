"""What a policy makes of given costs and a given acceptance: the real machines, in virtual time."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from proto.messages import Limits, Message, Policy, Role, Verdict
from rehearsal.acceptance import Ranked, Trace
from rehearsal.luck import Mixed
from rehearsal.node import Node
from rehearsal.setting import NodeCosts, Setting, Text
from rehearsal.timeline import Timeline
from rehearsal.world import World

PROMPT_LEN = 8  # short: what is asked is how fast a text is written, not how fast it is read
NUM_TO_SETTLE = 24  # tokens at the start of a text that do not count: the nodes learn their costs
NUM_AT_END = 12  # nor do these: the last passes have no room for drafts
# A trial costs a few of very many passes. A rehearsal is too short for a fair share of one.
NEVER = 1 << 20
LEAST_LEN = NUM_TO_SETTLE + NUM_AT_END + 8
LIMIT_S = 1e6  # of virtual time


@dataclass(frozen=True, slots=True)
class Figures:
    """What some texts came to; mostly but for the first and last tokens of each.

    tokens_per_second  of all texts that are written at once together
    target_busy        share of the time that the target's device was computing; likewise the
                       drafter's
    """

    tokens_per_second: float
    num_tokens: int
    num_passes: int
    num_drafted: int
    num_accepted: int
    target_busy: float
    drafter_busy: float

    @property
    def tokens_per_pass(self) -> float:
        """The target's own included."""
        return self.num_tokens / self.num_passes


@dataclass(slots=True)
class _Written:
    """The counted part of one text: it begins and ends with a verdict, the first not included."""

    began: float = 0.0
    ended: float = 0.0
    length: int = 0  # of the text, by the newest verdict
    num_before: int = 0  # tokens that do not count
    num_tokens: int = 0
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class _Device:
    """How long a device has computed. One forward begins after the one before has ended."""

    def __init__(self) -> None:
        self._ended_s = 0.0  # all forwards but the newest, together
        self._began = self._until = 0.0  # the newest

    def occupy(self, began: float, until: float) -> None:
        """One forward more."""
        assert began >= self._until, "a device computes two forwards at once"
        self._ended_s += self._until - self._began
        self._began, self._until = began, until

    def busy_s(self, now: float) -> float:
        """Seconds until now; what is left of the newest forward does not count."""
        return self._ended_s + max(0.0, min(now, self._until) - self._began)


class Ledger:
    """Counts verdicts, and the time of both devices. See `watcher.Watcher`.

    is_whole  everything counts from the first verdict of a text on
    """

    def __init__(self, timeline: Timeline, *, is_whole: bool) -> None:
        self._timeline = timeline
        self._num_to_settle = 1 if is_whole else NUM_TO_SETTLE
        self._num_at_end = 0 if is_whole else NUM_AT_END
        self._texts: dict[int, _Written] = defaultdict(_Written)  # by session
        self._devices = {role: _Device() for role in Role}
        self._before_s: dict[Role, float] = {}  # each was busy so long until `_began`
        self._counted_s: dict[Role, float] = {}  # and until the last verdict that counts
        self._began = 0.0  # of the first text that counts

    def sent(self, node: Node, message: Message) -> None:
        """A verdict is a pass of a text."""
        if not isinstance(message, Verdict):
            return
        text, now = self._texts[message.session], self._timeline.now
        max_len = node.world.setting.texts[message.session - 1].limits.max_len
        if message.base_len + len(message.tokens) <= text.length:
            return  # it is said again, and was no pass
        text.length = message.base_len + len(message.tokens)
        if message.base_len >= max_len - self._num_at_end:
            return
        if text.num_before < self._num_to_settle:
            text.num_before += len(message.tokens)
            text.began = now
            if not self._began:
                self._began, self._before_s = now, self._busy_s(now)
            return
        text.ended, self._counted_s = now, self._busy_s(now)
        text.num_tokens += len(message.tokens)
        text.num_passes += 1
        text.num_drafted += message.num_drafted
        text.num_accepted += message.num_accepted

    def occupied(self, node: Node, began: float, until: float) -> None:
        """The device computes in this time."""
        self._devices[node.role].occupy(began, until)

    def _busy_s(self, now: float) -> dict[Role, float]:
        return {role: device.busy_s(now) for role, device in self._devices.items()}

    def watch_clock(self) -> None:
        """No text may hang."""
        assert self._timeline.now < LIMIT_S, "a text does not end"

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    begun = disturbed = told = passed_on = routed = delivered = completed = _ignore
    launched = heard = handled = rested = ended = _ignore

    def figures(self, at_once: int) -> Figures:
        """Of all texts, of which so many were written at once."""
        texts = self._texts.values()
        num_tokens = sum(text.num_tokens for text in texts)
        elapsed_s = sum(text.ended - text.began for text in texts)
        whole_s = max(text.ended for text in texts) - self._began
        return Figures(
            tokens_per_second=at_once * num_tokens / elapsed_s,
            num_tokens=num_tokens,
            num_passes=sum(text.num_passes for text in texts),
            num_drafted=sum(text.num_drafted for text in texts),
            num_accepted=sum(text.num_accepted for text in texts),
            target_busy=self._counted_share(Role.TARGET, whole_s),
            drafter_busy=self._counted_share(Role.DRAFTER, whole_s),
        )

    def _counted_share(self, role: Role, whole_s: float) -> float:
        return (self._counted_s[role] - self._before_s[role]) / whole_s


def rehearse(
    policy: Policy,
    target_costs: NodeCosts,
    drafter_costs: NodeCosts,
    trace: Trace,
    at_once: int = 1,
    *,
    is_whole: bool = False,
) -> Figures:
    """Write the texts of a trace, so many at once.

    is_whole  all of each counts, but for its first token
    """
    assert all(len(positions) > LEAST_LEN for positions in trace), "texts are too short"
    texts = tuple(
        Text((index, *range(1, PROMPT_LEN)), Limits(PROMPT_LEN + len(positions), ()))
        for index, positions in enumerate(trace)
    )
    setting = Setting(
        policy=replace(policy, rest_after=NEVER if policy.rest_after else 0),
        texts=texts,
        target=target_costs,
        drafter=drafter_costs,
        max_num_seqs=at_once,
        drafter_lanes=at_once,
        submit_every_s=None if at_once == 1 else 0.0,
    )
    timeline = Timeline()
    ledger = Ledger(timeline, is_whole=is_whole)
    world = World(setting, Ranked(texts, trace), timeline, ledger, Mixed(0))
    world.begin()
    world.run()
    return ledger.figures(at_once)
