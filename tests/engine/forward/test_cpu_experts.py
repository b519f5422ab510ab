"""Mixtures of experts on a CPU: each form gives what each expert of transformers computes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.checkpoint.model import load_model
from engine.forward import cpu_experts
from engine.forward.cpu_experts import SortedExperts, take_over
from engine.loading import make_executor
from engine.selfcheck import check_reproducible
from engine.timing import as_timed
from tests.engine.conftest import Folder
from tests.engine.forward.test_fused import session_differences
from tests.engine.test_slot_cache import TOLERANCE, difference

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24}
KINDS = ("qwen3_moe", "gpt_oss", "nemotron_h")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def experts_of(kind: str) -> Any:
    """Experts of a family with random weights, in transformers' plainest form."""
    made: Any
    if kind == "gpt_oss":  # with biases, and matrices that lie the other way
        made = GptOssExperts(GptOssConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2))
    elif kind == "nemotron_h":  # without a gate
        made = NemotronHExperts(NemotronHConfig(**SIZES, n_routed_experts=8))
    else:
        made = Qwen3MoeExperts(Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2))
    made.config._experts_implementation = "eager"
    random = torch.Generator().manual_seed(3)
    for weight in made.parameters():
        weight.data = torch.randn(weight.shape, generator=random)
    return made


def inputs(num_rows: int, seed: int = 0) -> Inputs:
    random = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_rows, 8, generator=random).topk(2, 1).indices
    weights = torch.rand(num_rows, 2, generator=random)
    return torch.randn(num_rows, 16, generator=random), chosen, weights


def always(name: str) -> Any:
    """A choice of forms that takes no notice of what was faster."""

    def decide(found: object, choices: Sequence[object]) -> object:
        return name if name in choices else found

    return decide


@pytest.mark.parametrize("num_rows", [1, 5, 70])
@pytest.mark.parametrize("mode", ["usual", "reproducible"])
@pytest.mark.parametrize("name", cpu_experts._NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_form_computes_what_each_expert_does(
    kind: str, name: str, mode: str, num_rows: int
) -> None:
    experts, timed = experts_of(kind), mode == "usual"
    with torch.inference_mode():
        want = experts(*inputs(num_rows))
        take_over(experts, always(name), timed=timed)
        take_over(experts, always(name), timed=timed)  # changes nothing
        assert difference(experts(*inputs(num_rows)), want) < 1e-5
    is_packed = name == "sorted and packed" or not timed
    assert (experts.down_proj.numel() == 0) == is_packed  # the packed copies are the only ones


def test_packed_matrices_are_used_only_if_they_are_faster_for_one_row_and_for_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, Sequence[str]]] = []

    def quickest(forms: Any, *_: object, **__: object) -> str:
        num_rows = len(forms[0].run.args[0])
        told.append((num_rows, tuple(form.name for form in forms)))
        return "sorted and packed" if num_rows == 1 and len(forms) == 3 else "sorted"

    monkeypatch.setattr(cpu_experts, "quickest", quickest)
    experts = experts_of("qwen3_moe")
    take_over(experts, as_timed, timed=True)
    assert [rows for rows, _ in told] == [1, 8, 1, 8]
    assert all("sorted and packed" not in forms for _, forms in told[2:])
    assert isinstance(experts.forward, SortedExperts)
    assert experts.down_proj.numel() > 0


def test_one_row_and_several_may_have_different_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, calls = experts_of("gpt_oss"), [0]
    usual = experts.forward

    def counted(*rows: torch.Tensor) -> Any:
        calls.append(len(rows[0]))
        return usual(*rows)

    experts.forward = counted
    names = iter(("transformers' own", "sorted") * 2)  # once more, without packed matrices
    monkeypatch.setattr(cpu_experts, "quickest", lambda *_, **__: next(names))
    with torch.inference_mode():
        want = [usual(*inputs(count)) for count in (1, 5)]
        take_over(experts, as_timed, timed=True)
        calls.clear()
        for count, made in zip((1, 5), want, strict=True):
            assert difference(experts(*inputs(count)), made) < 1e-5
    assert calls == [1]  # transformers' own: the pass of one row


def test_where_nothing_can_be_packed_the_matrices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "packed_product", lambda *_: None)
    for timed in (True, False):
        experts = experts_of("qwen3_moe")
        with torch.inference_mode():
            want = experts(*inputs(5))
            take_over(experts, always("sorted"), timed=timed)
            assert difference(experts(*inputs(5)), want) < 1e-5
        assert experts.down_proj.numel() > 0


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_in_reproducible_mode_other_rows_change_no_bit_of_a_row(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "plain":
        monkeypatch.setattr(cpu_experts, "packed_product", lambda *_: None)
    experts = experts_of("gpt_oss")
    with torch.inference_mode():
        take_over(experts, as_timed, timed=False)
        rows = inputs(8)
        want = experts(*rows)
        for seed in range(1, 6):
            mixed = [other.clone() for other in inputs(8, seed)]
            for ours, other in zip(rows, mixed, strict=True):
                other[5] = ours[2]
            assert torch.equal(experts(*mixed)[5], want[2])


def test_reproducible_mode_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "quickest", None)
    experts = experts_of("qwen3_moe")
    take_over(experts, as_timed, timed=False)
    assert isinstance(experts.forward, SortedExperts)


def test_a_model_runs_with_packed_experts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_executor(load_model(str(folder("qwen3_moe")), dtype="float32"), 200)
    monkeypatch.setattr(cpu_experts, "quickest", lambda *_, **__: "sorted and packed")
    packed = make_executor(load_model(str(folder("qwen3_moe")), dtype="float32"), 200)
    assert packed.loaded.model.model.layers[0].mlp.experts.down_proj.numel() == 0
    for error in session_differences(plain, packed, seed=1):
        assert error < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_of_experts_is_reproducible(dtype: str, folder: Folder) -> None:
    loaded = load_model(str(folder("qwen3_moe")), dtype=dtype)
    executor = make_executor(loaded, 200, fixed_rows=8)
    check_reproducible(executor)
