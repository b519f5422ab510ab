"""Texts on which drafts are right as often as given rates say, or as in a trace of a real pair.

A drafter ranks the tokens that may come next; the only thing that matters is the rank of the token
that the target chooses. So a text is a sequence of ranks, one for each position, recorded or made,
and the models here are made so that these ranks hold along the text. On paths that the target never
takes, the drafter behaves as at some position of the trace.

A drafter's score of a token is the logarithm of the chance that the target chooses it, estimated as
well as that drafter can. A trace has the scores that were recorded with it, or scores that are
right for all its positions together: the share of each rank.
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
# If only the chance of the first rank is given: the part of the remaining chance that the second
# rank gets, and each further one. As measured with the embedded pair on sampled text (docs/LOG.md).
SECOND_RANK, NEXT_RANK = 0.4, 0.25
LOWEST = -20.0  # score of a rank that never occurred: practically impossible, and finite
BLOCK, GOLDEN_RATIO = 8, (math.sqrt(5) - 1) / 2
NUM_TOKENS = 1000  # size of the vocabulary of the models in a rehearsal


@dataclass(frozen=True, slots=True)
class Position:
    """What the drafter predicts at one position of a text, and how good that is.

    rank    rank of the target's token among the drafter's choices, 0 for the likeliest; None: it is
            none of them
    scores  of the drafter's choices, the likeliest first (natural logarithms)
    """

    rank: int | None
    scores: tuple[float, ...]


Trace = tuple[tuple[Position, ...], ...]
"""Several texts, each as its positions."""


def chances(text: str) -> tuple[float, ...]:
    """Return the chance of each rank from text like "0.75" or "0.75,0.12,0.05".

    If one chance is given, the further ranks get SECOND_RANK and NEXT_RANK of what is left. Raises
    ConfigurationError if the text is not valid.
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
    """Return texts in which each rank occurs as often as `shares` says, wherever in the text.

    Between two positions that the drafter gets wrong there are runs of geometric length. Their
    lengths are not drawn one by one: each block of a few runs has short and long ones as often as
    it should, in an order that is drawn. So short texts give the same figures as long ones would.
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
    """Return BLOCK numbers in (0, 1), evenly spread.

    The numbers of many blocks together are too.
    """
    shift = (block + 0.5) * GOLDEN_RATIO % 1.0
    order = sorted(range(BLOCK), key=lambda index: mix(block << 8 | index + 1))
    return [(index + shift) / BLOCK for index in order]


def _run_length(chance: float, quantile: float) -> int:
    """Return a geometric number of hits in a row at this quantile; each hit has this chance."""
    return int(math.log(quantile) / math.log(chance)) if chance > 0 else 0


def _rank_of_miss(shares: Sequence[float], quantile: float) -> int | None:
    """Return the rank at this quantile among positions where rank 0 is wrong; None: no rank."""
    so_far = accumulate(shares[1:])
    left = 1.0 - shares[0]
    return next((rank for rank, sum_ in enumerate(so_far, 1) if sum_ / left > quantile), None)


def read(lines: Iterable[str]) -> Trace:
    """Return the trace in lines of JSON, one object for each text.

    A line is `{"ranks": [0, null, 1 ...], "scores": [[...] ...]}`; the scores may be left out.
    Raises ConfigurationError if a line is not valid, or there is no text.
    """
    texts: list[tuple[Position, ...]] = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(_text_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"--trace: line {number} is no text with ranks ({error}); `experiment --predict` "
                "records them; or use --pair"
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
    """Return `num_texts` texts of at most `num_tokens` tokens, made of pieces of the whole trace.

    The pieces come from beginnings, middles and ends of the recorded texts, because acceptance
    differs between these.
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
    """Return the line for a text, as `read` reads it."""
    ranks = [position.rank for position in text]
    scores = [[round(score, 4) for score in position.scores] for position in text]
    return json.dumps({"ranks": ranks, "scores": scores})


def shares(trace: Trace) -> tuple[float, ...]:
    """Return for each of NUM_RANKS ranks at how many positions the target's token has it (0..1)."""
    counts = Counter(position.rank for text in trace for position in text)
    total = sum(counts.values())
    return tuple(counts[rank] / total for rank in range(NUM_RANKS))


def _score(share: float) -> float:
    return math.log(share) if share > 0 else LOWEST


class Ranked:
    """A target and a drafter model whose texts have the ranks of a trace.

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
        """Return the drafter's choices after each path, which is named by its digest."""
        number = part.opened.policy.branches
        return tuple(self._children(digest, number) for digest in digests)

    def _children(self, digest: int, number: int) -> drafter.Children:
        """Return the drafter's choices after a path: `number`, or as many as have scores."""
        position = self._at.get(digest) or self._pool[mix(~digest) % len(self._pool)]
        said, number = _said_after(digest), min(number, len(position.scores))
        tokens = [(said + 1 + rank) % NUM_TOKENS for rank in range(number)]
        if position.rank is not None and position.rank < number:
            tokens[position.rank] = said
        return drafter.Children(tuple(tokens), position.scores[:number])

    def verify(self, part: target.Part, digests: Sequence[int]) -> target.Outcome:
        """Return the target's token after each path, which is named by its digest."""
        assert part.judge is None, "the classical rules are not rehearsed"
        return target.Outcome(tuple(map(_said_after, digests)))


def _said_after(digest: int) -> int:
    """Return the target's token after a path."""
    return mix(digest) % NUM_TOKENS
