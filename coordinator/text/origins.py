"""Where each token of a text came from (pure). The only home of the names of sources.

draft:SOURCE  drafted by SOURCE (see `SOURCES`) and accepted by the target
recovered     the target's own, in the place of a draft that it rejected
bonus         the target's own, after a pass in which it accepted every draft
plain         the target's own, of a pass without drafts
"""

from coordinator.text.events import Emit
from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, MODEL_SOURCE, NGRAM_SOURCE

MODEL, NGRAM, EARLIER, HEADS = "model", "ngram", "earlier", "heads"
# The drafter's process, a draft model or a head; what was copied from this text or a reference, or
# from earlier texts; heads in the target's process.
SOURCES = {
    MODEL_SOURCE: MODEL,
    NGRAM_SOURCE: NGRAM,
    EARLIER_SOURCE: EARLIER,
    HEADS_SOURCE: HEADS,
}
# For people.
TITLES = {MODEL: "drafter", NGRAM: "n-gram", EARLIER: "earlier text", HEADS: "heads"}
RECOVERED, BONUS, PLAIN = "recovered", "bonus", "plain"


def source_name(source: int) -> str:
    """The name of a source; drafters after the first are called by their numbers."""
    return SOURCES.get(source, str(source))


def source_names(sources: tuple[int, ...], num_accepted: int) -> tuple[str, ...]:
    """Who drafted the accepted tokens of a pass. `sources` is empty if all are the drafter's."""
    return tuple(map(source_name, sources or (MODEL_SOURCE,) * num_accepted))


def origins(emit: Emit) -> tuple[str, ...]:
    """The origin of every token of one pass.

    The pass rejected something if and only if it says what. Counts would not do: a text that ended
    at an accepted draft has no token of the target's own, and after a lost verdict some of the
    accepted drafts are known already.
    """
    num_own = len(emit.tokens) - emit.num_accepted
    own = RECOVERED if emit.rejected else BONUS if emit.num_drafted else PLAIN
    names = source_names(emit.sources, emit.num_accepted)
    return (*(f"draft:{name}" for name in names), *(own,) * num_own)


def shown_rejected(emit: Emit) -> tuple[int, ...]:
    """The rejected drafts that another token replaced; none if the text ended before them."""
    return emit.rejected if len(emit.tokens) > emit.num_accepted else ()
