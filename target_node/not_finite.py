"""What a text does whose logits are not finite where its next token is to be chosen (pure).

That can be the fault of others: of a text that was in its lane before, or of rows that were copied.
So the text is read anew once, in a lane that is all zeros, and nothing is copied. If the same
happens again, its own tokens are at fault: the text ends, and the others go on.
"""

from collections.abc import Sequence

from node.events import Send
from proto.messages import Fault, FaultCode, Open


class NotFinite:
    """What has happened to one life of a text.

    has_ended  the text cannot go on
    said       what the coordinator is told of it, until it closes the text
    """

    def __init__(self, opened: Open) -> None:
        self._opened = opened
        self._read_anew_at: int | None = None  # its length
        self.has_ended = False
        self.said: Sequence[Send] = ()

    @property
    def is_reading_anew(self) -> bool:
        """Whether its lane may have nothing that was computed for others."""
        return self._read_anew_at is not None

    def met(self, length: int, position: int) -> Sequence[Send]:
        """No token follows so many; the one at `position` is at fault. Returns what to say."""
        if self._read_anew_at != length:
            self._read_anew_at = length
            return ()
        self.has_ended = True
        session, incarnation = self._opened.session, self._opened.incarnation
        fault = Fault(session, incarnation, FaultCode.FAILED, line(position))
        self.said = (Send(fault),)
        return self.said


def line(position: int) -> str:
    """What people are told."""
    return (
        f"the target's logits are not finite at token position {position} (from 0, prompt "
        "included): float16 overflows in some models, use bfloat16 or float32; else leave this "
        "token out, or get the checkpoint again"
    )
