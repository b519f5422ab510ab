"""What a drafter knows and has learnt, over all its texts."""

from dataclasses import dataclass, field

from drafter_node.sending import Answers
from node.economics import NOTHING_KNOWN, PREFILL_CHUNK, Passes
from proto.messages import MAX_WINDOW


@dataclass(frozen=True, slots=True)
class Known:
    """Figures of the node.

    max_len  most tokens of a text that the model can read
    source   number of this source in drafts and acks
    steps    what its forwards take
    chunk    most tokens of a text that are read at once
    depth    most tokens in a row that it can draft
    is_head  it reads the target's features (`feeding.py`)
    """

    max_len: int
    source: int = 0
    steps: Passes = field(default_factory=lambda: Passes(NOTHING_KNOWN))
    answers: Answers = field(default_factory=Answers)
    chunk: int = PREFILL_CHUNK
    depth: int = MAX_WINDOW
    is_head: bool = False
