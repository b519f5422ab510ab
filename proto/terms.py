"""What the messages about a text may say, and how a message breaks these terms (pure).

The codec checks the form of a message, which is the same for all texts. This file checks a message
against its own text: token ids against the vocabulary, positions against the greatest length,
counts against the policy, log-probabilities and features against what was asked for. Both ends use
it, and so do not depend on the mistakes of a peer:

    the coordinator  checks what nodes send, against its session       (`coordinator/cluster`)
    a node           checks what is passed on to it, against its Open  (`node/entrance.py`)

A message that breaks a term is dropped, and its sender is told (`Fault` with the code OUTSIDE).

Some fields have no range in a text. A path hash may name any text: one that is unknown is stale. A
`number` only counts the messages of its sender, `done` and `scores` change the speed alone, and the
`attempt` of a draft is compared, never computed with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from proto.messages import (
    ANY_ID,
    ATTEMPT_BITS,
    MAX_TEXT_LEN,
    OFF,
    Close,
    Draft,
    Fault,
    FaultCode,
    Features,
    Heartbeat,
    Hello,
    Limits,
    Logprobs,
    Message,
    Open,
    Policy,
    PromptLogprobs,
    Role,
    Rule,
    SamplingSpec,
    TracePart,
    Verdict,
    Welcome,
)
from proto.stopwatch import Phase

# -- who says what ---------------------------------------------------------------------------------

SENT_BY: Mapping[Role, frozenset[type]] = {
    Role.DRAFTER: frozenset((Hello, Draft, Heartbeat, Fault, TracePart)),
    Role.TARGET: frozenset((Hello, Verdict, Features, PromptLogprobs, Heartbeat, Fault, TracePart)),
}
SENT_TO: Mapping[Role, frozenset[type]] = {
    Role.DRAFTER: frozenset((Welcome, Open, Close, Heartbeat, Fault, Verdict, Features)),
    Role.TARGET: frozenset((Welcome, Open, Close, Heartbeat, Fault, Draft)),
}
ABOUT_A_TEXT = frozenset((FaultCode.GAP, FaultCode.FAILED, FaultCode.OUTSIDE))
ABOUT_A_NODE = frozenset((FaultCode.FAILED, FaultCode.UNUSABLE))

# -- the terms of a text ---------------------------------------------------------------------------

MAX_US = 1 << 40  # of one duration: 12 days
MAX_STEPS = 1 << 20  # forward passes for one message
MAX_DEAD = 1 << 12  # nodes of the target's tree that die by one verdict
MAX_STALE = 1 << 24  # drafted tokens that came too late before one verdict


@dataclass(frozen=True, slots=True)
class Terms:
    """What the messages about one text may say.

    num_ids   token ids from this number on are no tokens
    newest    incarnation of the newest Open to any node, where that is known
    features  of a drafter that is a head: bytes of one token's features, by their number type
    """

    num_ids: int
    limits: Limits
    num_prompt: int
    policy: Policy
    rule: Rule
    sampling: SamplingSpec
    newest: int = (1 << 32) - 1
    features: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(opened: Open, features: Mapping[str, int]) -> "Terms":
        """Return the terms that an Open states; `features` as in the class."""
        return Terms(
            opened.num_ids,
            opened.limits,
            opened.num_prompt,
            opened.policy,
            opened.rule,
            opened.sampling,
            features=features,
        )


def breach_of(message: Message, terms: Terms) -> str:
    """Return how a message breaks the terms of its text, in words for people; "": it does not."""
    match message:
        case Draft():
            broken = _of_draft(message, terms)
        case Verdict():
            broken = _of_verdict(message, terms)
        case Features():
            broken = _of_features(message, terms)
        case PromptLogprobs():
            broken = _of_prompt(message, terms)
        case _:
            return ""
    return next(broken, "")


def _of_draft(draft: Draft, terms: Terms) -> Iterator[str]:
    yield from _ids("token", draft.tokens, terms)
    max_len = terms.limits.max_len
    yield from _within("parent_len", draft.parent_len, terms.num_prompt, max_len)
    if draft.tokens and draft.parent_len + len(draft.tokens) > max_len:
        yield from _within("a path's length", draft.parent_len + _depth(draft.parents), 0, max_len)
    yield from _within("first_number", draft.first_number, 1, draft.number)
    yield from _within("model_us", draft.model_us, 0, MAX_US)
    yield from _within("num_steps", draft.num_steps, 0, MAX_STEPS)
    if terms.rule is Rule.COUPLED:
        yield from _attempt(draft.attempt, terms)
        if draft.proposals:
            yield "proposals, and drafts are judged by equality"
    for proposal in draft.proposals:
        yield from _ids("a proposal's token", proposal.ids, terms)


def _of_verdict(verdict: Verdict, terms: Terms) -> Iterator[str]:
    max_len, num_tokens = terms.limits.max_len, len(verdict.tokens)
    yield from _ids("token", verdict.tokens, terms)
    yield from _ids("rejected token", verdict.rejected, terms)
    yield from _within("base_len", verdict.base_len, terms.num_prompt, max_len)
    yield from _within("the text's length", verdict.base_len + num_tokens, 0, max_len)
    yield from _within("num_drafted", verdict.num_drafted, 0, terms.policy.num_speculative_tokens)
    yield from _within("num_accepted", verdict.num_accepted, 0, num_tokens)
    yield from _within("num_awaited", verdict.num_awaited, 0, terms.policy.num_speculative_tokens)
    yield from _within("num_rolled_back", verdict.num_rolled_back, 0, MAX_DEAD)
    yield from _within("num_stale", verdict.num_stale, 0, MAX_STALE)
    for name in ("wait_us", "model_us", "host_us", "drafter_us", "plain_us"):
        yield from _within(name, getattr(verdict, name), 0, MAX_US)
    yield from _attempt(verdict.attempt, terms)
    if verdict.logprobs is not None:
        yield from _logprobs(verdict.logprobs, terms.sampling.num_logprobs, terms)


def _of_features(message: Features, terms: Terms) -> Iterator[str]:
    if (size := terms.features.get(message.dtype)) is None:
        yield f"features of type {message.dtype!r}, which nobody reads here"
        return
    yield from _within("end_len", message.end_len, 1, terms.limits.max_len)
    if len(message.data) != size * message.num_rows:
        yield f"features of {len(message.data)} bytes: they must be {message.num_rows} x {size}"


def _of_prompt(message: PromptLogprobs, terms: Terms) -> Iterator[str]:
    end_len = message.start + len(message.logprobs)
    yield from _within("the end of the prompt's logprobs", end_len, 1, terms.num_prompt)
    yield from _logprobs(message.logprobs, terms.sampling.num_prompt_logprobs, terms)


def _logprobs(logprobs: Logprobs, num_wanted: int, terms: Terms) -> Iterator[str]:
    """Yield how log-probabilities break the terms; `num_wanted` alternatives were asked for."""
    if num_wanted == OFF:
        yield "logprobs, and none were asked for"
    elif len(logprobs):
        width = 1 + min(num_wanted, terms.num_ids)
        yield from _within("the number of logprobs of a token", logprobs.width, width, width)
    yield from _ids("a logprob's token", logprobs.ids, terms)
    yield from _within("a rank", max(logprobs.ranks, default=1), 1, terms.num_ids)


def _attempt(attempt: int, terms: Terms) -> Iterator[str]:
    newest = 0 if terms.rule is Rule.COUPLED else ((terms.newest + 1) << ATTEMPT_BITS) - 1
    yield from _within("attempt", attempt, 0, newest)


def _ids(what: str, ids: Sequence[int], terms: Terms) -> Iterator[str]:
    if ids and (most := max(ids)) >= terms.num_ids:
        yield f"{what} {most}: ids must be below {terms.num_ids}"


def _within(what: str, value: int, least: int, most: int) -> Iterator[str]:
    if not least <= value <= most:
        yield f"{what} is {value}: it must be in {least}..{most}"


def _depth(parents: Sequence[int]) -> int:
    """Return the length of the longest path of nodes with these parents (as in `Draft`)."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


# -- the terms of a node ---------------------------------------------------------------------------


def breach_of_node(message: Message, role: Role, now_us: int) -> str:
    """Return how a message is outside of what a node of this role may say; "": it is not.

    now_us  the coordinator's clock, which its own heartbeats state
    """
    if type(message) not in SENT_BY[role]:
        return f"no place in what a {role} sends"
    match message:
        case Heartbeat():
            return next(_of_beat(message, now_us), "")
        case Fault():
            codes = ABOUT_A_TEXT if message.session else ABOUT_A_NODE
            about = "a text" if message.session else "the node itself"
            return "" if message.code in codes else f"the code {message.code} about {about}"
    return ""


def _of_beat(beat: Heartbeat, now_us: int) -> Iterator[str]:
    yield from _within("stamp_us", beat.stamp_us, 0, now_us)
    yield from _within("held_us", beat.held_us, 0, MAX_US)
    for name in ("times_us", "beside_us"):
        times = getattr(beat, name)
        if len(times) not in (0, len(Phase)):
            yield f"{name} has {len(times)} phases: it must have {len(Phase)}"
        yield from _within(f"a time of {name}", max(times, default=0), 0, MAX_US)
    for name in ("late_us", "pass_us"):
        yield from _within(name, getattr(beat, name), 0, MAX_US)
    yield from _within("pass_rows", beat.pass_rows, 0, MAX_TEXT_LEN)


def breach_of_open(opened: Open, num_ids: int, max_len: int, num_layers: int) -> str:
    """Return why a target cannot take this text; "": it can.

    num_ids, max_len, num_layers  of its model: logits, longest text, layers
    """
    return next(_of_open(opened, num_ids, max_len, num_layers), "")


def _of_open(opened: Open, num_ids: int, max_len: int, num_layers: int) -> Iterator[str]:
    terms = Terms.of(opened, {})
    if opened.num_ids != ANY_ID:
        yield from _within("num_ids", opened.num_ids, 1, num_ids)
    yield from _ids("token", opened.tokens, terms)
    if opened.lookup is not None:
        yield from _ids("the reference's token", opened.lookup.reference, terms)
    yield from _within("max_len", opened.limits.max_len, 1, max_len)
    yield from _within("a layer", max(opened.layers, default=0), -1, num_layers - 1)
