"""What the log says last: why the coordinator has ended."""

import pytest

from coordinator.api.pair import Pair
from proto.errors import NodeError


class FakeService:
    """Is told why it is closed."""

    why = ""

    def close(self, why: str) -> None:
        """As the service."""
        self.why = why


class FakeLauncher:
    """Has nothing to end."""

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "its work is done"),
        (KeyboardInterrupt("ended by SIGTERM"), "ended by SIGTERM"),
        (KeyboardInterrupt(), "interrupted"),
        (NodeError("a word of the prompt"), "after an error (NodeError)"),
    ],
)
def test_whoever_leaves_a_pair_says_why(error: BaseException | None, why: str) -> None:
    pair = Pair.__new__(Pair)
    service = FakeService()
    vars(pair).update(service=service, _launcher=FakeLauncher())
    pair.__exit__(type(error) if error is not None else None, error, None)
    assert service.why == why
