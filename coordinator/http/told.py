"""How much of an answer its client has got: what the `id` of each event of a stream says (pure).

The id has a part for each choice, with commas between: `-` if nothing of it was told, else the
number of its tokens, and a `.` behind it once its end was told. A `u` at the end says that the
usage was told. Clients do not read it: they send back the last one that they got.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proto.errors import ConfigurationError, shown

END, NOTHING, USAGE = ".", "-", "u"
MAX_DIGITS = 7


@dataclass(slots=True)
class Told:
    """What of each choice was told, in the order of the choices.

    begun      places of choices that have had a chunk
    complete   places of choices whose end was told
    has_usage  the chunk with the usage was told
    """

    tokens: list[int]
    begun: set[int] = field(default_factory=set)
    complete: set[int] = field(default_factory=set)
    has_usage: bool = False

    @classmethod
    def nothing(cls, num_choices: int) -> "Told":
        """Return that nothing was told."""
        return cls([0] * num_choices)

    @classmethod
    def behind(cls, numbers: Sequence[int], num_choices: int) -> "Told":
        """Return that these many tokens of the first choices were told."""
        told = cls.nothing(num_choices)
        for place, number in enumerate(numbers[:num_choices]):
            if number:
                told.add(place, number, is_last=False)
        return told

    @classmethod
    def read(cls, text: str, num_choices: int) -> "Told":
        """Return what an id says. Raises ConfigurationError if it is none of such an answer."""
        parts = text.removesuffix(USAGE).split(",")
        numbers = [part.removesuffix(END) for part in parts]
        is_right = len(parts) == num_choices and all(
            one == NOTHING or (one.isascii() and one.isdigit() and len(one) <= MAX_DIGITS)
            for one in numbers
        )
        if not is_right:
            raise ConfigurationError(
                f"Last-Event-ID: {shown(text)} is the id of no event of this answer"
            )
        told = cls([0 if one == NOTHING else int(one) for one in numbers])
        told.begun = {place for place, one in enumerate(numbers) if one != NOTHING}
        told.complete = {place for place, one in enumerate(parts) if one.endswith(END)}
        told.has_usage = text.endswith(USAGE)
        return told

    def add(self, place: int, num_tokens: int, *, is_last: bool) -> None:
        """Note a chunk of a choice."""
        self.tokens[place] += num_tokens
        self.begun.add(place)
        if is_last:
            self.complete.add(place)

    @property
    def event_id(self) -> str:
        """Return the id of an event behind which this much was told."""
        parts = [
            NOTHING
            if place not in self.begun
            else f"{number}{END if place in self.complete else ''}"
            for place, number in enumerate(self.tokens)
        ]
        return ",".join(parts) + (USAGE if self.has_usage else "")
