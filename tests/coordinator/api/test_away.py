"""How long texts of an `AsyncLLM` wait for a target that is away."""

from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.api.asking import Asking
from coordinator.api.async_llm import AsyncLLM
from coordinator.api.pair import Pair
from proto.errors import AwayError


def test_no_text_waits_for_a_target_longer_than_a_start_may_take() -> None:
    pair = SimpleNamespace(is_ready=False, num_seqs=1, config=SimpleNamespace(start_timeout_s=60.0))
    llm = AsyncLLM.__new__(AsyncLLM)
    llm._begin(cast(Pair, pair), cast(Asking, None), 1)
    llm._check_away(100.0)
    llm._check_away(160.0)
    with pytest.raises(AwayError, match="away for 60 s"):
        llm._check_away(160.1)
    pair.is_ready = True
    llm._check_away(161.0)
    pair.is_ready = False
    llm._check_away(200.0)
    llm._check_away(259.0)
