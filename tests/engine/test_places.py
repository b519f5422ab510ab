"""A process that moves between its own cores and all of a pair."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import kept
from engine import places as module
from engine.checkpoint.model import load_model
from engine.kept import Kept
from engine.layout.slots import NUM_TREE_SLOTS, Feed
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from engine.places import LIMIT_S, Places, places_of, time_places
from proto.installation import MODELS

pytestmark = pytest.mark.skipif(
    not {0, 1} <= os.sched_getaffinity(0), reason="needs the cores 0 and 1"
)


@pytest.fixture(autouse=True)
def on_one_core() -> Iterator[None]:
    """A process with one core; afterwards it has all again."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    _let_all_on({0})
    torch.set_num_threads(1)
    yield
    _let_all_on(allowed)
    torch.set_num_threads(threads)


def _let_all_on(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


@pytest.fixture
def places() -> Places:
    found = places_of("cpu:0", "cpu:0-1")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def executor() -> ModelExecutor:
    loaded = load_model(str(MODELS / "target"), dtype="float32", max_len=128)
    return make_executor(loaded, 128 + NUM_TREE_SLOTS)


def test_all_threads_move(places: Places) -> None:
    for place, cores in ((1, {0, 1}), (0, {0}), (1, {0, 1}), (1, {0, 1})):
        places.go(place)
        torch.ones(512, 512) @ torch.ones(512, 512)  # makes torch's own threads
        assert torch.get_num_threads() == len(cores)
        for thread in os.listdir("/proc/self/task"):
            assert os.sched_getaffinity(int(thread)) == cores


def test_moving_makes_no_thread_anew(places: Places) -> None:
    matrix = torch.ones(512, 512)
    places.go(1)
    matrix @ matrix
    before = set(os.listdir("/proc/self/task"))
    for _ in range(5):
        for place in (0, 1):
            places.go(place)
            matrix @ matrix
    assert set(os.listdir("/proc/self/task")) == before


def test_there_is_no_choice_without_more_cores_or_with_fewer_threads() -> None:
    assert places_of("cpu:0", "") is None
    assert places_of("cpu", "") is None
    assert places_of("cpu", "cpu:0-1") is None
    assert places_of("cpu:0-1", "cpu:0-1") is None, "one thread on two cores: more are slower"
    assert places_of("cpu:0", "cpu:0-4000") is None
    assert os.sched_getaffinity(0) == {0}


@pytest.mark.parametrize("device", ["cpu:0-1", "cpu"])
def test_on_cores_of_its_own_a_process_can_do_with_one_thread_less(device: str) -> None:
    _let_all_on({0, 1})
    torch.set_num_threads(2)
    places = places_of(device, "")
    assert places is not None
    assert places.names == (device, device)
    for place in (0, 1, 0):
        places.go(place)
        assert torch.get_num_threads() == 1 + place
        assert os.sched_getaffinity(0) == {0, 1}


def test_the_text_is_the_same_where_passes_move(places: Places, executor: ModelExecutor) -> None:
    def text(*on: int) -> tuple[list[int], torch.Tensor]:
        tokens, logits = [1], torch.empty(0)
        for number in range(10):
            places.go(on[number % len(on)])
            feed = Feed((tokens[-1],), (number,), (number,), number, (1,))
            logits = executor.run(feed, (0,))
            tokens.append(int(logits.argmax()))
        return tokens, logits.clone()

    apart, logits = text(0)
    tokens, others = text(0, 1)
    assert tokens == apart
    torch.testing.assert_close(others, logits, rtol=1e-4, atol=1e-4)


def test_times_are_kept_for_later_starts(
    places: Places, executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_TURN_S", 0.001)
    monkeypatch.setattr(kept, "_others_s", lambda: 5.0)
    own_s = {1: 0.010, 2: 0.010, 5: 0.010, 9: 0.020}
    time_places(places, executor, own_s, ("model",), Kept())
    first = places.measured
    assert all(seconds > 0 for times in first for seconds in times.values())
    assert set(first[0]) == set(first[1]) == set(own_s)

    monkeypatch.setattr(module, "_timed", lambda *_: pytest.fail("they are known"))
    time_places(places, executor, own_s, ("model",), Kept())
    assert places.measured == first

    monkeypatch.setattr(module, "_timed", lambda *_: [[4.0, 6.0], [2.0, 3.0]])
    time_places(places, executor, own_s, ("another model",), Kept())
    assert places.measured[0] == {**own_s, 1: 4.0, 5: 6.0}
    assert places.measured[1] == {1: 2.0, 2: 0.005, 5: 3.0, 9: 0.010}

    monkeypatch.setattr(module, "_timed", lambda *_: [[4.0, 8.0], [2.0, 3.0]])
    time_places(places, executor, own_s, ("another model",), Kept(is_anew=True))
    assert places.measured[0][5] == 8.0


@pytest.mark.parametrize("kept_before", [[[1.0, 2.0]], [[0.0, 1.0], [2.0, 3.0]], "no times", 5])
def test_kept_times_that_are_none_are_measured_anew(
    kept_before: object, places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "_others_s", lambda: 5.0)
    monkeypatch.setattr(module, "_timed", lambda *_: [[4.0, 6.0], [2.0, 3.0]])
    time_places(places, None, {1: 0.1}, (), Kept())  # type: ignore[arg-type]
    path = tmp_path / "slipstream" / kept.FILE
    (key,) = json.loads(path.read_text())["places"]
    path.write_text(json.dumps({"places": {key: kept_before}}))
    monkeypatch.setattr(module, "_timed", lambda *_: [[4.0, 7.0], [2.0, 3.0]])
    time_places(places, None, {1: 0.1}, (), Kept())  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"places": {key: [[4.0, 7.0], [2.0, 3.0]]}}


def test_the_quartile_of_two_times_lies_between_them() -> None:
    assert module._lower([2.0, 10.0]) == 4.0
    assert module._lower([2.0]) == 2.0


def test_a_model_whose_passes_are_long_is_not_timed(
    places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_timed", lambda *_: pytest.fail("that takes too long"))
    time_places(places, None, {1: LIMIT_S / 2}, (), Kept())  # type: ignore[arg-type]
    assert places.measured == ({}, {})
