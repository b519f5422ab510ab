"""What drafters that rest are not told, and learn all at once when they wake (pure).

A verdict with the cause RESTING tells a text's drafters to draft nothing. The verdicts after it are
not passed on to them: each would wake their processes for nothing, a thousand times a second in a
crowd, on a CPU on the target's cores. The first verdict with another cause goes to them with all
tokens since, or, if they are too many for one message, with a gap, and the drafters ask for an
Open. If the verdict that began the rest is lost, a heartbeat shows that they lack it.
"""

from dataclasses import replace

from proto.messages import MAX_TOKENS_PER_VERDICT, Cause, Verdict
from proto.tree import CommittedText


class Rest:
    """Whether the drafters of one text rest.

    known  length and path hash of the text as they know it; None: they are told every verdict
    """

    def __init__(self) -> None:
        self.known: tuple[int, int] | None = None

    def end(self) -> None:
        """Note that a drafter was told the whole text, but not that it should rest."""
        self.known = None

    def after(self, verdict: Verdict, text: CommittedText) -> Verdict | None:
        """Return what drafters are to be told after a verdict whose tokens are in `text` by now.

        None: nothing, because they got the verdict itself, or rest on.
        """
        rests = verdict.cause is Cause.RESTING
        if self.known is None:
            if rests:
                self.known = len(text), text.root
            return None
        if rests:
            return None
        (length, root), self.known = self.known, None
        return replace(
            verdict,
            base_len=length,
            base_hash=root,
            tokens=tuple(text.tokens[length : length + MAX_TOKENS_PER_VERDICT]),
            num_drafted=0,
            num_accepted=0,
            rejected=(),
            logprobs=None,
            sources=(),
        )
