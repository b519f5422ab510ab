"""Products with weights that were laid out anew."""

from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

from engine.cpu_library import library, why_not_here
from engine.device import cpu_is_fast_in
from engine.forward import operators
from engine.forward.operators import Packer, unpacked

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def linears(dtype: torch.dtype, *biases: int) -> list[torch.nn.Linear]:
    torch.manual_seed(1)
    sizes = range(40, 40 + 8 * len(biases), 8)
    parts = [
        torch.nn.Linear(96, size, bias=bool(bias)) for size, bias in zip(sizes, biases, strict=True)
    ]
    return [part.to(dtype).requires_grad_(False) for part in parts]


@pytest.mark.parametrize("layout", ["plain", "packed", "tiled"])
@pytest.mark.parametrize("biases", [(0,), (1,), (0, 0, 0), (1, 1, 1), (0, 1)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_layout_gives_the_product(
    dtype: torch.dtype, biases: tuple[int, ...], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_is_fast_in(dtype):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    if layout == "tiled":
        if (why := why_not_here()) is not None:
            pytest.skip(why)
        assert library() is not None
    if layout == "plain":
        monkeypatch.setattr(operators, "packed_product", lambda *_: None)
    parts = linears(dtype, *biases)
    inputs = [torch.randn(rows, 96).to(dtype) for rows in (1, 2, 7, 16, 65, 300)]
    wanted = [torch.cat([part(x) for part in parts], -1) for x in inputs]
    for x, want in zip(inputs, wanted, strict=True):
        assert torch.equal(unpacked(parts)(x), want)
    product = Packer(tiles=layout == "tiled").take(parts)
    for x, want in zip(inputs, wanted, strict=True):
        got = product(x)
        assert got.dtype == dtype
        error = (got - want).abs().max() / want.abs().max()
        assert error <= TOLERANCES[dtype]


def test_what_is_left_to_somebody_else_stays() -> None:
    (part,) = linears(torch.float32, 0)
    before = part.weight.clone()
    x = torch.randn(3, 96)
    torch.testing.assert_close(Packer().take([part], leave=True)(x), x @ before.T)
    assert torch.equal(part.weight, before)
    Packer().take([part])
    assert not part.weight.numel()


def test_a_packed_product_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        operators, "packed_product", lambda weight, bias: lambda x: 1.001 * (x @ weight.T)
    )
    (part,) = linears(torch.float32, 0)
    x = torch.randn(3, 96)
    want = part(x)
    assert torch.equal(Packer().take([part])(x), want)


@pytest.mark.parametrize("bias", [0, 1])
def test_a_packed_product_is_right_for_every_number_of_rows(bias: int) -> None:
    weight, added = torch.randn(40, 96), torch.randn(40) if bias else None
    product = operators.packed_product(weight, added)
    assert product is not None
    for num_rows in (1, 5, 16, 17, 18, 20, 63, 64, 65, 79, 80, 81, 255, 256):
        x = torch.randn(num_rows, 96)
        torch.testing.assert_close(product(x), F.linear(x, weight, added), atol=1e-4, rtol=1e-4)


def test_onednn_makes_programs_for_few_numbers_of_rows() -> None:
    made = [operators.rows_made(number) for number in range(1, 257)]
    assert made[:16] == list(range(1, 17)), "what decoding needs is made as it is"
    assert len(set(made)) == 16 + 12 + 12
    assert made == sorted(made)
    wasted = [(more - number) / number for number, more in enumerate(made, 1)]
    assert max(wasted[64:]) < 0.25
    assert min(wasted) >= 0


def test_products_that_did_not_ask_for_our_own_are_packed_wherever_the_library_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = []
    pack = operators.packed_product
    monkeypatch.setattr(operators, "tiled_product", Mock(side_effect=AssertionError))
    monkeypatch.setattr(
        operators, "packed_product", lambda *a: packed.append(pack(*a)) or packed[-1]
    )
    (part,) = linears(torch.float32, 0)
    assert Packer().take([part]) is packed[0]
