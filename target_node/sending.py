"""The messages that the target sends about a text besides the verdict of a pass (pure).

These are logprobs of the prompt and features for a head, where they were asked for, and a verdict
that repeats the tokens that the coordinator has missed.
"""

from collections import deque
from collections.abc import Sequence

from engine.layout.slots import Feed
from node.events import Send, SharedAction
from proto.messages import (
    MAX_FEATURE_BYTES,
    MAX_TOKENS_PER_VERDICT,
    Ack,
    Cause,
    Features,
    Logprobs,
    Open,
    PromptLogprobs,
    Verdict,
)
from proto.tree import CommittedText
from target_node.compute import FeatureRows

# -- logprobs and features -------------------------------------------------------------------------


def scored_by(opened: Open, feed: Feed) -> tuple[int, ...]:
    """Return the prompt's tokens that follow the rows of a prefill; (): no logprobs are wanted."""
    if feed.masks is not None or not opened.sampling.scores_prompt:
        return ()
    start = feed.positions[0] + 1
    return opened.tokens[start : min(opened.num_prompt, start + len(feed.tokens))]


def tell_prompt(opened: Open, prefix_len: int, logprobs: Logprobs | None) -> Sequence[SharedAction]:
    """Return a message with prompt logprobs that a prefill up to `prefix_len` made; (): none."""
    if logprobs is None:
        return ()
    start = prefix_len - len(logprobs) + 1
    return (Send(PromptLogprobs(opened.session, opened.incarnation, start, logprobs)),)


def tell_features(
    opened: Open, text: CommittedText, start: int, rows: FeatureRows | None
) -> list[SharedAction]:
    """Return messages with features of consecutive rows, as far as the text goes; []: none.

    start  position of the first row; its feature is the one before the token at `start + 1`
    """
    if rows is None:
        return []
    num_rows = min(rows.num_rows, len(text) - start - 1)
    most = max(1, MAX_FEATURE_BYTES * rows.num_rows // len(rows.data))
    told: list[SharedAction] = []
    for first in range(0, num_rows, most):
        end = min(first + most, num_rows)
        end_len, data = start + 1 + end, rows.part(first, end)
        end_hash, number = text.path_hashes[end_len], end - first
        session, incarnation = opened.session, opened.incarnation
        message = Features(session, incarnation, end_len, end_hash, number, rows.dtype, data)
        told.append(Send(message))
    return told


# -- repetition ------------------------------------------------------------------------------------

# What the target has sent and may have to send again, logprobs included.


class Reports:
    """Keeps the logprobs of the newest generated tokens of a text, if they were asked for.

    They are kept until a heartbeat of the coordinator shows that it has the tokens. Under the
    classical rules tokens must not be sampled again, so their logprobs cannot be computed again.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, Logprobs]] = deque()  # (position, rows); without a gap

    def add(self, position: int, logprobs: Logprobs | None) -> None:
        """Keep logprobs of the tokens from `position` on, in place of older ones from there on."""
        while self._pieces and self._pieces[-1][0] >= position:
            self._pieces.pop()
        if logprobs is not None:
            self._pieces.append((position, logprobs))

    def forget(self, length: int) -> None:
        """Drop logprobs of the first `length` tokens, which the coordinator has."""
        while self._pieces and self._pieces[0][0] + len(self._pieces[0][1]) <= length:
            self._pieces.popleft()

    @property
    def start(self) -> int:
        """Return the position of the first token whose logprobs are kept; 0 if there are none."""
        return self._pieces[0][0] if self._pieces else 0

    def rows(self, start: int, stop: int) -> Logprobs | None:
        """Return the logprobs of the tokens [start, stop); None if they are not all kept."""
        found = Logprobs()
        for position, rows in self._pieces:
            found += rows.part(max(0, start - position), max(0, stop - position))
        return found if len(found) == stop - start else None


def missed_of(opened: Open, ours: CommittedText) -> tuple[int, ...]:
    """Return the tokens of our text that the coordinator's lacks, because verdicts were lost.

    opened, ours  the coordinator's text in its new Open, and our text from the life before

    Returns () if the texts differ, or if logprobs of the prompt are wanted: tokens that were sent
    before those were complete have not been taken.
    """
    num_known = len(opened.tokens)
    if ours.common_len(opened.tokens) < num_known or opened.sampling.scores_prompt:
        return ()
    return tuple(ours.tokens[num_known : num_known + MAX_TOKENS_PER_VERDICT])


def repeated(
    opened: Open,
    text: CommittedText,
    base_len: int,
    reports: Reports,
    *,
    rests: bool,
    attempt: int,
    num_awaited: int,
    least_chance: float,
    acks: tuple[Ack, ...] = (),
) -> Verdict:
    """Return a Verdict that repeats the tokens after `base_len`; its times are 0.

    rests  the drafter should draft nothing now, and a repetition must not wake it
    """
    tokens = tuple(text.tokens[base_len : base_len + MAX_TOKENS_PER_VERDICT])
    base = base_len, text.path_hashes[base_len]
    cause = Cause.RESTING if rests else Cause.ALONE
    return Verdict(
        *(opened.session, opened.incarnation, *base, tokens, acks, cause),
        attempt=attempt,
        logprobs=reports.rows(base_len, base_len + len(tokens)),
        num_awaited=num_awaited,
        least_chance=least_chance,
    )
