"""What a target knows for all its texts: its settings, and what it has measured."""

from dataclasses import dataclass, field

from engine.layout.earlier import EarlierTexts
from node.costs import Costs, crowd
from node.economics import Acceptance
from node.placing import Place, Placing
from node.rows import PREFILL_CHUNK
from target_node.resting import Courses


@dataclass(frozen=True, slots=True)
class Known:
    """Settings of the target, and figures that it measures.

    fixed_rows  reproducible mode: every decoding pass has at most so many rows of a text (the
                engine pads them to exactly as many), the prompt is prefilled alone, and nothing is
                copied from another text's cache; None: off
    costs       measured times of passes, waits and answers
    acceptance  measured acceptance rates
    courses     what was measured about resting the drafter, for each kind of text
    placing     decides on which CPU cores passes run; None: always on the same
    earlier     texts from which others may be drafted, where a request asks for that
    chunk       most tokens of a prompt that one pass prefills
    scored_chunk  the same where log-probabilities of the prompt are wanted
    """

    fixed_rows: int | None = None
    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    courses: Courses = field(default_factory=Courses)
    placing: Placing | None = None
    earlier: EarlierTexts = field(default_factory=EarlierTexts)
    chunk: int = PREFILL_CHUNK
    scored_chunk: int = PREFILL_CHUNK

    def plain_s(self, num_texts: int) -> float:
        """Return the seconds of a pass of so many texts without drafts; 0 if none was measured.

        It would run on the cores on which such passes are fastest, wherever others run.
        """
        place = Place.APART
        if self.placing is not None:
            place = self.placing.place_for((crowd(num_texts), None), is_drafted=False)
        return self.costs.passes(num_texts, place).of(num_texts)
