"""Toy vocabularies of a target and of a drafter that has other tokens, as `engine.words.Words`.

The target's tokens are pairs of letters, some with a dash behind. The tokens of any text are found
from the left, so a text in bytes has one reading, and yet one token may begin as another does. The
drafter's tokens are all single letters, and some longer strings that lie across the target's
boundaries: the last of them change when the text goes on.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from drafter_node.translation.text import Languages
from tests.simulation.toys import ToyModel

END = "<e>"  # the written form of the token that ends a text, in both vocabularies
BEGINNING = "<b>"
NUM_LONGER = 12  # tokens of the drafter with several letters


class ToyWords:
    """A vocabulary that is read from the left, each token as long as possible.

    strings   what the tokens say, by id
    specials  the written form of those that follow them
    starts    tokens that stand before every text
    """

    def __init__(
        self, strings: Sequence[str], specials: Sequence[str] = (), starts: tuple[int, ...] = ()
    ) -> None:
        self.bytes_of: Sequence[bytes | None] = [
            *(string.encode() for string in strings),
            *(None for _ in specials),
        ]
        self.specials = dict(enumerate(specials, len(strings)))
        self.starts = starts
        self._ids = {said: id_ for id_, said in enumerate(self.bytes_of) if said is not None}
        self._written = {name.encode(): id_ for id_, name in self.specials.items()}
        self._longest = max(map(len, (*self._ids, *self._written)))

    def __repr__(self) -> str:
        return f"ToyWords({b' '.join(self._ids)!r})"

    def __len__(self) -> int:
        return len(self.bytes_of)

    def id_of(self, said: bytes) -> int | None:
        """Return the token that stands for exactly these bytes; None: there is none."""
        return self._ids.get(said)

    def following(self, text: bytes) -> tuple[int, ...]:
        """Return the tokens of a text that follows a token, as far as tokens can say it."""
        return tuple(id_ for id_, _ in self._found(text, self._ids))

    def read(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return the tokens of a text that stands alone, and where each ends, in bytes."""
        found = list(self._found(text, self._ids | self._written))
        return [id_ for id_, _ in found], [end for _, end in found]

    def beginning_with(self, said: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (bytes, id) of the tokens that begin with these bytes and are longer."""
        for word, id_ in self._ids.items():
            if word.startswith(said) and word != said:
                yield word, id_

    def _found(self, text: bytes, ids: dict[bytes, int]) -> Iterator[tuple[int, int]]:
        """Yield (token, its end), until the text goes on as no token does."""
        start = 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((n for n in sizes if text[start : start + n] in ids), 0)
            if not size:
                return
            yield ids[text[start : start + size]], start + size
            start += size


def toy_languages(model: ToyModel, random: Random) -> Languages:
    """Return a vocabulary for the target of this model, and another one for its drafters.

    In half of them there are spaces, so that words end. The drafter's longer tokens have three
    letters, or else say two of the target's at once. In few of them they go on over a space, so
    that what was taken for settled may change.
    """
    letters = random.choice(("abc ", "abcd"))
    pairs = list(map("".join, product(letters, repeat=2)))
    random.shuffle(pairs)
    strings: list[str] = []
    for id_ in range(model.vocab_size):
        has_dash = id_ > 0 and random.random() < 0.2
        strings.append(strings[-1] + "-" if has_dash else pairs[id_])
    ends = [END, "<f>"][: len(model.stop_ids)]
    target = ToyWords(strings, ends)
    size, goes_on = random.choice((3, 3, None)), random.random() < 0.2
    longer: set[str] = set()
    for _ in range(NUM_LONGER):
        said = "".join(random.choices(strings, k=2))
        start = 0 if size is None else random.randint(0, len(said) - size)
        token = said[start : None if size is None else start + size]
        if goes_on or " " not in token[1:]:
            longer.add(token)
    single = sorted({*letters, *"-<>efb"})
    named = [END, BEGINNING]
    own_strings = [*single, *sorted(longer)]
    has_beginning = random.random() < 0.5
    starts = (len(own_strings) + 1,) if has_beginning else ()
    own = ToyWords(own_strings, named, starts)
    return Languages(own, target, (len(own_strings),))
