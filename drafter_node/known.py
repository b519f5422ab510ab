"""What a drafter knows for all its texts: its settings, its model, and what it has measured."""

from dataclasses import dataclass, field

from drafter_node.sending import Answers
from node.costs import NOTHING_KNOWN, Passes
from node.rows import PREFILL_CHUNK
from proto.messages import MAX_WINDOW


@dataclass(frozen=True, slots=True)
class Known:
    """Properties of the drafter's model, and figures that it measures.

    max_len  most tokens of a text that the model can read
    source   number of this drafter as a source, in drafts and acks
    steps    measured seconds of its forwards, by their rows
    answers  measured times until the target answers
    chunk    most tokens that one forward prefills
    depth    most tokens in a row that it can draft
    is_head  True: it is a head, which reads the target's features (`feeding.py`)
    is_translated  True: it has another vocabulary than the target (`translation/`)
    is_at_home  True: it runs in the target's process, which takes every draft at once
    """

    max_len: int
    source: int = 0
    steps: Passes = field(default_factory=lambda: Passes(NOTHING_KNOWN))
    answers: Answers = field(default_factory=Answers)
    chunk: int = PREFILL_CHUNK
    depth: int = MAX_WINDOW
    is_head: bool = False
    is_translated: bool = False
    is_at_home: bool = False
