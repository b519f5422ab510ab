"""What the target has said and may have to say again, logprobs included (pure)."""

from collections import deque

from proto.messages import MAX_TOKENS_PER_VERDICT, Ack, Cause, Logprobs, Open, Verdict
from proto.tree import CommittedText


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
