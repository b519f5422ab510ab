"""The layer for multi-token prediction as a drafter: what is refused before a node starts."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from coordinator.api.config import PairConfig
from coordinator.api.models.folders import Checkpoint
from coordinator.api.models.heads import check_mtp, mtp_bytes
from coordinator.api.models.nodes import node_configs
from coordinator.api.models.preflight import look_at
from coordinator.api.vllm import read
from proto.errors import ConfigurationError, ModelError
from proto.head_kinds import HeadKind
from tests.mtp import NUM_LAYERS, PLAINLY, QWEN, Plain, wrap
from tests.packed_models import RECIPES, save_packed

SHARED = ("embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target with such a layer."""
    return Plain("glm4_moe").save(tmp_path)


def test_it_runs_at_home_and_reads_the_last_hidden_state(folder: Path) -> None:
    config = PairConfig(target=str(folder), drafter="mtp")
    assert (config.drafter_head, config.layers) == (HeadKind.MTP, (-1,))
    assert config.home_drafter == ("mtp", None)
    assert not config.has_draft_process
    look_at(config, drafts=True)
    beside = PairConfig(target=str(folder), drafter="ngram", heads="mtp")
    assert beside.home_drafter == ("mtp", None)
    look_at(beside, drafts=True)
    assert PairConfig(target=str(folder), drafter="mtp", drafter_home="own").has_draft_process


def test_its_size_is_that_of_the_layer_and_of_what_it_shares(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer = [one for name, one in tensors.items() if f"layers.{NUM_LAYERS}." in name]
    shared = [tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]]
    assert mtp_bytes(str(folder), None) == sum(one.nbytes for one in (*layer, *shared))
    config = PairConfig(
        target=str(folder), drafter="mtp", drafter_home="own", gpu_memory_utilization=0.5
    )
    target, drafter = node_configs(config, endpoint="", outside="", secret="", drafts=True)
    assert 0 < target.peer_bytes < drafter.peer_bytes


def test_a_target_without_one_is_refused() -> None:
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        look_at(PairConfig(target="toy", drafter="mtp"), drafts=True)


def test_a_target_whose_files_lack_it_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    last = f"model.layers.{NUM_LAYERS}."
    kept = {name: one for name, one in load_file(file).items() if not name.startswith(last)}
    save_file(kept, file)
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        look_at(PairConfig(target=str(folder), drafter="mtp"), drafts=True)


@pytest.mark.parametrize("family", [*QWEN, "qwen3_5", "qwen3_5_moe"])
def test_that_of_qwen_is_found_also_in_a_model_of_several_modalities(
    family: str, tmp_path: Path
) -> None:
    if family in QWEN:
        Plain(family).save(tmp_path)
    else:
        wrap(Plain(f"{family}_text").save(tmp_path))
    for drafter in ("mtp", "auto"):
        config = PairConfig(target=str(tmp_path), drafter=drafter)
        assert (config.drafter, config.drafter_head) == ("mtp", HeadKind.MTP)
        look_at(config, drafts=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    without = {name: one for name, one in tensors.items() if not name.startswith("mtp.")}
    shared = sum(one.nbytes for name, one in tensors.items() if name.endswith(SHARED))
    layer = sum(one.nbytes for name, one in tensors.items() if name.startswith("mtp."))
    assert mtp_bytes(str(tmp_path), None) == layer + shared
    save_file(without, file)  # as a program that does not know the layer writes it
    assert PairConfig(target=str(tmp_path), drafter="auto").drafter == "ngram"
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        look_at(PairConfig(target=str(tmp_path), drafter="mtp"), drafts=True)


def test_of_a_target_on_the_hub_the_index_tells(tmp_path: Path) -> None:
    stated = {"model_type": "qwen3_next", "num_hidden_layers": 48}
    target = Checkpoint("organisation/model", None, tmp_path, stated, None)
    check_mtp(target)  # neither weights nor their index are here: nothing speaks against it
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"mtp.fc.weight": "model-1.safetensors"}}))
    check_mtp(target)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}}))
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        check_mtp(target)


def test_a_wrapped_target_of_another_kind_is_refused() -> None:
    stated = {"model_type": "gemma3", "text_config": {"num_nextn_predict_layers": 1}}
    with pytest.raises(ModelError, match="several modalities of this type"):
        check_mtp(Checkpoint("organisation/model", None, Path("none"), stated, None))


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "longcat_flash"])
def test_a_form_that_is_not_read_is_refused(kind: str) -> None:
    stated = {"model_type": kind, "num_nextn_predict_layers": 1}
    with pytest.raises(ModelError, match=f"is not read of the type {kind}"):
        check_mtp(Checkpoint("organisation/model", None, Path("none"), stated, None))


def test_of_a_quantised_target_the_first_matrix_may_be_packed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("quantised")
    packed, _ = save_packed(folder, out, RECIPES["gptq"], plainly=PLAINLY)
    names = load_file(packed / "model.safetensors")
    assert any(name.endswith("eh_proj.qweight") for name in names)
    config = PairConfig(target=str(packed), drafter="auto")
    assert config.drafter == "mtp"
    look_at(config, drafts=True)


def test_its_weights_are_not_rounded(folder: Path) -> None:
    for drafter, heads in (("mtp", ""), ("ngram", "mtp")):
        config = PairConfig(
            target=str(folder), drafter=drafter, heads=heads, drafter_quantization="int4"
        )
        with pytest.raises(ConfigurationError, match="a layer of the target"):
            config.check()


def test_names_of_vllm_mean_it_and_others_do_not(folder: Path) -> None:
    pair = PairConfig(target=str(folder), drafter="mtp")
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_5_mtp", "qwen3_next_mtp"):
        speculation = read({"method": method})
        assert (speculation.method, speculation.model) == ("mtp", "mtp")
        speculation.check_kind(pair)
    with pytest.raises(ConfigurationError, match="is one of"):
        read({"method": "tree_mtp"})
    with pytest.raises(ConfigurationError, match="has no model"):
        read({"method": "mtp", "model": "other"})
    with pytest.raises(ConfigurationError, match="is eagle3, and the model mtp is"):
        read({"method": "eagle3", "model": "mtp"}).check_kind(pair)
