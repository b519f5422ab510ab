"""Where each token of a text came from (pure).

draft:SOURCE  drafted by SOURCE (model: the draft model; ngram: copied from the text itself or from
              a reference; earlier: from an earlier text) and accepted by the target
recovered     the target's own, in the place of a draft that it rejected
bonus         the target's own, after a pass in which it accepted every draft
plain         the target's own, of a pass without drafts
"""

from coordinator.text.session import Emit
from proto.messages import EARLIER_SOURCE, MODEL_SOURCE, NGRAM_SOURCE

SOURCES = {MODEL_SOURCE: "model", NGRAM_SOURCE: "ngram", EARLIER_SOURCE: "earlier"}
RECOVERED, BONUS, PLAIN = "recovered", "bonus", "plain"


def origins(emit: Emit) -> tuple[str, ...]:
    """The origin of every token of one pass.

    The pass rejected something if and only if it says what. Counts would not do: a text that ended
    at an accepted draft has no token of the target's own, and after a lost verdict some of the
    accepted drafts are known already.
    """
    num_own = len(emit.tokens) - emit.num_accepted
    own = RECOVERED if emit.rejected else BONUS if emit.num_drafted else PLAIN
    sources = emit.sources or (MODEL_SOURCE,) * emit.num_accepted
    return (*(f"draft:{SOURCES.get(source, source)}" for source in sources), *(own,) * num_own)


def shown_rejected(emit: Emit) -> tuple[int, ...]:
    """The rejected drafts that another token replaced; none if the text ended before them."""
    return emit.rejected if len(emit.tokens) > emit.num_accepted else ()
