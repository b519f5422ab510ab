"""Decide when a follower (rank from 1 on) counts as stopped: no heartbeat came for too long.

A follower writes an empty line every `BEAT_S` seconds, from a thread that never touches the model.
The process that watches it may have been stopped too, for example by Ctrl-Z; that time does not
count.
"""

BEAT_S = 0.5  # between two empty lines
LIMIT_S = 10.0  # longest silence allowed; less than a coordinator waits for rank 0
LIMIT_WHILE_LOADING_S = 60.0  # loading a library may block every thread of the process


class Silence:
    """Measures how long a follower has been silent, not counting time when the watcher was stopped.

    seconds  length of the silence so far
    """

    def __init__(self, now: float) -> None:
        self._looked = now
        self.seconds = 0.0

    def heard(self) -> None:
        """Record that the follower wrote something: the silence starts again at 0."""
        self.seconds = 0.0

    def passes(self, now: float) -> None:
        """Add the time since the last call, at most 2 `BEAT_S`; call it about every `BEAT_S`."""
        self.seconds += min(max(0.0, now - self._looked), 2 * BEAT_S)
        self._looked = now
