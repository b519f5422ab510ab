"""All of a text is read with one set of rotary factors, which the maximum length decides."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, Llama4ForCausalLM

from coordinator.api.models.folders import find
from coordinator.api.models.lengths import longest_of
from engine.checkpoint.long_texts import limited
from engine.checkpoint.model import load_model
from engine.checkpoint.settled import settle
from engine.errors import ModelError
from engine.heads.target import Target
from engine.loading import make_executor
from proto.errors import ModelError as RefusedModel
from tests.engine.tensor_parallel.test_parts import rank_of
from tests.long_models import LONG, MOST, ORIGINAL, make_long, plain, with_one_set
from tests.wrapped_models import TEXT

IDS = torch.randint(0, 180, (1, 120), generator=torch.Generator().manual_seed(3))
SHORT_IDS = IDS[:, :40]
SU = {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 70}


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What a model says of a text, without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_the_long_factors_are_for_all_texts_where_long_ones_were_asked_for(
    kind: str, tmp_path: Path
) -> None:
    folder = make_long(kind, tmp_path)
    loaded = load_model(str(folder), dtype="float32", max_len=ORIGINAL + 1)
    assert loaded.max_model_len == longest_of(str(folder), None, ORIGINAL + 1) == MOST
    long = with_one_set(kind, folder)
    for ids in (IDS, SHORT_IDS):
        assert torch.equal(logits_of(loaded.model, ids), logits_of(long, ids))
    # Transformers takes them for this one too, but not for a short one.
    assert torch.equal(logits_of(loaded.model, IDS), logits_of(plain(folder), IDS))
    assert not torch.equal(logits_of(long, SHORT_IDS), logits_of(plain(folder), SHORT_IDS))
    make_executor(loaded, MOST)
    assert Target(str(folder), None, MOST).max_model_len == MOST
    if kind == "llama":
        part = load_model(str(folder), dtype="float32", rank=rank_of(1), max_len=MOST).model
        assert torch.equal(part.model.rotary_emb.inv_freq, loaded.model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("max_len", [0, ORIGINAL])
def test_else_the_short_ones_are_up_to_the_original_length(max_len: int, tmp_path: Path) -> None:
    folder = make_long("phi3", tmp_path)
    loaded = load_model(str(folder), dtype="float32", max_len=max_len)
    assert loaded.max_model_len == longest_of(str(folder), None, max_len) == ORIGINAL
    assert torch.equal(logits_of(loaded.model, SHORT_IDS), logits_of(plain(folder), SHORT_IDS))
    assert Target(str(folder), None).max_model_len == ORIGINAL
    assert longest_of(str(folder), None) == MOST  # what can be asked for


@pytest.mark.parametrize(
    ("kind", "text", "asked", "limit"),
    [
        ("llama", {}, 0, 9000),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, 8000, 9000),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "original_max_position_embeddings": 700}},
            8000,
            700,
        ),
        (
            "phimoe",
            {
                "rope_scaling": {"type": "longrope"},
                "original_max_position_embeddings": 700,
            },
            8000,
            700,
        ),
        ("phi3", SU, 71, 9000),
        ("phi3", SU, 70, 70),
    ],
)
def test_how_long_texts_may_be_follows_from_config_json(
    kind: str, text: dict[str, Any], asked: int, limit: int
) -> None:
    assert limited(kind, text, 9000, asked) == limit


def test_queries_of_llama_4_are_scaled_by_the_positions_of_their_tokens() -> None:
    sizes = {**TEXT, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 128}
    config = CONFIG_MAPPING["llama4_text"](**sizes, floor_scale=16, no_rope_layers=[1, 0, 1])
    torch.manual_seed(1)
    model: Any = Llama4ForCausalLM(config).float().eval()
    want = logits_of(model, IDS)
    settle(model, config, 1024)
    assert torch.equal(logits_of(model, IDS), want)
    twice = torch.cat((SHORT_IDS, SHORT_IDS), 1)  # two texts in a pass, neither sees the other
    positions = torch.arange(40).repeat(2)[None]
    mask = torch.block_diag(*[torch.ones(40, 40).tril()] * 2).bool()[None, None]
    with torch.inference_mode():
        found = model(twice, position_ids=positions, attention_mask=mask).logits
    for half in found[0].split(40):
        torch.testing.assert_close(half, want[0, :40])


@pytest.mark.parametrize(
    ("factors", "line"),
    [
        ({"long_factor": None}, "rope_parameters.long_factor is null; a longrope needs it"),
        ({"short_factor": []}, "rope_parameters.short_factor is []; a longrope needs it"),
        ({"short_factor": [1, "x"]}, 'rope_parameters.short_factor is [1, "x"]; a longrope needs'),
        ({"long_factor": [0] * 8}, "rope_parameters.long_factor is [0, 0, 0, 0, 0, 0, 0, 0]; a"),
        ({"long_factor": LONG[1:]}, "it cannot be used: "),
    ],
)
def test_factors_that_are_missing_or_wrong_are_named(
    factors: dict[str, Any], line: str, tmp_path: Path
) -> None:
    folder = make_long("phi3", tmp_path)
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    stated["rope_parameters"] |= factors
    path.write_text(json.dumps(stated))
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)
    if not line.startswith("it cannot"):
        with pytest.raises(RefusedModel) as refused:
            find(str(folder), None)
        assert str(refused.value) == str(caught.value)
