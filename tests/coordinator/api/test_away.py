"""How long nodes that load are waited for, and texts for a target that is away."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.api.asking import Asking
from coordinator.api.async_llm import AsyncLLM
from coordinator.api.pair import Pair
from coordinator.api.patience import Patience
from coordinator.api.requests import Request
from proto.errors import AwayError
from proto.messages import Role
from proto.node_config import FETCHING


def test_no_text_waits_for_a_target_longer_than_a_start_may_take() -> None:
    states = {Role.TARGET: "starting"}
    config = SimpleNamespace(target="a", start_timeout_s=60.0)
    pair = SimpleNamespace(is_ready=False, num_seqs=1, config=config, states=lambda: states)
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
    states[Role.TARGET] = "loading weights, 3.2 GB so far"
    llm._check_away(300.0)
    llm._check_away(360.0)
    with pytest.raises(AwayError):
        llm._check_away(360.1)


def test_new_texts_wait_for_a_target_that_is_started_again_until_the_queue_is_full() -> None:
    pair = SimpleNamespace(
        is_ready=False,
        num_seqs=1,
        config=SimpleNamespace(target="a"),
        service=SimpleNamespace(check_alive=lambda: None, awaits_target=True),
    )
    llm = AsyncLLM.__new__(AsyncLLM)
    llm._begin(cast(Pair, pair), cast(Asking, None), 0)
    llm.check_takes()
    with pytest.raises(AwayError, match="the target is away"):
        llm.check_ready()
    llm.admission.ask("a client", 1)  # takes the only lane
    steps = llm._steps(cast(Request, SimpleNamespace(num_texts=1)), "second", "a client")
    with pytest.raises(AwayError, match="is started again, and the queue is full"):
        asyncio.run(anext(steps))
    pair.service.awaits_target = False
    with pytest.raises(AwayError, match="the target is away"):
        llm.check_takes()


def test_a_node_that_tells_of_something_new_is_waited_for() -> None:
    patience = Patience(10.0, 0.0)
    for second in range(0, 1000, 5):
        states = {Role.TARGET: f"loading weights, {second / 10:.1f} GB so far"}
        assert not patience.is_over(states, float(second))
    assert not patience.is_over(states, 1005.0)
    assert patience.is_over(states, 1005.1), "nothing more was read"


def test_a_node_that_fetches_its_model_is_waited_for_without_a_limit() -> None:
    patience, states = Patience(10.0, 0.0), {Role.TARGET: FETCHING, Role.DRAFTER: "ready"}
    assert not patience.is_over(states, 1e6)
    assert not patience.is_over(states, 2e6)
    states[Role.TARGET] = "loading weights"
    assert not patience.is_over(states, 2e6 + 1)
    assert patience.is_over(states, 2e6 + 11.1)
