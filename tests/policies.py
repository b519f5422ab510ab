"""The rows of the table of policies, by the names that the literature has for them."""

from proto.messages import Policy
from proto.policies import POLICIES, REST_AFTER


def autoregressive() -> Policy:
    """The target alone."""
    return POLICIES["ar"].make()


def synchronous(k: int) -> Policy:
    """Draft K, wait for the verdict."""
    return POLICIES["sync"].make(k, k)


def pipelined(k: int, window: int, *, rest_after: int = REST_AFTER) -> Policy:
    """Draft on while the target verifies."""
    assert rest_after in (0, REST_AFTER)
    return POLICIES["pipelined"].make(k, window, adaptive=rest_after > 0)
