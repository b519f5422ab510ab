"""How often something turns out right (pure)."""

from dataclasses import dataclass

PRIOR_TRIES = 4.0
MAX_TRIES = 64.0  # beyond them older tries count less and less


@dataclass(slots=True)
class Rate:
    """`hits` of `tries`, with some for a start."""

    hits: float
    tries: float = PRIOR_TRIES

    @property
    def chance(self) -> float:
        """The share of hits, above 0 and at most 1."""
        return self.hits / self.tries

    def add(self, *, right: bool) -> None:
        """One more try."""
        if self.tries >= MAX_TRIES:
            self.hits *= 1 - 1 / MAX_TRIES
            self.tries *= 1 - 1 / MAX_TRIES
        self.hits += right
        self.tries += 1
