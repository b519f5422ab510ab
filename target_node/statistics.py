"""What a target has learnt, over all its texts."""

from dataclasses import dataclass, field

from engine.layout.earlier import EarlierTexts
from node.economics import PREFILL_CHUNK, Acceptance, Costs
from target_node.resting import Courses


@dataclass(frozen=True, slots=True)
class Known:
    """Figures of the node.

    fixed_rows  reproducible mode: every decoding pass has at most so many rows of a text (the
                engine pads them to exactly as many), the prompt is prefilled alone, and no other
                text's cache is used
    earlier  texts that others may be copied from, where that is asked for
    chunk       most tokens of a prompt that are read at once
    scored_chunk  most of one whose log-probabilities are wanted, and so all its logits
    """

    fixed_rows: int | None = None
    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    courses: Courses = field(default_factory=Courses)
    earlier: EarlierTexts = field(default_factory=EarlierTexts)
    chunk: int = PREFILL_CHUNK
    scored_chunk: int = PREFILL_CHUNK
