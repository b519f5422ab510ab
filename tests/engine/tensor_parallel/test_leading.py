"""What rank 0 tells its followers, and what they make of it: here a thread for the other rank."""

import gc
import math
import pickle
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine.memory
import engine.tensor_parallel.follower
from engine.checkpoint.model import LoadedModel
from engine.errors import EngineError, OutOfMemory
from engine.forward.fused import FusedBackend
from engine.layout.slots import LaneLayout
from engine.memory import limits
from engine.model_executor import ModelExecutor
from engine.tensor_parallel.backend import LeadingBackend
from engine.tensor_parallel.calls import Call, Forward, Loading, MakeBackend, TakeOver, WipeSlots
from engine.tensor_parallel.follower import FollowerRank
from tests.engine.forward.test_features import LAYERS, OTHERS, check, transformers_own
from tests.engine.tensor_parallel.threads import LIMIT_S, Threads
from tests.tiny_models import make_model


class Told:
    """In place of `Followers`: one, in a thread."""

    def __init__(self, loaded: LoadedModel, pool: ThreadPoolExecutor) -> None:
        self.calls: list[Call] = []
        self.follower = FollowerRank(loaded)
        self._pool = pool

    def tell(self, call: Call) -> "Future[None]":
        """Let it begin with its part."""
        self.calls.append(pickle.loads(pickle.dumps(call)))
        return self._pool.submit(self.follower.answer, self.calls[-1])

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        """Until both have done their part."""
        done = self.tell(call)
        yield
        done.result(LIMIT_S)


def test_what_is_not_finite_on_one_rank_alone_is_found(tmp_path: Path) -> None:
    first, second = Threads(make_model("llama", tmp_path), 2).loaded
    assert first.rank is not None
    with ThreadPoolExecutor(1) as pool:
        told: Any = Told(second, pool)
        loaded = replace(first, rank=replace(first.rank, followers=told))
        executor = ModelExecutor(loaded, 128, backend="fused")
        assert executor.not_finite(0) is None
        leading, following = executor._backend._inner.cache, told.follower._backend.cache
        following[0, :, 3] = math.nan
        assert executor.not_finite(0) == 3
        # One layer further up all rows of the pass have it, on every rank.
        for cache in (leading, following):
            cache[1, :, :5] = math.nan
        assert executor.not_finite(0) == 3
        leading[0, :, 4] = math.nan
        assert executor.not_finite(0) == 3


def test_a_follower_whose_backend_has_failed_ends_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = Threads(make_model("llama", tmp_path), 2).loaded
    follower, lanes = FollowerRank(second), LaneLayout(1, 128)
    follower.answer(MakeBackend("fused", lanes, (), ()))

    def fails(*_: object, **__: object) -> None:
        raise OutOfMemory("no memory to capture passes")

    monkeypatch.setattr(FusedBackend, "take_over", fails)
    follower.answer(TakeOver(timed=True))  # rank 0 may meet it too, and make another backend
    with pytest.raises(EngineError, match="no memory to capture passes"):
        follower.answer(WipeSlots(0, 1))
    follower.answer(MakeBackend("fused", lanes, (), ()))
    follower.answer(WipeSlots(0, 1))


def test_what_a_follower_has_loaded_is_left_out_of_garbage_collection(tmp_path: Path) -> None:
    _, second = Threads(make_model("llama", tmp_path), 2).loaded
    follower = FollowerRank(second)
    follower.answer(MakeBackend("fused", LaneLayout(1, 128), (), ()))
    assert any(found is second for found in gc.get_objects())
    try:
        follower.answer(Loading(is_loading=False))
        assert not any(found is second for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_the_rank_with_the_least_free_memory_says_whether_texts_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Threads(make_model("llama", tmp_path), 2).loaded
    assert first.rank is not None
    each = 64
    monkeypatch.setattr(engine.memory, "slot_bytes", lambda *_: each)
    # Half of it is each rank's; 128 slots are no text's.
    monkeypatch.setattr(engine.memory, "free_bytes", lambda _: 2 * each * 1000)
    monkeypatch.setattr(
        engine.tensor_parallel.follower, "free_bytes", lambda _: 2 * each * (300 + 128)
    )
    with ThreadPoolExecutor(1) as pool:
        told: Any = Told(second, pool)
        loaded = replace(first, rank=replace(first.rank, followers=told))
        assert limits(loaded, 300, 2) == (300, 2)
        with pytest.raises(OutOfMemory, match="a maximum length of 300 fits"):
            limits(loaded, 301, 2)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_the_hidden_states_of_rank_0_are_those_of_the_whole_model(
    backend: str, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path, scale=0.5)
    first, second = Threads(folder, 2).loaded
    assert first.rank is not None
    with ThreadPoolExecutor(1) as pool:
        told: Any = Told(second, pool)
        loaded = replace(first, rank=replace(first.rank, followers=told))
        executor = ModelExecutor(loaded, 128, backend=backend, layers=LAYERS)
        assert isinstance(executor._backend, LeadingBackend)
        executor.take_over()
        check(executor, transformers_own(str(folder)))
        check(executor, transformers_own(str(folder), OTHERS), OTHERS)
    made = [call.layers for call in told.calls if isinstance(call, MakeBackend)]
    asked = {call.layers for call in told.calls if isinstance(call, Forward)}
    assert made == [LAYERS]
    assert asked == {LAYERS, OTHERS, ()}
