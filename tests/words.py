"""Toy vocabularies: tokens are given by what they say, and texts are encoded from the left."""

from collections.abc import Iterator, Sequence


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
