"""Where a text ends."""

import pytest

from proto.messages import (
    FinishReason,
    Limits,
)
from tests.policies import autoregressive, pipelined, synchronous

LIMITS = Limits(max_len=10, stop_ids=(2, 3))


@pytest.mark.parametrize(
    ("start_len", "tokens", "expected"),
    [
        (5, (7, 8), ((7, 8), None)),
        (5, (7, 2, 8, 9), ((7, 2), FinishReason.STOP)),
        (5, (3, 2), ((3,), FinishReason.STOP)),
        (8, (7, 8), ((7, 8), FinishReason.LENGTH)),
        (8, (7, 8, 9), ((7, 8), FinishReason.LENGTH)),
        (8, (7, 2), ((7, 2), FinishReason.STOP)),
        (8, (7, 8, 2), ((7, 8), FinishReason.LENGTH)),
        (5, (), ((), None)),
    ],
    ids=[
        "it goes on",
        "a stop token ends it",
        "the first stop token ends it",
        "the length ends it",
        "what is too long is cut",
        "a stop token on the last position is a stop",
        "a stop token beyond the length is not seen",
        "nothing is nothing",
    ],
)
def test_a_text_is_trimmed_at_the_first_of_stop_and_length(
    start_len: int, tokens: tuple[int, ...], expected: tuple[tuple[int, ...], FinishReason | None]
) -> None:
    assert LIMITS.trim(start_len, tokens) == expected


def test_the_target_keeps_a_place_for_its_own_token() -> None:
    assert [LIMITS.max_drafts(length) for length in (5, 8, 9, 10)] == [4, 1, 0, 0]


def test_policies_are_settings_of_the_same_numbers() -> None:
    assert not autoregressive().has_drafter
    sync = synchronous(4)
    assert (sync.num_speculative_tokens, sync.launch_min, sync.window) == (4, 4, 4)
    chain = pipelined(8, 32)
    assert (chain.num_speculative_tokens, chain.launch_min, chain.window) == (8, 2, 32)
    assert pipelined(1, 32).launch_min == 1
