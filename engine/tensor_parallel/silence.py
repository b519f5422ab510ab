"""When a follower counts as stopped: what its process says beside its work is no longer heard.

A follower says an empty line now and then, from a thread that never touches the model. Whoever
watches it may have been stopped as well, by Ctrl-Z for one: that time does not count.
"""

BEAT_S = 0.5  # between two empty lines
LIMIT_S = 10.0  # less than a coordinator waits for rank 0
LIMIT_WHILE_LOADING_S = 60.0  # to load a library may keep every thread of a process waiting


class Silence:
    """How long a follower has been silent, in the time during which the watcher itself ran."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self.seconds = 0.0

    def heard(self) -> None:
        """Anything at all has come."""
        self.seconds = 0.0

    def passes(self, now: float) -> None:
        """The watcher looks, which it does about every BEAT_S if it is not stopped itself."""
        self.seconds += min(max(0.0, now - self._looked), 2 * BEAT_S)
        self._looked = now
