"""How often drafts are right: given as numbers, or as a trace of what a real pair did.

A drafter ranks what may come next, and of interest is only the rank of what the target says. So a
text is a row of ranks, one for each of its positions, whoever recorded or made it, and the models
here are made so that these ranks hold along the text. Beside it, where the target never looks, what
the drafter says is like what it says at some position of the trace.

A drafter's score of a token is the logarithm of the chance that the target says it, estimated as
well as that drafter can. A trace has the scores that were recorded with it, or those that are true
of all its positions together: the share of each rank.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from drafter_node import compute as drafter
from proto.errors import ConfigurationError
from rehearsal.cache import fold
from rehearsal.setting import Text
from rehearsal.timeline import mix
from target_node import compute as target

NUM_RANKS = 8
# Of what the ranks before leave, the second and each further one, where only the first is given: as
# the embedded pair has it on sampled text (docs/LOG.md).
SECOND_RANK, NEXT_RANK = 0.4, 0.25
LOWEST = -20.0  # score of what never happened: as good as impossible, and finite
BLOCK, GOLDEN_RATIO = 8, (math.sqrt(5) - 1) / 2
NUM_TOKENS = 1000  # that the models of a rehearsal know


@dataclass(frozen=True, slots=True)
class Position:
    """What the drafter makes of one place of a text.

    rank    of the target's token among its choices, 0 for the likeliest; None: it is none of them
    scores  of its choices, the likeliest first (natural logarithm)
    """

    rank: int | None
    scores: tuple[float, ...]


Trace = tuple[tuple[Position, ...], ...]
"""The positions of some texts."""


def chances(text: str) -> tuple[float, ...]:
    """The chance of each rank, of "0.75" or "0.75,0.12,0.05". Raises ConfigurationError.

    Where one is given, the others have SECOND_RANK and NEXT_RANK of what is left.
    """
    try:
        given = [float(part) for part in text.split(",")]
    except ValueError:
        given = [-1.0]
    if not all(0 <= chance <= 1 for chance in given) or sum(given) > 1 + 1e-9:
        raise ConfigurationError(
            f"--acceptance: expected chances like 0.75 or 0.75,0.12,0.05, at most 1 together, "
            f"got {text!r}"
        )
    if len(given) == 1:
        while len(given) < NUM_RANKS:
            share = SECOND_RANK if len(given) == 1 else NEXT_RANK
            given.append(share * (1.0 - sum(given)))
    return tuple(given[:NUM_RANKS])


def drawn(shares: Sequence[float], num_texts: int, num_tokens: int) -> Trace:
    """Texts in which each rank comes as often as its share says, one position like another.

    Between two positions that the drafter gets wrong lie runs of geometric length. Their lengths
    are not drawn one by one: every few runs have short and long ones as often as they should, in an
    order that is drawn. So short texts say what long ones would.
    """
    total, first = num_texts * num_tokens, shares[0]
    scores = tuple(map(_score, shares))
    ranks: list[int | None] = [0] * total if first >= 1.0 else []
    block = 0
    while len(ranks) < total:
        runs, misses = _quantiles(2 * block), _quantiles(2 * block + 1)
        for run, miss in zip(runs, misses, strict=True):
            ranks += [*[0] * _run_length(first, run), _rank_of_miss(shares, miss)]
        block += 1
    positions = [Position(rank, scores) for rank in ranks[:total]]
    return tuple(
        tuple(positions[start : start + num_tokens]) for start in range(0, total, num_tokens)
    )


def _quantiles(block: int) -> list[float]:
    """Some numbers in (0, 1), evenly spread; those of many blocks together as well."""
    shift = (block + 0.5) * GOLDEN_RATIO % 1.0
    order = sorted(range(BLOCK), key=lambda index: mix(block << 8 | index + 1))
    return [(index + shift) / BLOCK for index in order]


def _run_length(chance: float, quantile: float) -> int:
    """Of hits in a row, each with this chance: such a share of all runs is longer."""
    return int(math.log(quantile) / math.log(chance)) if chance > 0 else 0


def _rank_of_miss(shares: Sequence[float], quantile: float) -> int | None:
    """Where the first is wrong: such a share of these positions has a lower rank."""
    so_far = accumulate(shares[1:])
    left = 1.0 - shares[0]
    return next((rank for rank, sum_ in enumerate(so_far, 1) if sum_ / left > quantile), None)


def read(lines: Iterable[str]) -> Trace:
    """A recorded trace: a JSON object a line, `{"ranks": [0, null, 1 ...], "scores": [[...] ...]}`.

    The scores may be left out. Raises ConfigurationError.
    """
    texts: list[tuple[Position, ...]] = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(_text_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"--trace: line {number} is no text with ranks ({error}); record one with "
                "`python -m lab.measure.ranks`"
            ) from error
    if not any(texts):
        raise ConfigurationError("--trace: there is no text in it")
    trace = tuple(text for text in texts if text)
    if all(position.scores for text in trace for position in text):
        return trace
    scores = tuple(map(_score, shares(trace)))
    return tuple(tuple(replace(position, scores=scores) for position in text) for text in trace)


def _text_of(record: dict[str, list[object]]) -> tuple[Position, ...]:
    ranks = record["ranks"]
    scores = record.get("scores", [()] * len(ranks))
    if len(scores) != len(ranks):
        raise ValueError(f"{len(ranks)} ranks and {len(scores)} scores")
    return tuple(_position(rank, row) for rank, row in zip(ranks, scores, strict=True))


def _position(rank: object, scores: object) -> Position:
    if rank is not None and (not isinstance(rank, int) or rank < 0):
        raise ValueError(f"a rank is {rank!r}")
    if not isinstance(scores, list | tuple):
        raise TypeError(f"scores are {scores!r}")
    return Position(rank, tuple(float(score) for score in scores))


def cut(trace: Trace, num_texts: int, num_tokens: int) -> Trace:
    """So many texts of at most so many tokens, of pieces of all that were recorded.

    One after another the pieces are of beginnings, middles and ends: drafts are not right equally
    often everywhere.
    """
    each = -(-num_texts * num_tokens // len(trace))
    positions: list[Position] = []
    for index, text in enumerate(trace):
        start = max(0, len(text) - each) * index // max(1, len(trace) - 1)
        positions += text[start : start + each]
    length = min(num_tokens, len(positions) // num_texts)
    starts = range(0, num_texts * length, max(1, length))
    return tuple(tuple(positions[start : start + length]) for start in starts)


def written(text: Sequence[Position]) -> str:
    """The line of a text that `read` reads."""
    ranks = [position.rank for position in text]
    scores = [[round(score, 4) for score in position.scores] for position in text]
    return json.dumps({"ranks": ranks, "scores": scores})


def shares(trace: Trace) -> tuple[float, ...]:
    """How often the target's token has each rank."""
    counts = Counter(position.rank for text in trace for position in text)
    total = sum(counts.values())
    return tuple(counts[rank] / total for rank in range(NUM_RANKS))


def _score(share: float) -> float:
    return math.log(share) if share > 0 else LOWEST


class Ranked:
    """A target and a drafter whose texts have the ranks of a trace.

    See `rehearsal.world.Models`.
    """

    def __init__(self, texts: Sequence[Text], trace: Trace) -> None:
        self._pool = [position for text in trace for position in text]
        self._at: dict[int, Position] = {}  # by the digest of the path before it
        for text, positions in zip(texts, trace, strict=True):
            digest = 0
            for token in text.prompt:
                digest = fold(digest, token)
            for position in positions:
                self._at[digest] = position
                digest = fold(digest, _said_after(digest))

    def draft(
        self, part: drafter.Part, digests: Sequence[int], _index: int
    ) -> tuple[drafter.Children, ...]:
        """See `rehearsal.world.Models`."""
        number = part.opened.policy.branches
        return tuple(self._children(digest, number) for digest in digests)

    def _children(self, digest: int, number: int) -> drafter.Children:
        """So many choices behind a path, or as many as have scores."""
        position = self._at.get(digest) or self._pool[mix(~digest) % len(self._pool)]
        said, number = _said_after(digest), min(number, len(position.scores))
        tokens = [(said + 1 + rank) % NUM_TOKENS for rank in range(number)]
        if position.rank is not None and position.rank < number:
            tokens[position.rank] = said
        return drafter.Children(tuple(tokens), position.scores[:number])

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """See `rehearsal.world.Models`."""
        assert part.judge is None, "the classical rules are not rehearsed"
        return target.Outcome(tuple(map(_said_after, digests)))


def _said_after(digest: int) -> int:
    """The target's token behind a path."""
    return mix(digest) % NUM_TOKENS
