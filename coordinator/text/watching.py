"""Makes the times of both devices for one text from the messages that come anyway (pure).

Theory of operation
-------------------
A text that is watched has its drafts decoded by the coordinator, after they were passed on. Nodes
send nothing more for it, so a text is as fast watched as not.

    Draft    states how long the drafter's model has computed since its last draft    -> DraftSpan
    Verdict  states how long the pass took                                            -> PassSpan

The lengths are the nodes' own. Their places are not: a span is taken to end when its message came
to the coordinator, because times of two clocks are never subtracted. So it lies too late by the
time that the message was on its way, and by what the drafter did between its last step and the
message. The spans of one device never overlap; one that would begin before the one before it has
ended is shortened at its beginning.

A draft is decided when the text has grown past its first wrong token, or past all of its tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from proto.messages import Draft, Verdict
from proto.tree import CommittedText

MAX_UNDECIDED = 256  # drafts whose end is awaited; of older ones no fate is told


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """A time in which a drafter computed, up to one of its drafts. Seconds since the text began.

    number      of the draft among those of this text, from 1
    num_steps   forward passes of the drafter's model; at least 1
    num_tokens  drafted tokens in the message
    depth       length of the longest path of these: so many of them can be right at most
    position    generated tokens before the first of them
    source      who drafted, as in `Draft.source`
    """

    number: int
    begin_s: float
    end_s: float
    num_steps: int
    num_tokens: int
    depth: int
    position: int
    source: int


@dataclass(frozen=True, slots=True)
class PassSpan:
    """A pass of the target, with what became of drafts. Seconds since the text began.

    wait_s, model_s  the wait for drafts before the pass; its time in the model, the rest is the
                     host's
    cause            why the pass began, as in `Verdict.cause`
    num_tokens       tokens that the text got; the first `num_accepted` were drafted
    num_rolled_back  drafted nodes that died with this pass
    is_roll_back     drafts died, and none that has come leads to the text's last token or beyond:
                     the drafter begins anew there. A draft below one that died does not count: it
                     may come passes later
    decided          of each draft that this pass decided: its number, and how many of its tokens
                     the text has
    """

    begin_s: float
    end_s: float
    wait_s: float
    model_s: float
    cause: str
    num_drafted: int
    num_accepted: int
    num_tokens: int
    num_rolled_back: int
    is_roll_back: bool = False
    decided: tuple[tuple[int, int], ...] = ()


DeviceSpan = DraftSpan | PassSpan


def num_right(draft: Draft, tokens: Sequence[int], path_hashes: Sequence[int]) -> int:
    """Return how many of a draft's tokens lie on the path that a text took; 0: none.

    tokens, path_hashes  of the text; it is longer than the draft's parent
    """
    if path_hashes[draft.parent_len] != draft.parent_hash:
        return 0
    at, length = -1, draft.parent_len
    for index, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == at and length < len(tokens) and token == tokens[length]:
            at, length = index, length + 1
    return length - draft.parent_len


def depth_of(draft: Draft) -> int:
    """Return the length of the longest path in a draft."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


class Watch:
    """Collects the spans of one text; `passed` returns those since the pass before.

    num_prompt  tokens of the prompt, which positions do not count
    """

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._since = 0.0  # when the text began
        self._num_drafts = 0
        self._spans: list[DraftSpan] = []  # not returned yet
        self._undecided: deque[tuple[int, Draft]] = deque(maxlen=MAX_UNDECIDED)
        self._drafted_until: dict[int, float] = {}  # end of the last span, by source
        self._passed_until = 0.0

    def begin(self, now: float) -> None:
        """Count times from now on."""
        self._since = now

    def drafted(self, draft: Draft, now: float) -> None:
        """Add the span of a draft that has come; none if no step was made for it."""
        if not draft.num_steps:
            return  # said again, or the drafter says only that it is done
        self._num_drafts += 1
        self._undecided.append((self._num_drafts, draft))
        end_s = now - self._since
        least_s = self._drafted_until.get(draft.source, 0.0)
        self._drafted_until[draft.source] = end_s
        self._spans.append(
            DraftSpan(
                number=self._num_drafts,
                begin_s=min(end_s, max(least_s, end_s - draft.model_us / 1e6)),
                end_s=end_s,
                num_steps=draft.num_steps,
                num_tokens=len(draft.tokens),
                depth=depth_of(draft),
                position=draft.parent_len - self._num_prompt,
                source=draft.source,
            )
        )

    def passed(
        self, verdict: Verdict, text: CommittedText, num_new: int, num_accepted: int, now: float
    ) -> tuple[DeviceSpan, ...]:
        """Return the spans since the pass before, this pass last.

        text          with the tokens of the verdict
        num_new       how many of them were new; `num_accepted` of these were drafted
        """
        end_s = now - self._since
        taken_s = (verdict.model_us + verdict.host_us) / 1e6
        decided, is_roll_back = self._decide(text)
        span = PassSpan(
            begin_s=min(end_s, max(self._passed_until, end_s - taken_s)),
            end_s=end_s,
            wait_s=verdict.wait_us / 1e6,
            model_s=verdict.model_us / 1e6,
            cause=verdict.cause.name.lower(),
            num_drafted=verdict.num_drafted,
            num_accepted=num_accepted,
            num_tokens=num_new,
            num_rolled_back=verdict.num_rolled_back,
            is_roll_back=is_roll_back,
            decided=decided,
        )
        self._passed_until = end_s
        spans, self._spans = self._spans, []
        return (*spans, span)

    def _decide(self, text: CommittedText) -> tuple[tuple[tuple[int, int], ...], bool]:
        """Return (number, right tokens) of the drafts that the text decides, and forget them.

        The second value is True if drafts died, and none leads to the end of the text.
        """
        decided: list[tuple[int, int]] = []
        leads_on = died = False
        left: list[tuple[int, Draft]] = []
        for number, draft in self._undecided:
            if draft.parent_len >= len(text):
                left.append((number, draft))
                continue
            right = num_right(draft, text.tokens, text.path_hashes)
            is_on_path = right > 0 and draft.parent_len + right == len(text)
            leads_on = leads_on or is_on_path
            if is_on_path and right < depth_of(draft):
                left.append((number, draft))
                continue
            decided.append((number, right))
            hangs_on_text = text.path_hashes[draft.parent_len] == draft.parent_hash
            died = died or (hangs_on_text and right < depth_of(draft))
        self._undecided = deque(left, maxlen=MAX_UNDECIDED)
        return tuple(decided), died and not leads_on
