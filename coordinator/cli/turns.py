"""Texts that are written at once, read one after another (pure)."""

from collections import defaultdict, deque
from collections.abc import Iterator

from coordinator.api.request import Request, Step


class Turns:
    """Reads mixed steps. Those of a text whose turn has not come are held until then."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._held: dict[tuple[Request, int], deque[Step]] = defaultdict(deque)

    def of(self, request: Request) -> Iterator[Step]:
        """All steps of a request, one of its texts after another. Raises what ends the steps."""
        index = 0
        while index < request.num_texts:  # it may become less
            yield from self._of_text(request, index)
            index += 1

    def _of_text(self, request: Request, index: int) -> Iterator[Step]:
        held = self._held[request, index]
        is_open = True
        while is_open:
            while not held:
                step = next(self._steps)
                self._held[step.request, step.index].append(step)
            step = held.popleft()
            is_open = not step.is_last
            yield step
        del self._held[request, index]
