"""Sets of forms are compared by whole passes, and one is taken only where no pass is slower."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import engine.forward.cpu_layers
import engine.forward.fused
from engine import cpu_library
from engine.checkpoint.model import load_model
from engine.cpu_library import library, why_not_here
from engine.forward import operators
from engine.forward.fused import FusedBackend
from engine.forward.operators import (
    COMPARED_ROWS,
    Seconds,
    in_words,
    is_never_slower,
    seconds_of_passes,
)
from engine.layout.slots import LaneLayout
from engine.quantised.cpu_products import TiledProduct
from tests.tiny_models import make_model

Time = Callable[[Mapping[str, Seconds]], list[str]]


@pytest.fixture(autouse=True)
def _library() -> None:
    if (why := why_not_here()) is not None:
        pytest.skip(why)
    assert library() is not None


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Time:
    """times(seconds by set and rows): passes take so long; returns the sets that are timed."""

    def take(seconds: Mapping[str, Seconds]) -> list[str]:
        timed: list[str] = []

        def found(
            sets: Mapping[str, object], row_counts: Sequence[int]
        ) -> Mapping[str, Mapping[int, float]]:
            timed.extend(sets)
            return {
                name: {n: seconds.get(name, {}).get(n, 1.0) for n in row_counts} for name in sets
            }

        for module in (engine.forward.cpu_layers, engine.forward.fused):
            monkeypatch.setattr(module, "seconds_of_passes", found)
        return timed

    return take


def taken_over(folder: Path, dtype: str = "float32", quantization: str = "") -> FusedBackend:
    loaded = load_model(
        str(make_model("llama", folder)), dtype=dtype, quantization=quantization, keep_codes=True
    )
    backend = FusedBackend(loaded, LaneLayout(1, 64))
    backend.take_over()
    return backend


def is_in_tiles(backend: FusedBackend) -> bool:
    layers = backend._layers
    products = [one for it in layers for one in (it.qkv, it.out, it.gate_up, it.down)]
    are = {isinstance(product, TiledProduct) for product in [*products, backend._head]}
    assert len(are) == 1, "all products of a model are of one kind"
    return are.pop()


def test_the_fewest_seconds_of_passes_that_take_turns_count() -> None:
    ran: list[tuple[str, int]] = []

    def run(name: str, num_rows: int) -> None:
        is_disturbed = len(ran) < 4
        ran.append((name, num_rows))
        time.sleep(0.001 * num_rows * (5 if is_disturbed else 1))

    found = seconds_of_passes({name: lambda n, name=name: run(name, n) for name in "ab"}, (1, 2))  # type: ignore[misc]
    assert ran[:4] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert ran[4:8] == ran[:4]
    assert found.keys() == {"a", "b"}
    for by_rows in found.values():
        assert 0.001 <= by_rows[1] < 0.005
        assert 0.002 <= by_rows[2] < 0.010


def test_long_passes_are_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_TURNS_S", 0.0)
    ran: list[int] = []
    seconds_of_passes({"one": ran.append}, COMPARED_ROWS)
    assert ran == [*COMPARED_ROWS] * 2


def test_a_set_that_is_slower_for_one_number_of_rows_is_slower() -> None:
    usual = dict.fromkeys(COMPARED_ROWS, 1.0)
    assert is_never_slower(usual, usual)
    assert is_never_slower({**usual, 9: 1.04}, usual), "one cannot tell such times apart"
    assert is_never_slower(dict.fromkeys(COMPARED_ROWS, 0.5), usual)
    for num_rows in COMPARED_ROWS:
        assert not is_never_slower({**dict.fromkeys(usual, 0.5), num_rows: 1.1}, usual)


def test_a_line_says_what_was_measured() -> None:
    seconds = {"C++": {1: 0.00152, 2: 0.002}, "torch": {1: 0.00248, 2: 0.003}}
    assert in_words(seconds) == "1 row 1.52 (C++), 2.48 (torch); 2 rows 2.00 (C++), 3.00 (torch)"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("theirs", ["torch", "torch, merged"])
@pytest.mark.parametrize("slower_at", [None, *COMPARED_ROWS])
def test_weights_lie_in_tiles_where_no_pass_is_slower_for_it(
    slower_at: int | None, theirs: str, dtype: str, times: Time, tmp_path: Path
) -> None:
    times({"C++": dict.fromkeys(COMPARED_ROWS, 0.9), theirs: {slower_at or 0: 0.8}})
    backend = taken_over(tmp_path, dtype)
    assert is_in_tiles(backend) == (slower_at is None)
    assert not backend.cache.any(), "what was tried is not left in the cache"
    assert backend._cpu_layers is not None


def test_what_was_compared_is_not_compared_again(times: Time, tmp_path: Path) -> None:
    timed = times({})
    taken_over(tmp_path)
    assert timed == ["C++", "torch", "torch, merged", "merged", "in one call"]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 9, 16])
def test_of_a_quantised_model_only_the_operators_are_compared(
    num_rows: int, times: Time, tmp_path: Path
) -> None:
    timed = times({"one by one": {num_rows: 0.9}})
    backend = taken_over(tmp_path, quantization="int8")
    assert timed == ["merged", "in one call", "one by one"]
    assert backend._cpu_layers is None
    assert is_in_tiles(backend)


@pytest.mark.parametrize(("slow", "most"), [(1, 0), (2, 1), (5, 2), (16, 9), (0, 16)])
def test_passes_are_one_call_up_to_the_rows_for_which_it_is_faster(
    slow: int, most: int, times: Time, tmp_path: Path
) -> None:
    times({"in one call": {slow: 1.1}})
    layers = taken_over(tmp_path)._cpu_layers
    assert layers is not None
    assert layers.most_rows == most


def test_without_the_library_nothing_is_compared(
    times: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = times({})
    monkeypatch.setattr(cpu_library, "_kept", lambda: None)
    assert not is_in_tiles(taken_over(tmp_path))
    assert timed == []


def test_in_reproducible_mode_the_library_changes_nothing(times: Time, tmp_path: Path) -> None:
    timed = times({})
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    backend = FusedBackend(loaded, LaneLayout(1, 64))
    backend.take_over(timed=False)
    assert not is_in_tiles(backend)
    assert (timed, backend._cpu_layers) == ([], None)


def test_which_set_runs_and_why_is_logged(
    times: Time, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times({"C++": dict.fromkeys(COMPARED_ROWS, 0.5)})
    with caplog.at_level(logging.INFO):
        taken_over(tmp_path)
    weights, operators_line = caplog.messages
    assert weights.startswith("weights lie in tiles of our own; ms of a pass: 1 row 500.00 (C++)")
    assert operators_line.startswith("operators run in one call up to 16 rows, else merged; ms of")


def test_a_model_of_fewer_tokens_than_rows_is_tried_too(tmp_path: Path) -> None:
    loaded = load_model(str(make_model("llama", tmp_path, vocab=4, scale=0.5)), dtype="float32")
    backend = FusedBackend(loaded, LaneLayout(1, 64))
    backend.take_over()
    with torch.inference_mode():
        assert backend._try_pass(None, 9).isfinite().all()
