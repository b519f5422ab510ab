"""The choice of a drafter with another vocabulary, made with the noise of the target's tokens."""

import numpy as np
import pytest
import torch

from engine.choice.coupling import choose, rank_scored
from engine.choice.sampling import Sampling
from engine.choice.translated import TranslatedChoice
from engine.errors import NotFinite
from tests.words import ToyWords

WORDS = [b"a", b"b", b"ab", b"abc", b"c", b" d", b"e"]
TARGET = ToyWords([word.decode() for word in WORDS], ("<end>",))
SETTINGS = (Sampling(0.8), Sampling(1.0, top_k=3), Sampling(0.7, top_p=0.8, min_p=0.05))


def permuted(order: list[int]) -> ToyWords:
    return ToyWords([WORDS[index].decode() for index in order], ("<end>",))


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling()], ids=str)
def test_with_the_same_tokens_in_another_order_the_choice_is_the_targets(
    sampling: Sampling,
) -> None:
    order = [3, 1, 6, 0, 2, 5, 4]
    choice = TranslatedChoice(permuted(order), TARGET, (7,))
    generator = torch.Generator().manual_seed(3)
    for seed in range(100):
        logits = torch.randn(1, 8, generator=generator) * 2
        logits[:, 7] = -torch.inf
        own = logits[:, [*order, 7]]
        ids, scores = choice.rank_scored(own, sampling, seed, 0, [(5, b"", b"")], 2, num_valid=8)
        wanted, likely = rank_scored(logits, sampling, seed, 0, [5], 2)
        assert [[order[id_] for id_ in ids[0]]] == wanted
        assert scores[0] == pytest.approx(likely[0], rel=1e-4, abs=1e-5)


def chances_of_letters(target: np.ndarray) -> dict[bytes, dict[bytes, float]]:
    """The chance of each next letter after what was begun, by those of the target's tokens.

    Behind a whole token any other may begin, with the same chances.
    """
    found: dict[bytes, dict[bytes, float]] = {}
    letters = [word for word in WORDS if len(word) == 1 or word == b" d"]
    for begun in (b"", b"a", b"ab"):
        mass = {word: p for word, p in zip(WORDS, target, strict=True) if word.startswith(begun)}
        total = sum(mass.values())
        whole = mass.get(begun, 0.0) / total if begun else 1.0
        first = {
            letter: sum(p for word, p in zip(WORDS, target, strict=True) if word.startswith(letter))
            for letter in letters
        }
        found[begun] = {
            letter: whole * first[letter]
            + (sum(p for word, p in mass.items() if word.startswith(begun + letter)) / total)
            * bool(begun)
            for letter in letters
        }
    return found


def test_letters_make_the_targets_words_more_often_than_without_its_noise() -> None:
    """A drafter that knows the target's chances, letter by letter, mostly makes its choice."""
    letters = ToyWords(["a", "b", "c", " d", "e"], ("<end>",))
    choice = TranslatedChoice(letters, TARGET, ())
    target = np.array([0.2, 0.15, 0.2, 0.1, 0.1, 0.15, 0.1])
    chances = chances_of_letters(target)
    logits = torch.from_numpy(np.log(target)[None].astype(np.float32))

    def drafted(seed: int) -> bytes:
        """The first of the target's words on the drafter's path."""
        path = b""
        while True:
            ids = TARGET.following(path)
            if len(ids) > 1 or path not in chances:
                return WORDS[ids[0]]
            row = [chances[path].get(word or b"", 0.0) for word in letters.bytes_of]
            own = torch.from_numpy(np.log(np.array(row) + 1e-9)[None].astype(np.float32))
            (found,), _ = choice.rank_scored(
                own, Sampling(1.0), seed, 0, [(9, path, b"")], 1, num_valid=6
            )
            path += letters.bytes_of[found[0]] or b""

    def agreement(shift: int) -> float:
        right = 0
        for seed in range(1500):
            (wanted,) = choose(logits, Sampling(1.0), seed, 0, [9])
            right += drafted(seed + shift) == WORDS[wanted]
        return right / 1500

    apart = float((target**2).sum())  # two choices that know nothing of each other
    assert agreement(10**6) == pytest.approx(apart, abs=0.04)
    assert agreement(0) > 0.7


def test_what_says_nothing_is_never_chosen_but_the_end_is() -> None:
    own = ToyWords(["a", ""], ("<s>", "<end>"))
    choice = TranslatedChoice(own, TARGET, (3,))
    logits = torch.tensor([[0.0, 9.0, 9.0, 5.0]])
    ids, _ = choice.rank_scored(logits, Sampling(), 1, 0, [(5, b"", b"")], 4, num_valid=4)
    assert ids == [[3, 0]]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(0.8, top_k=1)], ids=str)
def test_behind_known_bytes_only_tokens_that_begin_with_them_are_chosen(sampling: Sampling) -> None:
    choice = TranslatedChoice(TARGET, TARGET, (7,))
    logits = torch.tensor([[0.0, 9.0, 2.0, 1.0, 5.0, 9.0, 9.0, 9.0]])
    for seed in range(20):
        (ids,), (scores,) = choice.rank_scored(
            logits, sampling, seed, 0, [(5, b"", b"ab")], 1, num_valid=8
        )
        assert set(ids) == {2, 3}, "what says just these bytes, and a longer one"
        assert sum(np.exp(scores)) == pytest.approx(1.0, abs=1e-4)
    (ids,), _ = choice.rank_scored(logits, sampling, 1, 0, [(5, b"", b"zz")], 1, num_valid=8)
    assert ids, "where nothing fits, something is chosen: an empty row would mean broken logits"


def test_a_longer_token_has_the_noise_of_what_follows_the_known_bytes() -> None:
    own = ToyWords(["ab", "abe", "abc"], ("<end>",))
    choice = TranslatedChoice(own, TARGET, (3,))
    flat = torch.zeros(1, 8)
    right = 0
    for seed in range(200):
        (ids,), _ = choice.rank_scored(
            flat[:, :4], Sampling(1.0), seed, 0, [(5, b"", b"ab")], 1, num_valid=4
        )
        only = torch.full((1, 8), -torch.inf)
        only[:, [4, 6]] = 0.0  # "c" and "e", as likely as each other
        (wanted,) = choose(only, Sampling(1.0), seed, 0, [5])
        first = next(id_ for id_ in ids if id_ != 0)
        right += {2: 4, 1: 6}[first] == wanted
    assert right == 200


def test_logits_that_are_not_finite_are_refused() -> None:
    choice = TranslatedChoice(TARGET, TARGET, ())
    with pytest.raises(NotFinite):
        choice.rank_scored(
            torch.full((1, 8), torch.nan), Sampling(), 1, 0, [(5, b"", b"")], 1, num_valid=8
        )
