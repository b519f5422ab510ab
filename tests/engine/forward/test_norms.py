"""Every form of the norm against transformers' own."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.forward.operators import at_once, of_pairs, rms_norm

FORMS = {"of pairs": of_pairs, "at once": at_once}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_norm_of_the_model(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    own = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    own.weight.data.normal_()
    x = 3 * torch.randn(5, 96).to(dtype)
    want = own(x).detach()
    got = rms_norm(own.weight.detach(), 1e-5, FORMS[form])(x)
    assert got.dtype == dtype
    assert float((got - want).abs().max() / want.abs().max()) <= TOLERANCES[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_heads_have_weights_of_their_own(form: str) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(4, 16), torch.randn(3, 4, 16)
    got = rms_norm(weight, 1e-6, FORMS[form])(x)
    want = weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert float((got - want).abs().max()) < 1e-5
