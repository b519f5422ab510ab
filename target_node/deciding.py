"""What a target does next: read a prompt, copy one, start a pass, or wait (pure).

This file answers "does a pass start now?". `decide` is asked whenever the device is free and all
messages that had arrived have been handled. It is a function of a frozen `View` and of the time,
and changes nothing. `Schedule` (`scheduling.py`) makes the view and does what is decided. For how
many drafts a pass waits is decided earlier, when a verdict is made (`awaited`), because the drafter
is told.

Theory of operation
-------------------
A pass reads the weights once for the rows of all its texts, so all texts that can use it share it:

    a prompt to read, unless the last pass was a prefill   -> Read, one chunk; or Copy
    some text has a reason to start, and the pass is not
    held back for others                                   -> Start, of all that can share it
    else, a prompt to read                                 -> Read, or Copy
    else                                                   -> Wait, until the first deadline

A text's reason (`Cause`) to start with the drafts that are here:

    RESTING  to draft at all costs more than it brings (`resting.py`)
    ALONE    no drafter is expected
    READY    there are enough drafts under the root, or no more will come, or copies are as good
    QUIET    the drafter was not heard since this life began, since its rest, or since it has missed
             two deadlines; now and then it is waited for all the same (`waiting.py`)
    CHEAP    to wait costs more than it brings; also said of a text that joins a pass of others
    LATE     a deadline made of measured costs has passed

Else it waits for its drafter, for as many drafts as the last verdict has said (`Awaited`, priced
when that verdict was made). A wait that has begun is not given up before its limit, unless
the text joins a pass of others. What a wait brings, `node/economics.py` computes of what
`waiting.py` has measured. Two waits are made whatever they cost: one after 32 that were not made,
to measure it; and one after so many passes without drafts that bad luck does not explain it. Then
the drafter is too far away to get ahead while the target goes on.

If one text has a reason to start, and drafts for another are expected, the pass is held back as
long as these drafts add more tokens than the time costs (`worth_holding_s`). When it starts, the
texts that still wait join with the drafts that they have: a token for the price of a row. They do
not join twice in a row, since drafts that always come during the pass would never be of use.

How many drafts of each text are verified is decided for all texts together: the likeliest of all
(`shared_out`). It is asked apart, because copies of earlier text are only looked for when a pass
starts.

A drafter in the target's process uses the same device, so the two take turns there: before `decide`
is asked, `are_worth_drafting` says whether one more draft step is worth its time. If there are
any, the drafter makes one step, of every text that has one to make, since the others cost it only a
row each; or all steps of a chain, if there is but one text. Then the same is asked again
(`at_home.py`).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from node.costs import Prices, crowd
from node.economics import (
    TOO_UNLIKELY,
    drafting_pays,
    drafts_worth_awaiting,
    least_chance,
    num_expected,
    price_of_draft,
    rows_worth,
    token_s,
    verifying_pays,
    wait_limit_s,
    waiting_pays,
    worth_holding_s,
)
from node.events import CopyPrefix
from node.placing import Place, Placing
from proto.messages import Cause, Policy, Rule
from target_node.drafts_at_hand import Chances

NUM_FIRST = 4  # waits that are made first, to measure how long they are
NUM_SKIPPED_MAX = 32  # possible waits in a row that are skipped before one is made to measure
BAD_LUCK = 0.01  # below this probability, bad luck does not explain that no drafts were there
MOST_AWAITED = 8  # most drafts in a row to wait for, if costs decide
TRY_AGAIN_AFTER = 32  # number of tokens without a draft of the drafter at home


# -- what is asked ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextView:
    """What decides about one text whose prompt was read, as it is now.

    session       names the text
    rests         the drafter should draft nothing now: it rests, or resting is being tried
    is_trial      resting or drafting is only being tried
    is_catching_up  the next pass can only feed missing committed tokens (reproducible mode)
    most          most drafts that a pass could verify
    num_awaited   with how many drafts in a row a pass starts (`Awaited`), at most `most`
    num_in_row    drafts in a row that are here, at most `most`
    are_there     some draft hangs under the root
    are_all       fewer are here than are awaited, and no more will come, or copies are as good
    ready_at      since when a pass with this text could have started
    num_missing   committed tokens that the cache lacks: rows of the pass besides drafts
    went_along    it joined its last pass, for which other texts had a reason
    has_begun     a wait for drafts has begun
    is_quiet      the drafter was not heard since a life began, a rest, or several missed deadlines
    num_in_vain   passes that began without waiting since one had drafts
    takes_turns   the drafter drafts nothing during a pass (`node/placing.py`)
    """

    session: int
    policy: Policy
    rule: Rule
    rests: bool
    is_trial: bool
    is_catching_up: bool
    most: int
    num_awaited: int
    num_in_row: int
    are_there: bool
    are_all: bool
    ready_at: float
    num_missing: int
    went_along: bool
    has_begun: bool
    is_quiet: bool
    num_in_vain: int
    takes_turns: bool

    @property
    def is_ahead(self) -> bool:
        """True if the drafter goes on behind the drafts that this pass awaits.

        Another question than `drafts_ahead` (`proto/policies.py`): a drafter that stops at K drafts
        is ahead of a pass that awaits fewer, and is not waited for any longer than one that never
        stops. With that rule here, texts in bad weather did not end in time (the simulator).
        """
        return self.policy.window > self.num_awaited and not self.takes_turns


@dataclass(frozen=True, slots=True)
class Reader:
    """The text whose turn it is to have its prompt read.

    copy  of tokens that another lane has cached; None: it has to read them itself
    """

    session: int
    policy: Policy
    rests: bool
    is_trial: bool
    copy: CopyPrefix | None


@dataclass(frozen=True, slots=True)
class View:
    """Everything that decides what the target does next.

    writers       the texts whose prompts were read, in the order of their turns
    reader        None: no text has to read
    was_chunk     the last pass was a prefill
    held_since    since when the next pass is held back for some texts' drafts; None: it is not
    num_per_pass  most texts that share a pass
    p             chance that the drafter's first draft of a token is right
    prices        what everything costs where the last pass ran
    placing       says on which CPU cores a pass runs; None: always on the same
    """

    writers: tuple[TextView, ...]
    reader: Reader | None
    was_chunk: bool
    held_since: float | None
    num_per_pass: int
    p: float
    prices: Prices
    placing: Placing | None


# -- what is decided -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cores:
    """On which CPU cores a pass runs, where there is a choice.

    kind         passes of one kind are compared with each other
    is_drafted   the drafter drafts for one of its texts
    counts       False: something else is being tried in it, so that it says nothing about cores
    takes_turns  a drafter should draft nothing while it runs
    """

    kind: Hashable
    is_drafted: bool
    place: Place
    counts: bool
    takes_turns: bool


@dataclass(frozen=True, slots=True)
class Read:
    """Read a chunk of a text's prompt."""

    session: int
    cores: Cores | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy what another lane has cached of a text, and ask again."""

    session: int
    copy: CopyPrefix


@dataclass(frozen=True, slots=True)
class Start:
    """Start a pass of these texts.

    causes  why each is in it, by session, in order; None: it joins, since others have a reason
    """

    causes: dict[int, Cause | None]
    cores: Cores | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until this time, if no message comes before; infinity: only a message helps."""

    until: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do next, and what is to be noted of it.

    awaiting    sessions of the texts that have no reason to start: they wait for drafts
    held_since  since when the pass is held back; None: it is not
    """

    action: Read | Copy | Start | Wait
    awaiting: tuple[int, ...]
    held_since: float | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whether a pass with a text should start now, and until when its drafts are awaited.

    cause     None: drafts are awaited
    deadline  until when; now or earlier if there is a cause
    """

    text: TextView
    cause: Cause | None
    deadline: float


def decide(view: View, now: float) -> Decision:
    """Return what the target does next."""
    if view.reader is not None and not view.was_chunk:
        return Decision(_reading(view, view.reader), (), view.held_since)
    asked = [_asked(text, view, now) for text in view.writers]
    awaiting = tuple(one.text.session for one in asked if one.cause is None)
    held_since = None
    if _may_hold(asked, view):
        held_since = now if view.held_since is None else view.held_since
    start_at = _start_at(asked, view, held_since, now)
    if start_at <= now:
        return Decision(_starting(asked, view), awaiting, None)
    if view.reader is not None:
        return Decision(_reading(view, view.reader), awaiting, held_since)
    return Decision(Wait(start_at), awaiting, held_since)


def _reading(view: View, reader: Reader) -> Read | Copy:
    if reader.copy is not None:
        return Copy(reader.session, reader.copy)
    return Read(reader.session, _cores(view, (reader,)))


# -- what the next pass waits for -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Awaited:
    """For which drafts the next pass of a text waits: a verdict says so to the drafter.

    num           with how many drafts in a row the pass starts
    least_chance  how likely a node must be for the drafter to expand it; 0: it may be any, since
                  the drafter goes on while the pass runs
    """

    num: int = 0
    least_chance: float = 0.0

    @property
    def takes_turns(self) -> bool:
        """True if the drafter drafts nothing while the pass runs (`node/placing.py`)."""
        return self.least_chance > 0.0


@dataclass(frozen=True, slots=True)
class LastPass:
    """What a text's last pass says of its next wait.

    took_turns   the drafter drafted nothing while it ran
    all_accepted       it had drafts, and all were accepted
    num_in_vain  passes that began without waiting since one had drafts
    num_texts    texts that share the passes
    """

    took_turns: bool
    all_accepted: bool
    num_in_vain: int
    num_texts: int


def awaited(
    policy: Policy, most: int, last: LastPass, *, rests: bool, p: float, prices: Prices
) -> Awaited:
    """Return for which drafts the next pass waits.

    most   most drafts that it can verify
    rests  the drafter should draft nothing now
    p      chance that the drafter's first draft of a token is right
    """
    if _why_alone(policy, most, rests=rests) is not None:
        return Awaited(min(policy.launch_min, most))
    if last.took_turns:
        return Awaited(most, least_chance(last.num_texts, prices))
    least = min(policy.launch_accepted if last.all_accepted else policy.launch_min, most)
    if not policy.prices_awaited or prices.reply.num < NUM_FIRST or not prices.pass_s:
        return Awaited(least)
    number = drafts_worth_awaiting(p, min(most, MOST_AWAITED), prices)
    if number == 0 and _is_in_vain(p, last.num_in_vain, prices):
        return Awaited(least)
    return Awaited(number)


def _why_alone(policy: Policy, most: int, *, rests: bool) -> Cause | None:
    """Return why no drafter is expected for a pass of `most` drafts; None: one is expected."""
    if rests:
        return Cause.RESTING
    return Cause.ALONE if most == 0 or not policy.has_drafter else None


def _is_in_vain(p: float, num_in_vain: int, prices: Prices) -> bool:
    """True if drafts are missing so often that the drafter must be too far away.

    Also true if no wait was made for so long that one is due, to measure it.
    """
    is_forgotten = prices.num_skipped >= NUM_SKIPPED_MAX
    return is_forgotten or (1 - p) ** num_in_vain < BAD_LUCK


# -- one text --------------------------------------------------------------------------------------


def _asked(text: TextView, view: View, now: float) -> _Asked:
    """Return whether a pass with this text should start now, or until when it waits."""
    cause = _why_now(text)
    if cause is not None:
        return _Asked(text, cause, now)
    limit_s = wait_limit_s(text.num_awaited, view.prices, is_ahead=text.is_ahead)
    deadline = text.ready_at + limit_s
    return _Asked(text, _why_not_wait(text, view, is_late=now >= deadline), deadline)


def _why_now(text: TextView) -> Cause | None:
    """Return why a pass needs no more drafts of this text; None: it may wait for them."""
    if text.is_catching_up:
        return Cause.ALONE
    if (cause := _why_alone(text.policy, text.most, rests=text.rests)) is not None:
        return cause
    if text.num_in_row >= text.num_awaited or text.are_all:
        # The policy waits for drafts, but a wait was found not to pay, and none are here.
        waits_for_none = text.policy.launch_min > 0 and text.num_awaited == 0
        return Cause.CHEAP if waits_for_none and not text.are_there else Cause.READY
    return None


def _why_not_wait(text: TextView, view: View, *, is_late: bool) -> Cause | None:
    """Return why a pass starts with fewer drafts than are awaited; None: wait on."""
    if text.is_quiet:
        return Cause.QUIET
    if not text.has_begun and _is_priced(text) and not _pays(text, view):
        return Cause.CHEAP
    return Cause.LATE if is_late else None


def _is_priced(text: TextView) -> bool:
    """True if costs decide whether to wait at all.

    Not for a drafter that waits for every verdict, which drafts nothing meanwhile, and not under
    the classical rules: there a token that the target samples alone has hardly ever been drafted.
    """
    return text.policy.prices_waits and text.rule is Rule.COUPLED and text.is_ahead


def _pays(text: TextView, view: View) -> bool:
    """True if waiting for the drafts makes more tokens a second than going on alone."""
    p, prices = view.p, view.prices
    num_texts = num_sharing(len(view.writers), view.num_per_pass)
    if not prices.pass_s:
        return True
    # Drafts that would not be verified are of no use, however soon they come.
    if not verifying_pays(p, text.num_awaited, num_texts, prices.passes(num_texts)):
        return False
    if prices.wait.num < NUM_FIRST or _is_in_vain(p, text.num_in_vain, prices):
        return True
    if text.policy.prices_awaited:
        return True  # `awaited` has weighed the wait already
    return waiting_pays(p, text.num_awaited, text.policy.num_speculative_tokens, prices)


def num_sharing(num_writers: int, num_per_pass: int) -> int:
    """Return how many texts share the passes, if so many write."""
    return min(max(1, num_writers), num_per_pass)


# -- all texts -------------------------------------------------------------------------------------


def _may_hold(asked: Sequence[_Asked], view: View) -> bool:
    """True if some texts could start a pass and more texts could share it later."""
    num_ready = sum(one.cause is not None for one in asked)
    is_shared = 0 < num_ready < min(len(asked), view.num_per_pass)
    return is_shared and view.prices.reply.num > 0


def _start_at(asked: Sequence[_Asked], view: View, held_since: float | None, now: float) -> float:
    """Return when a pass of these texts starts if no message comes before; inf: never."""
    waiting = [one for one in asked if one.cause is None]
    if not waiting:
        return now if asked else math.inf
    late_at = min(one.deadline for one in waiting)
    if len(waiting) == len(asked):
        return late_at
    if not _may_hold(asked, view):
        return now
    assert held_since is not None
    return min(late_at, _held_until(asked, view, held_since, now))


def _held_until(asked: Sequence[_Asked], view: View, held_since: float, now: float) -> float:
    """Return until when to hold back the pass for drafts; `now` if they will come too late."""
    waiting = [one.text for one in asked if one.cause is None]
    ready = [one.text for one in asked if one.cause is not None]
    prices, p = view.prices, view.p
    num_more = sum(num_right(p, text.num_awaited) for text in waiting)
    num_tokens = len(waiting) + sum(1.0 + num_right(p, text.num_in_row) for text in ready)
    due_at = [text.ready_at + _due_s(text, prices) for text in waiting]
    worth_s = worth_holding_s(num_tokens, num_more, prices.pass_s)
    # What was due before the pass was held back counts against it, too.
    until = min(held_since, *due_at) + worth_s
    return now if max(due_at) > until else until


def _due_s(text: TextView, prices: Prices) -> float:
    """Return how long after it could start a text is expected to have the drafts that it awaits.

    The first one takes as long as an answer, each further one a draft step.
    """
    num_more = max(0, text.num_awaited - text.num_in_row - 1)
    return prices.reply.value + num_more * prices.draft.value


def num_right(p: float, num_drafts: int) -> float:
    """Return how many of `num_drafts` first children in a row are expected to be right."""
    return num_expected(p, num_drafts) - 1.0


def _starting(asked: Sequence[_Asked], view: View) -> Start:
    """Return the pass of the texts with a reason, and of others that have room in it."""
    able = [one for one in asked if one.cause is not None or not one.text.went_along]
    able.sort(key=lambda one: one.cause is None)
    able = able[: view.num_per_pass]
    causes = {one.text.session: one.cause for one in able}
    return Start(causes, _cores(view, [one.text for one in able]))


def _cores(view: View, texts: Sequence[TextView | Reader]) -> Cores | None:
    """Return on which cores a pass of these texts runs; None: there is no choice."""
    placing = view.placing
    if placing is None:
        return None
    is_drafted = any(text.policy.has_drafter and not text.rests for text in texts)
    kind = crowd(len(texts)), texts[0].policy if is_drafted else None
    place = placing.place_for(kind, is_drafted=is_drafted)
    counts = not (is_drafted and any(text.is_trial for text in texts))
    return Cores(kind, is_drafted, place, counts, placing.takes_turns(place))


def shared_out(
    policies: Sequence[Policy], at_hand: Sequence[Chances], num_missing: int, prices: Prices
) -> list[int]:
    """Return how many drafts of each text a pass verifies; all, unless costs decide.

    policies, at_hand  of each text of the pass; its drafts, the likeliest first
    num_missing        rows of committed tokens in the pass
    """
    counts = [len(drafts) for drafts in at_hand]
    priced = [index for index, policy in enumerate(policies) if policy.prices_rows]
    if not priced:
        return counts
    chances = [tuple(at_hand[index].values()) for index in priced]
    num_unpriced = sum(counts) - sum(map(len, chances))
    worth = rows_worth(
        chances,
        num_unpriced + num_missing,
        len(policies),
        prices.passes(len(policies)),
        may_be_plain=num_unpriced == 0,
    )
    for index, count in zip(priced, worth, strict=True):
        counts[index] = count
    return counts


# -- a drafter at home -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HomeStep:
    """The next step of a drafter in the target's process, for one text.

    chance     that the text reaches the node below which it drafts
    is_first   that node is the last committed token
    num_since  tokens since drafts were begun below a committed token; None: never
    """

    session: int
    policy: Policy
    chance: float
    is_first: bool
    num_since: int | None


def are_worth_drafting(
    steps: Sequence[HomeStep], num_texts: int, p: float, step_s: float, prices: Prices
) -> bool:
    """True if some of these steps are worth their time; False: it is the target's turn.

    num_texts  texts that share the passes
    p          chance that the first draft of a token is right
    step_s     seconds of a step
    """
    return any(_is_worth_it(step, num_texts, p, step_s, prices) for step in steps)


def _is_worth_it(step: HomeStep, num_texts: int, p: float, step_s: float, prices: Prices) -> bool:
    """True if the step is to be made before the next pass.

    The first one, if drafts are right often enough, or were not tried on this text for long; a
    further one, if it saves more time of passes than it costs.
    """
    if not step.is_first:
        return step.chance >= least_at_home(step.policy, num_texts, p, step_s, prices)
    if not step.policy.prices_waits:
        return True
    passes = prices.passes(num_texts)
    # After a new Open a text may be shorter than it was.
    if step.num_since is None or not 0 < step.num_since < TRY_AGAIN_AFTER:
        return True
    each_s = token_s(passes.of(num_texts), num_texts, passes)
    return drafting_pays(p, step_s, num_texts * each_s)


def least_at_home(policy: Policy, num_texts: int, p: float, step_s: float, prices: Prices) -> float:
    """Return how likely a node must be for a drafter at home to draft below it; 0: it may be any.

    num_texts  texts that share the passes
    p          chance that the first draft of a token is right
    step_s     seconds of a draft step

    A policy that weighs no costs drafts on: a chain to the end of its window, where there are no
    more steps; but no tree, which has no end.
    """
    if not policy.prices_waits and policy.branches == 1:
        return 0.0
    return max(TOO_UNLIKELY, price_of_draft(step_s, num_texts, prices.passes(num_texts)) / p)
