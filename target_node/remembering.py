"""Keeps what texts have shown of a pair of models on this machine, for later starts.

Whether drafts pay is known after some fifty passes (`resting.py`). A process that writes one short
text would measure it until it ends, and the next one would begin anew. So outcomes are kept in the
table of what was found out here (`engine/kept.py`), for this pair of models and these devices.
They decide with what a text begins, and not for good: trials go on from process to process. It is
written when a trial has ended and when a text has, but not several times a second.
"""

import time
from collections.abc import Sequence
from typing import Any

from engine.checkpoint.checkpoint import name_and_size
from engine.kept import Kept
from engine.loading import Engine
from proto.node_config import NodeConfig
from target_node.resting import MAX_KINDS, Outcome

KIND = "rests"
MOST_NUMBER = 1e9  # of tokens a second, seconds of a pass, passes of a stretch
PAUSE_S = 1.0  # at least so long after outcomes were kept others are
SPENT = 0.005  # and most of the time that this may take, where a disk is slow


class Memory:
    """The outcomes of one pair of models, from earlier starts and for later ones."""

    def __init__(self, kept: Kept, about: Sequence[str]) -> None:
        """Take what outcomes depend on, besides this machine; (): nothing is remembered."""
        self._kept, self._about = kept, about
        self._next_at = 0.0  # nothing is kept before

    @property
    def earlier(self) -> Sequence[Outcome]:
        """Return the outcomes of earlier starts; what is none is left out."""
        found = self._kept.before(KIND, self._about) if self._about else ()
        outcomes = map(_outcome, found[-MAX_KINDS:] if isinstance(found, list) else ())
        return tuple(one for one in outcomes if one is not None)

    def keep(self, outcomes: Sequence[tuple[Any, ...]]) -> None:
        """Keep these outcomes, unless others were kept just now; the next ones come soon."""
        started = time.monotonic()
        if not self._about or started < self._next_at:
            return
        self._kept.keep(KIND, self._about, outcomes)
        ended = time.monotonic()
        self._next_at = ended + max(PAUSE_S, (ended - started) / SPENT)


def memory_of(config: NodeConfig, engine: Engine, kept: Kept) -> Memory:
    """Return the memory of a target and the drafter that its config names, if it has any.

    A node that is to find everything anew (`tunes`) forgets what was kept.
    """
    if not config.remembered_as:
        return Memory(kept, ())
    loaded = engine.loaded
    target = name_and_size(config.model, config.revision), config.quantization, str(loaded.dtype)
    forms = engine.executor.backend, config.device, config.shared_device, config.placement
    padded = f"{config.fixed_rows} rows" if config.fixed_rows else ""
    beside = config.home_drafter, f"with {config.remembered_as}"
    memory = Memory(kept, (*target, *forms, padded, *beside))
    if config.tunes:
        memory.keep(())
    return memory


def _outcome(found: object) -> Outcome | None:
    """Return what was kept as an outcome; None if it is none, since the file is the user's."""
    match found:
        case [
            str() as kind,
            int() as num_texts,
            bool() as rests,
            int() as stretch,
            int() as num_passes,
            [float() as alone, float() as alone_s],
            [float() as drafted, float() as drafted_s],
        ]:
            numbers = num_texts, stretch, alone, alone_s, drafted, drafted_s
            if all(0 < one < MOST_NUMBER for one in numbers) and 0 <= num_passes <= stretch:
                speeds = (alone, alone_s), (drafted, drafted_s)
                return Outcome(kind, num_texts, rests, stretch, num_passes, *speeds)
    return None
