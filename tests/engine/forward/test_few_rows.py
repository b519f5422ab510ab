"""Products of few rows: how a form is chosen, who adds partial sums, and the kernels themselves.

The choice and the recorded passes run with forms of torch's operators in place of kernels. The
kernels run in Triton's interpreter (TRITON_INTERPRET=1, a torch with Triton) or on a GPU.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F

from engine.checkpoint.model import load_model
from engine.forward import few_rows, small_operators
from engine.forward.few_rows import TORCH, FewRows, FewRowsProduct, Form, num_parts, parts_of
from engine.forward.operators import TOLERANCES, Packer
from engine.forward.small_operators import add_and_norm
from engine.loading import make_executor
from tests.engine.forward.test_fused import TOLERANCES as OF_LOGITS
from tests.engine.forward.test_fused import save
from tests.engine.forward.test_small_operators import errors, fused_in, graphs_of, merging, plain

__all__ = ["merging", "plain"]  # fixtures

ROWS = (1, 2, 5, 16, 17, 32, 33)


def in_two(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product as two float32 partial sums."""
    half = x.shape[1] // 2
    first = F.linear(x[:, :half].float(), weight[:, :half].float())
    second = F.linear(x[:, half:].float(), weight[:, half:].float())
    return torch.stack((first if bias is None else first + bias.float(), second))


def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return 1.001 * F.linear(x, weight, bias)


def wrong_for_many(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    return wrong(x, weight, bias) if len(x) == 16 else F.linear(x, weight, bias)


def not_a_number(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    return F.linear(x, weight, bias) * torch.nan


def fails(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    class CompilationError(Exception):  # Triton's own is no RuntimeError either
        pass

    raise CompilationError("no such kernel")


def of_one_row(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    assert len(x) == 1
    return F.linear(x, weight, bias)


FORMS = (
    Form("one row", "one row", of_one_row, most_rows=1),
    Form("whole", "whole", lambda *of: F.linear(*of)),
    Form("in two", "in two", in_two, split=2),
    Form("wrong", "wrong", wrong),
    Form("wrong for many", "wrong for many", wrong_for_many),
    Form("not a number", "not a number", not_a_number),
)


class Clock:
    """In place of `few_rows._seconds`: the seconds of a form, by its name and number of rows."""

    def __init__(self, seconds: Mapping[str, float | dict[int, float]]) -> None:
        self.seconds = seconds
        self.timed: list[tuple[str, int]] = []

    def __call__(self, form: Form, x: torch.Tensor, *_: object) -> float:
        self.timed.append((form.name, len(x)))
        found = self.seconds.get(form.name, 100.0)
        return found[len(x)] if isinstance(found, dict) else found


def timed_by(
    monkeypatch: pytest.MonkeyPatch,
    seconds: Mapping[str, float | dict[int, float]],
    forms: tuple[Form, ...] = FORMS,
) -> Clock:
    """From now on these forms are chosen from, and take as long as is said."""
    clock = Clock(seconds)
    monkeypatch.setattr(few_rows, "_forms", lambda: forms)
    monkeypatch.setattr(few_rows, "_copies", lambda weight: [weight])
    monkeypatch.setattr(few_rows, "_seconds", clock)
    return clock


def weights(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    weight = (torch.randn(40, 96) / 10).to(dtype)
    return weight, torch.randn(40).to(dtype) if bias else None


def names(product: Any) -> dict[int, str]:
    assert isinstance(product, FewRowsProduct)
    return {num_rows: product._form(num_rows).name for num_rows in ROWS}


# -- the choice ------------------------------------------------------------------------------------


def test_for_each_class_of_rows_the_fastest_form_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"torch": {1: 3.0, 5: 2.0, 17: 1.0}, "one row": 2.0, "whole": {1: 4.0, 5: 1, 17: 2}}
    timed_by(monkeypatch, seconds)
    found = names(FewRows().product(*weights(), may_split=False))
    assert found == {
        1: "one row",
        **dict.fromkeys((2, 5, 16), "whole"),
        **dict.fromkeys((17, 32, 33), "torch"),
    }


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_gives_the_product_and_partial_sums_add_up_to_it(
    bias: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, biases = weights(bias=bool(bias), dtype=dtype)
    for name in ("whole", "in two"):
        timed_by(monkeypatch, {name: 1.0})
        product = FewRows().product(weight, biases, may_split=True)
        assert set(names(product).values()) == {name, "torch"}
        for num_rows in ROWS:
            x = torch.randn(num_rows, 96).to(dtype)
            got, want = product(x), F.linear(x, weight, biases)
            assert (got.dtype, got.shape) == (dtype, want.shape)
            assert (got - want).abs().max() <= TOLERANCES[dtype] * want.abs().max()
            parts = parts_of(product)(x)
            assert num_parts(product, num_rows) == (len(parts) if parts.dim() == 3 else 1)


def test_only_products_whose_parts_the_caller_adds_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = timed_by(monkeypatch, {"in two": 1.0, "whole": 2.0})
    maker = FewRows()
    assert names(maker.product(*weights(), may_split=False))[5] == "whole"
    assert "in two" not in {name for name, _ in clock.timed}
    assert names(maker.product(*weights(), may_split=True))[5] == "in two"


@pytest.mark.parametrize("name", ["wrong", "not a number", "wrong for many"])
def test_a_form_with_other_numbers_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, {name: 1.0, "whole": 2.0})
    found = names(FewRows().product(*weights(), may_split=True))
    assert (found[2], found[5], found[16]) == ("whole",) * 3


def test_forms_that_fail_are_told_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = timed_by(
        monkeypatch,
        {"one": 1.0},
        (Form("one", "one", fails), Form("other", "other", fails), FORMS[1]),
    )
    caplog.set_level(logging.INFO, logger="engine.forward.few_rows")
    maker = FewRows()
    for bias in (False, True):
        assert maker.product(*weights(bias=bias), may_split=False) is None
    assert caplog.text.count("is not used: ") == 1
    assert "the product one is not used: no such kernel" in caplog.text
    assert {name for name, _ in clock.timed} == {"torch", "whole"}


def test_each_shape_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = timed_by(monkeypatch, {"whole": 1.0})
    maker = FewRows()
    counts = []
    for options in ({}, {}, {"bias": True}, {"dtype": torch.bfloat16}, {"bias": True}):
        assert maker.product(*weights(**options), may_split=False) is not None
        counts.append(len(clock.timed))
    assert counts[0] == counts[1] < counts[2] < counts[3] == counts[4]
    assert {num_rows for _, num_rows in clock.timed} == {1, 5, 17}


def test_without_triton_products_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "engine.forward.few_rows_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    caplog.set_level(logging.INFO, logger="engine.forward.few_rows")
    forms = few_rows._forms.__wrapped__()
    assert forms == ()
    assert caplog.text.count("products of few rows are torch's: ") == 1
    monkeypatch.setattr(few_rows, "_forms", lambda: forms)
    assert FewRows().product(*weights(), may_split=True) is None


def test_without_memory_for_timing_products_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(_weight: torch.Tensor) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    timed_by(monkeypatch, {"whole": 1.0})
    monkeypatch.setattr(few_rows, "_copies", short)
    assert FewRows().product(*weights(), may_split=True) is None


def test_a_packer_takes_the_products_and_frees_what_it_stacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed_by(monkeypatch, {"in two": 1.0})
    parts = [torch.nn.Linear(96, size).requires_grad_(False) for size in (24, 16)]
    x = torch.randn(3, 96)
    want = torch.cat([part(x) for part in parts], -1)
    packer = Packer(few_rows=FewRows())
    assert not isinstance(packer.take(parts, leave=True), FewRowsProduct)
    product = packer.take(parts, may_split=True)
    assert num_parts(product, 3) == 2
    torch.testing.assert_close(product(x), want)
    assert not any(part.weight.numel() for part in parts)


def test_calls_are_timed_in_a_graph_that_reads_the_copies_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.side_effect = [40.0, 3.2, 4.0, 5.0, 6.0]  # ms
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(few_rows, "_side_stream", MagicMock())
    weight, bias = weights()
    copies, read = [weight, weight.clone(), weight.clone()], []

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        read.append([weight is copy for copy in copies].index(True))
        return F.linear(x, weight, bias)

    took = few_rows._seconds(Form("", "", run), torch.zeros(1, 96), copies, bias)
    assert took == 3.2e-3 / 16
    assert read == [0] + [index % 3 for index in range(16)]
    assert cuda.CUDAGraph.return_value.replay.call_count == 5
    cuda.graph.assert_called_once()
    cuda.set_stream.assert_called_once_with(cuda.current_stream.return_value)


# -- recorded passes -------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """On the CPU too, recorded passes use other forms than torch's, split ones where they may."""
    monkeypatch.setattr("engine.forward.fused.FEW_ROWS_DEVICES", ("cpu",))
    return timed_by(monkeypatch, {"in two": 1.0, "whole": 2.0})


@pytest.mark.usefixtures("plain", "few")
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_recorded_passes_with_partial_sums_give_the_logits_of_the_reference(
    architecture: str, tmp_path: Path
) -> None:
    folder = save(architecture, tmp_path, {})
    graphs = graphs_of(folder, num_lanes=2)
    fused = fused_in(graphs)
    assert fused.is_merged
    assert max(errors(folder, graphs)) < OF_LOGITS["float32"]
    for layer in fused._layers:
        assert names(layer.out)[1] == names(layer.down)[5] == "in two"
        assert names(layer.qkv)[1] == names(layer.gate_up)[5] == "whole"


@pytest.mark.usefixtures("plain", "few")
def test_partial_sums_are_added_where_small_operators_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.forward.graphs.MERGED_DEVICES", ())
    folder = save("llama", tmp_path, {})
    graphs = graphs_of(folder)
    assert names(fused_in(graphs)._layers[0].out)[1] == "in two"
    assert max(errors(folder, graphs)) < OF_LOGITS["float32"]


@pytest.mark.usefixtures("plain", "few")
def test_partial_sums_that_are_added_wrongly_are_found_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_alone(hidden: torch.Tensor, change: torch.Tensor, *rest: Any) -> Any:
        return add_and_norm(hidden, change[0] if change.dim() == 3 else change, *rest)

    monkeypatch.setattr(small_operators, "add_and_norm", first_alone)
    assert not fused_in(graphs_of(save("llama", tmp_path, {}))).is_merged


@pytest.mark.usefixtures("plain", "few")
def test_reproducible_and_unrecorded_passes_have_the_products_of_torch(tmp_path: Path) -> None:
    folder = str(save("llama", tmp_path, {}))
    options: list[dict[str, Any]] = [{"backend": "graphs", "fixed_rows": 4}, {"backend": "fused"}]
    for option in options:
        executor = make_executor(load_model(folder, dtype="float32"), 192, **option)
        backend: Any = executor._backend
        layers = getattr(backend, "_fused", backend)._layers
        assert not any(isinstance(layer.out, FewRowsProduct) for layer in layers)


@pytest.mark.long
@pytest.mark.usefixtures("merging", "few")
def test_programs_that_add_partial_sums_are_compiled_at_load_alone(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, {})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = graphs_of(folder, num_lanes=2)
    assert fused_in(graphs).is_merged
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # As without partial sums, and for one row and for several: a program that adds two of them.
    assert compiled == (2 + 2 + 2 * 2) + 2
    assert max(errors(folder, graphs)) < OF_LOGITS["float32"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


# -- the kernels -----------------------------------------------------------------------------------

runs_kernels = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="neither Triton's interpreter nor a CUDA device",
)


@runs_kernels
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize(("out_size", "in_size"), [(128, 512), (100, 300), (37, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_give_the_product_for_weights_of_any_size(
    dtype: torch.dtype, out_size: int, in_size: int, bias: int, split: int
) -> None:
    pytest.importorskip("triton")
    from engine.forward.few_rows_kernels import by_dots, by_sums

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(4)
    weight = (torch.randn(out_size, in_size) / in_size**0.5).to(device, dtype)
    biases = torch.randn(out_size).to(device, dtype) if bias else None
    dots = {"outputs": 64, "inputs": 128, "stages": 3, "split": split}
    sums = {"outputs": 4, "inputs": 256, "stages": 1, "split": split}
    for num_rows, kernel, blocks in (
        *((1, by_sums, sums), (1, by_dots, dots), (5, by_dots, dots)),
        *((16, by_dots, dots), (17, by_dots, dots), (32, by_dots, dots)),
    ):
        # Every second row of a larger tensor: the kernels want rows without gaps.
        x = torch.randn(2 * num_rows, in_size).to(device, dtype)[::2]
        want = F.linear(x.double(), weight.double(), biases if biases is None else biases.double())
        got = kernel(x, weight, biases, **blocks)
        assert got.dtype == (dtype if split == 1 else torch.float32)
        total = got.double() if split == 1 else got.double().sum(0)
        assert total.shape == want.shape
        assert (total - want).abs().max() <= TOLERANCES[dtype] * want.abs().max()


@runs_kernels
def test_all_forms_that_are_timed_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    forms = few_rows._forms()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = (torch.randn(256, 2048) / 45).to(device, torch.float16)
    for form in forms:
        for num_rows in (1,) if form.most_rows == 1 else (1, 16, 32):
            x = few_rows._rows(num_rows, weight)
            assert few_rows._is_right(form, x, weight, None), form.name
    assert len(forms) == len({form.name for form in forms}) == 10
    assert TORCH not in forms
