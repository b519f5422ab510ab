"""Which of its numbered drafts each source has brought (pure)."""

from dataclasses import dataclass, field

from proto.messages import Ack, Draft

MAX_GAPS = 64


@dataclass(slots=True)
class _Source:
    """What has come of the newest life of one source."""

    incarnation: int
    number: int = 0  # every draft up to it has come
    ahead: list[tuple[int, int]] = field(
        default_factory=list
    )  # ranges beyond a gap, by their start

    def add(self, first: int, last: int) -> None:
        self.ahead.append((first, last))
        self.ahead.sort()
        while self.ahead and self.ahead[0][0] <= self.number + 1:
            self.number = max(self.number, self.ahead.pop(0)[1])
        del self.ahead[MAX_GAPS:]


class Received:
    """The draft numbers of every source. There are at most `messages.MAX_SOURCES` of them."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        self._model_us = 0  # that the drafts took which have come since it was asked for

    def add(self, draft: Draft) -> bool:
        """Count a draft; returns whether it is the first of its life.

        What a draft of an earlier life says is as true as ever; only its numbers mean nothing.
        """
        self._model_us += draft.model_us
        source = self._sources.get(draft.source)
        is_first = source is None or draft.incarnation > source.incarnation
        if source is None or is_first:
            source = self._sources[draft.source] = _Source(draft.incarnation)
        if draft.incarnation == source.incarnation:
            source.add(draft.first_number, draft.number)
        return is_first

    def take_model_us(self) -> int:
        """What the drafts took that have come since the last call."""
        model_us, self._model_us = self._model_us, 0
        return model_us

    def acks(self) -> tuple[Ack, ...]:
        """The highest number without a gap, per source."""
        return tuple(
            Ack(number, source.incarnation, source.number)
            for number, source in self._sources.items()
        )

    def check(self) -> None:
        """Assert every invariant (for tests and the simulator)."""
        for source in self._sources.values():
            assert len(source.ahead) <= MAX_GAPS
            assert all(first > source.number + 1 for first, _ in source.ahead)
