"""A target and a drafter whose choices are hashes of the text so far.

Theory of operation
-------------------
A *path* is a hash of all tokens up to a row. The target's next token is a hash of the path. So is
the rank at which the drafter has that token: 1, 2, 3 or 4 with the chances of `GREEDY`; otherwise
it is not among the drafter's four. Every other rank holds a wrong token. So how often drafts are
right is known in advance, and does not depend on the text before them.

At a temperature above 0 nothing is drawn either: the choice is a hash of the path *and of the seed
and sample of the text*, and the ranks have the chances of `SAMPLED`. These are lower, because two
models agree less about tokens that are drawn. The noise that real models share
(`engine/choice/coupling.py`) is not needed for this, and the value of the temperature makes no
difference.

`choose` and `rank_scored` take the place of what `engine.choice` has with these names:
where those are given logits [n, V], these are given the paths of the n rows.
"""

from collections.abc import Iterable, Sequence
from math import log

from engine.choice.sampling import Sampling

VOCAB_SIZE = 4096
GREEDY = (0.70, 0.12, 0.05, 0.03)
SAMPLED = (0.58, 0.13, 0.06, 0.04)

START = 0x243F6A8885A308D3  # the path of the empty text
_MASK = (1 << 64) - 1
_TOKEN, _RANK, _OTHER = 1, 2, 3  # mixed into a path, so that each question gets another hash


def after(path: int, token: int) -> int:
    """Return the path of a text with one more token."""
    return _mixed(path + (token + 1) * 0x9E3779B97F4A7C15)


def path_of(tokens: Iterable[int]) -> int:
    """Return the path of a whole text."""
    path = START
    for token in tokens:
        path = after(path, token)
    return path


def choose(
    paths: Sequence[int],
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
) -> list[int]:
    """Return the token that the target chooses after each path; a path includes its position."""
    assert len(paths) == len(positions)
    luck = _luck(sampling, seed, sample_index)
    return [_token(path ^ luck) for path in paths]


def rank_scored(
    paths: Sequence[int],
    sampling: Sampling,
    seed: int,
    sample_index: int,
    positions: Sequence[int],
    num_ranked: int,
    *,
    num_valid: int | None = None,
    ids: None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Return for each path the drafter's first tokens, the likeliest first, and their scores.

    A score is the natural logarithm of the chance of its rank. There are at most as many tokens as
    there are chances.
    """
    del ids  # its tokens are not those of a vocabulary
    assert len(paths) == len(positions)
    assert num_valid in (None, VOCAB_SIZE)
    luck = _luck(sampling, seed, sample_index)
    chances = chances_of(sampling)[:num_ranked]
    scores = [log(chance) for chance in chances]
    ranked = [_ranked(path ^ luck, chances) for path in paths]
    return ranked, [scores] * len(ranked)


def chances_of(sampling: Sampling) -> tuple[float, ...]:
    """Return how often the target's token has each rank of the drafter."""
    return GREEDY if sampling.is_greedy else SAMPLED


def text_after(
    prompt: Sequence[int], num_tokens: int, sampling: Sampling, seed: int, sample_index: int = 0
) -> tuple[int, ...]:
    """Return the tokens that the target alone writes after a prompt."""
    luck, path = _luck(sampling, seed, sample_index), path_of(prompt)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(_token(path ^ luck))
        path = after(path, tokens[-1])
    return tuple(tokens)


def _ranked(path: int, chances: Sequence[float]) -> list[int]:
    """Return the drafter's tokens: the right one at a rank that the hash decides (or nowhere).

    All other ranks hold wrong tokens.
    """
    right, number = _token(path), _mixed(path ^ _RANK) / (1 << 64)
    tokens: list[int] = []
    first_wrong = _mixed(path ^ _OTHER)
    for rank, chance in enumerate(chances):
        if 0 <= number < chance:
            tokens.append(right)
        else:
            # Chosen among all ids except the right one, so that no two ranks hold the same token.
            wrong = (first_wrong + rank) % (VOCAB_SIZE - 1)
            tokens.append(wrong + (wrong >= right))
        number -= chance
    return tokens


def _token(path: int) -> int:
    """Return the target's token after a path."""
    return _mixed(path ^ _TOKEN) % VOCAB_SIZE


def _luck(sampling: Sampling, seed: int, sample_index: int) -> int:
    """Return the hash of seed and sample of a sampled text; 0 for a greedy one."""
    return 0 if sampling.is_greedy else _mixed(_mixed(seed) + sample_index + 1)


def _mixed(word: int) -> int:
    """Return a hash of 64 bits: the output function of splitmix64."""
    word &= _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31
