"""The exceptions of the project. Every message is one line that says what is wrong and what to do.

SlipstreamError
├── ConfigurationError      a setting or an argument that cannot work
├── EngineError             the engine cannot go on with what it is asked (`engine/errors.py`)
│   └── ModelError          a model or tokenizer that cannot be used
├── IncompatibleError       two nodes that do not fit each other (refused at the handshake)
├── NodeError               a node process that failed to start, died, or stopped answering
│   └── TextError           a text that cannot be completed; others can
├── BusyError               too many texts wait already: try again later
├── AwayError               the target is away: try again later
├── TransportError          an endpoint that cannot be bound or reached
├── OutputError             output (of a command) that cannot be written
├── ClosedError             use of an object that was closed
└── ProtocolError
    ├── LocalProtocolError  we broke the protocol: a bug of ours
    └── RemoteProtocolError a peer sent something that the protocol does not allow
        ├── OutsideError    the message is outside of what its text allows
        ├── NoAnswerError   the peer has not answered in time
        └── RefusedError    the coordinator has answered that this node does not fit
"""

from collections.abc import Iterable
from difflib import get_close_matches


class SlipstreamError(Exception):
    """Base class of every error that a user of Slipstream may want to catch."""


class ConfigurationError(SlipstreamError):
    """A setting or an argument that cannot work."""


class EngineError(SlipstreamError):
    """Base of every error that the engine raises on purpose."""


class ModelError(EngineError):
    """A model or tokenizer that cannot be used."""


class IncompatibleError(SlipstreamError):
    """Two nodes do not fit each other; refused at the handshake."""


class NodeError(SlipstreamError):
    """A node process that failed to start, died, or stopped answering."""


class TextError(NodeError):
    """One text cannot be completed; the other texts are not affected."""


class BusyError(SlipstreamError):
    """Too many texts wait for a lane already; later there may be room again."""


class AwayError(SlipstreamError):
    """No target is there that could write; another may come."""


class TransportError(SlipstreamError):
    """An endpoint that cannot be bound or reached."""


class OutputError(SlipstreamError):
    """Output cannot be written."""


class ClosedError(SlipstreamError):
    """An object was used after it had been closed."""


class ProtocolError(SlipstreamError):
    """A message that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """We were about to send something that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that the protocol does not allow."""


class OutsideError(RemoteProtocolError):
    """A message is outside of what its text allows, whatever its form."""


class NoAnswerError(RemoteProtocolError):
    """A peer has not answered in time."""


class RefusedError(RemoteProtocolError):
    """The coordinator has told this node that it does not fit, and why."""


MAX_SHOWN = 80
MIN_BEGINNING = 3


def shown(value: object) -> str:
    """Return a value's repr for an error message: one line of at most MAX_SHOWN characters."""
    try:
        line = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # for example an integer of thousands of digits
        line = f"a value of type {type(value).__name__}"
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."


def printable(words: str) -> str:
    """Return what a peer says as one line that does no harm to a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known word most like this one; "" if none is similar.

    Case does not matter. A word that was cut short (of at least 3 letters) is like the first known
    word that begins with it.
    """
    by_lower, word = {one.lower(): one for one in known}, word.lower()
    near = get_close_matches(word, by_lower, n=1, cutoff=0.6)
    if not near and len(word) >= MIN_BEGINNING:
        near = [one for one in by_lower if one.startswith(word)]
    return f"; did you mean {by_lower[near[0]]}?" if near else ""
