"""What becomes of a text whose pass finds no memory, or whose logits are not finite (pure).

The reason can be other texts: one that was in its lane before, or copied rows. So the text is read
anew once, in a lane that is all zeros, and nothing is copied. If it fails again, its own tokens are
at fault: the text ends, and the others go on. If a pass of this text alone finds no memory, the
text ends at once.
"""

from collections.abc import Sequence

from node.events import Send
from proto.messages import Fault, FaultCode, Open


class Failures:
    """Failures of one life of a text: whether it is read anew, and whether it has ended.

    has_ended  True: the text cannot go on
    said       the messages about it, which are repeated until the coordinator closes the text
    """

    def __init__(self, opened: Open) -> None:
        self._opened = opened
        self._read_anew_at: int | None = None  # length of the text when it was last read anew
        self.has_ended = False
        self.said: Sequence[Send] = ()

    @property
    def is_reading_anew(self) -> bool:
        """True if nothing that was computed for other texts may be copied to its lane."""
        return self._read_anew_at is not None

    def met(self, length: int, why: str, *, is_cause: bool) -> Sequence[Send]:
        """Note a failure of the text at this length; return messages that end it, or ().

        why       reason, for people
        is_cause  True: it is known to be this text's own fault
        """
        if self._read_anew_at != length and not is_cause:
            self._read_anew_at = length
            return ()
        self.has_ended = True
        session, incarnation = self._opened.session, self._opened.incarnation
        fault = Fault(session, incarnation, FaultCode.FAILED, why)
        self.said = (Send(fault),)
        return self.said


def not_finite_at(position: int) -> str:
    """Return the message to people about logits that are not finite."""
    return (
        f"the target's logits are not finite at token position {position} (from 0, prompt "
        "included): float16 overflows in some models, use bfloat16 or float32; else leave this "
        "token out, or get the checkpoint again"
    )
