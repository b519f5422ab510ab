"""Toy vocabularies: tokens are given by their bytes, and texts are encoded from the left."""

from collections.abc import Iterator, Sequence


class ToyWords:
    """Words that are encoded by the longest token that fits, from the left.

    words     the bytes of each token, by id
    specials  the written form of special tokens, whose ids follow
    """

    def __init__(self, words: Sequence[bytes], specials: Sequence[str] = ()) -> None:
        self.bytes_of: Sequence[bytes | None] = [*words, *([None] * len(specials))]
        self.specials = {len(words) + index: name for index, name in enumerate(specials)}
        self.starts: tuple[int, ...] = ()
        self._ids = {word: id_ for id_, word in reversed(list(enumerate(words)))}
        self._longest = max(map(len, words))

    def __len__(self) -> int:
        return len(self.bytes_of)

    def id_of(self, said: bytes) -> int | None:
        """See `engine.words.Words`."""
        return self._ids.get(said)

    def following(self, text: bytes) -> tuple[int, ...]:
        """See `engine.words.Words`."""
        return tuple(self.read(text)[0])

    def read(self, text: bytes) -> tuple[list[int], list[int]]:
        """See `engine.words.Words`."""
        ids: list[int] = []
        ends: list[int] = []
        start = 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((size for size in sizes if text[start : start + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[start : start + size]])
            start += size
            ends.append(start)
        return ids, ends

    def beginning_with(self, said: bytes) -> Iterator[tuple[bytes, int]]:
        """See `engine.words.Words`."""
        for word, id_ in sorted(self._ids.items()):
            if word.startswith(said) and word != said:
                yield word, id_
