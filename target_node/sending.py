"""What the target sends of a text besides new verdicts (pure).

What rows of the text tell goes to whoever asked for it: logprobs of the prompt, and features for a
head. What the coordinator has missed is said again, in one verdict.
"""

from collections import deque
from collections.abc import Sequence

from node.follower import Send, SharedAction
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

# -- of rows ---------------------------------------------------------------------------------------


def tell_prompt(opened: Open, prefix_len: int, logprobs: Logprobs | None) -> Sequence[SharedAction]:
    """Send what a prefill that ended at `prefix_len` has found out about the tokens it scored."""
    if logprobs is None:
        return ()
    start = prefix_len - len(logprobs) + 1
    return (Send(PromptLogprobs(opened.session, opened.incarnation, start, logprobs)),)


def tell_features(
    opened: Open, text: CommittedText, start: int, rows: FeatureRows | None
) -> list[SharedAction]:
    """Send the features of rows that lie one behind another on the text, as far as it goes.

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


# -- saying again ----------------------------------------------------------------------------------

# What the target has said and may have to say again, logprobs included.


class Reports:
    """Logprobs of the newest generated tokens of a text, as far as they were asked for.

    They are kept until the coordinator's heartbeat shows that it has them. Under the classical
    rules tokens that it has missed must not be sampled again, so they cannot be computed anew.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, Logprobs]] = deque()  # (position, rows); without a gap

    def add(self, position: int, logprobs: Logprobs | None) -> None:
        """The tokens from `position` on; what was said of them before means nothing any more."""
        while self._pieces and self._pieces[-1][0] >= position:
            self._pieces.pop()
        if logprobs is not None:
            self._pieces.append((position, logprobs))

    def forget(self, length: int) -> None:
        """The coordinator has the first `length` tokens of the text."""
        while self._pieces and self._pieces[0][0] + len(self._pieces[0][1]) <= length:
            self._pieces.popleft()

    @property
    def start(self) -> int:
        """From which position on they are here; 0: there are none."""
        return self._pieces[0][0] if self._pieces else 0

    def rows(self, start: int, stop: int) -> Logprobs | None:
        """Of the tokens [start, stop); None if they are not all here."""
        found = Logprobs()
        for position, rows in self._pieces:
            found += rows.part(max(0, start - position), max(0, stop - position))
        return found if len(found) == stop - start else None


def missed_of(opened: Open, ours: CommittedText) -> tuple[int, ...]:
    """What our text of a session has beyond the coordinator's, which has missed verdicts.

    Nothing before the prompt's logprobs are complete: what came earlier has not been taken.
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
    attempt: int,
    acks: tuple[Ack, ...] = (),
) -> Verdict:
    """What was said behind `base_len`, as one verdict that cost nothing."""
    nothing = (0,) * 7
    tokens = tuple(text.tokens[base_len : base_len + MAX_TOKENS_PER_VERDICT])
    base = base_len, text.path_hashes[base_len]
    return Verdict(
        *(opened.session, opened.incarnation, *base, tokens, acks, Cause.ALONE, *nothing),
        attempt=attempt,
        logprobs=reports.rows(base_len, base_len + len(tokens)),
    )
