"""Heads as draft sources: how they are recognised, where they run, what the nodes are told."""

import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from coordinator import LLM
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.models import heads as recognised
from coordinator.api.models.heads import kind_of
from coordinator.api.models.nodes import node_configs
from engine.heads.recognised import READERS, head_kind_of
from proto.errors import ConfigurationError
from proto.head_kinds import HeadKind, feature_layers
from proto.messages import Role
from proto.node_config import NodeConfig

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8}
TARGET = {**LLAMA, "num_hidden_layers": 12}
EAGLE = ("embed_tokens.weight", "fc.weight", "layers.0.self_attn.q_proj.weight")
AUTO = SpeculationConfig()


def folder(path: Path, config: dict[str, Any], *tensors: str) -> str:
    """A checkpoint of these tensors, without numbers."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if tensors:
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header = json.dumps({"__metadata__": {}, **dict.fromkeys(tensors, empty)}).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return str(path)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Folders of a target, of a draft model, and of a head of each kind."""
    return {
        "target": folder(tmp_path / "target", TARGET),
        "shallow": folder(tmp_path / "shallow", LLAMA, "model.layers.0.mlp.up_proj.weight"),
        "medusa": folder(tmp_path / "medusa", {"medusa_num_heads": 4}),
        "eagle": folder(tmp_path / "eagle", LLAMA, *EAGLE),
        "eagle3": folder(tmp_path / "eagle3", {**LLAMA, "draft_vocab_size": 32}),
    }


def pair_of(models: dict[str, str], drafter: str, **settings: Any) -> PairConfig:
    """With this drafter, and heads by their names."""
    heads = settings.pop("heads", "")
    return PairConfig(
        target=models["target"],
        drafter=models.get(drafter, drafter),
        heads=models.get(heads, heads),
        **settings,
    )


def told(config: PairConfig, *, drafts: bool = True) -> dict[Role, NodeConfig]:
    """What each node is told."""
    made = node_configs(config, endpoint="ipc://x", outside="", secret="s", drafts=drafts)
    return {one.role: one for one in made}


def test_a_head_is_known_by_its_config_or_by_the_names_of_its_tensors(
    models: dict[str, str],
) -> None:
    kinds = {name: kind_of(path, None) for name, path in models.items()}
    assert kinds == {
        "target": None,
        "shallow": None,
        "medusa": HeadKind.MEDUSA,
        "eagle": HeadKind.EAGLE,
        "eagle3": HeadKind.EAGLE3,
    }


class Planted:
    """What a file must not do to whoever reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('it was executed')",))


def test_names_are_read_from_the_other_forms_of_a_checkpoint_and_nothing_is_executed(
    tmp_path: Path,
) -> None:
    pickled = Path(folder(tmp_path / "pickled", LLAMA))
    with zipfile.ZipFile(pickled / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps([*EAGLE, Planted()]))
    assert kind_of(str(pickled), None) is HeadKind.EAGLE
    assert head_kind_of(str(pickled), None) is HeadKind.EAGLE  # as a node asks
    sharded = Path(folder(tmp_path / "sharded", LLAMA))
    index = {"weight_map": dict.fromkeys(EAGLE, "model-1.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert kind_of(str(sharded), None) is HeadKind.EAGLE


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"PK\x03\x04", struct.pack("<Q", 9) + b"[1]"]
)
def test_files_that_are_none_make_no_head_and_no_error(tmp_path: Path, content: bytes) -> None:
    for number, name in enumerate(READERS):
        path = Path(folder(tmp_path / str(number), LLAMA))
        (path / name).write_bytes(content)
        assert kind_of(str(path), None) is None
    (tmp_path / "odd").mkdir()
    assert kind_of(str(tmp_path / "odd"), None) is None
    for text in ("[]", "{", ""):
        (tmp_path / "odd" / "config.json").write_text(text)
        assert kind_of(str(tmp_path / "odd"), None) is None


def test_the_hub_is_asked_once_and_after_a_while_again_if_it_did_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    answers: dict[str, Path] = {}

    def find(model: str, _revision: str | None, name: str) -> Path | None:
        asked.append(f"{model} {name}")
        return answers.get(model)

    now = [100.0]
    monkeypatch.setattr(recognised, "find_file", find)
    monkeypatch.setattr(recognised, "_fetched", {})
    monkeypatch.setattr(recognised.time, "monotonic", lambda: now[0])
    assert [kind_of("a/b", None) for _ in range(3)] == [None] * 3
    assert asked == ["a/b config.json"]
    now[0] += recognised.AGAIN_S
    answers["a/b"] = Path(folder(tmp_path / "fetched", {"medusa_num_heads": 2})) / "config.json"
    assert [kind_of("a/b", None) for _ in range(3)] == [HeadKind.MEDUSA] * 3
    assert asked == ["a/b config.json"] * 2


def test_medusa_is_at_home_in_the_target_and_eagle_in_a_process_of_its_own(
    models: dict[str, str],
) -> None:
    medusa = told(pair_of(models, "medusa"))
    assert medusa.keys() == {Role.TARGET}
    assert medusa[Role.TARGET].home_drafter == models["medusa"]
    assert medusa[Role.TARGET].layers == (-1,)
    eagle = told(pair_of(models, "eagle"))
    assert (eagle[Role.TARGET].home_drafter, eagle[Role.TARGET].layers) == ("", (-1,))
    assert eagle[Role.DRAFTER].model == models["eagle"]
    assert eagle[Role.DRAFTER].target == models["target"]
    three = told(pair_of(models, "eagle3", drafter_home="target"))
    assert three.keys() == {Role.TARGET}
    assert three[Role.TARGET].home_drafter == models["eagle3"]
    assert three[Role.TARGET].layers == (2, 6, 9)
    assert Role.DRAFTER in told(pair_of(models, "medusa", drafter_home="own"))


def test_a_draft_model_runs_in_the_targets_process_where_the_user_says_so(
    models: dict[str, str],
) -> None:
    assert told(pair_of(models, "shallow")).keys() == {Role.TARGET, Role.DRAFTER}
    home = told(pair_of(models, "shallow", drafter_home="target", drafter_dtype="float32"))
    assert home.keys() == {Role.TARGET}
    assert home[Role.TARGET].home_drafter == models["shallow"]
    assert (home[Role.TARGET].home_dtype, home[Role.TARGET].home_quantization) == ("float32", "")
    assert home[Role.TARGET].layers == (), "it reads no hidden states"
    rounded = told(pair_of(models, "shallow", drafter_home="target", drafter_quantization="int4"))
    assert rounded[Role.TARGET].home_quantization == "int4"
    alone = told(pair_of(models, "shallow", drafter_home="target"), drafts=False)
    assert alone[Role.TARGET].home_drafter == ""


def test_heads_beside_another_drafter_and_revisions_reach_the_nodes(
    models: dict[str, str],
) -> None:
    both = told(pair_of(models, "eagle", heads="eagle3"))
    assert both[Role.TARGET].home_drafter == models["eagle3"]
    assert both[Role.TARGET].layers == (-1, 2, 6, 9)
    copied = told(pair_of(models, "ngram", heads="medusa"))
    assert copied.keys() == {Role.TARGET}
    assert copied[Role.TARGET].home_drafter == models["medusa"]
    model = told(pair_of(models, "shallow", heads="medusa"))
    assert model[Role.DRAFTER].target == ""
    alone = told(pair_of(models, "eagle", heads="eagle3"), drafts=False)
    assert alone.keys() == {Role.TARGET}
    assert (alone[Role.TARGET].home_drafter, alone[Role.TARGET].layers) == ("", ())


def test_the_numbers_of_a_head_are_not_chosen_by_timing(models: dict[str, str]) -> None:
    def types(drafter: str, **settings: Any) -> tuple[str, str]:
        drafting = told(pair_of(models, drafter, **settings))[Role.DRAFTER]
        return drafting.dtype, drafting.dtype_on_cpu

    assert types("shallow") == ("auto", "fastest")
    assert types("eagle") == ("auto", "")
    assert types("eagle", dtype="float32") == ("float32", "")
    assert types("eagle", drafter_dtype="fastest") == ("auto", "")
    assert types("eagle", drafter_dtype="bfloat16") == ("bfloat16", "")


def test_steps_of_heads_at_home_are_simulated_as_those_of_a_drafter(
    models: dict[str, str],
) -> None:
    def steps(drafter: str, heads: str = "", **settings: Any) -> dict[Role, tuple[float, float]]:
        slow = {"simulate_draft_ms": 5.0, "simulate_draft_ms_per_row": 0.5}
        nodes = told(pair_of(models, drafter, heads=heads, **slow, **settings))
        return {
            role: (one.simulated_ms, one.home_ms + one.home_ms_per_row)
            for role, one in nodes.items()
        }

    assert steps("medusa") == steps("ngram", "medusa") == {Role.TARGET: (0.0, 5.5)}
    assert steps("eagle", drafter_home="target") == {Role.TARGET: (0.0, 5.5)}
    drafter = {Role.DRAFTER: (5.0, 0.0)}
    assert steps("shallow", "medusa") == {Role.TARGET: (0.0, 5.5), **drafter}
    assert steps("eagle") == {Role.TARGET: (0.0, 0.0), **drafter}


@pytest.mark.parametrize(
    ("drafter", "heads", "waits", "copies"),
    [
        ("shallow", "medusa", True, False),
        ("eagle", "", True, False),
        ("medusa", "", False, False),
        ("ngram", "medusa", False, True),
    ],
)
def test_a_target_without_a_drafters_process_waits_for_nobody(
    models: dict[str, str], drafter: str, heads: str, *, waits: bool, copies: bool
) -> None:
    config = pair_of(models, drafter, heads=heads)
    AUTO.check(config)
    policy = AUTO.make(config)
    assert policy.has_drafter == waits
    assert policy.num_speculative_tokens > 0
    assert AUTO.uses_ngrams(config) == copies
    assert SpeculationConfig(also_ngram=True).uses_ngrams(config)
    assert SpeculationConfig(policy="ar").make(config).num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("drafter", "settings", "line"),
    [
        ("ngram", {"drafter_home": "own"}, "n-gram drafts come from no model; leave it out"),
        (
            "shallow",
            {"drafter_home": "target", "heads": "medusa"},
            "would both run in the target's",
        ),
        ("medusa", {"heads": "eagle"}, "would both run in the target's process; give one of them"),
        (
            "eagle",
            {"heads": "shallow"},
            "shallow is none of Medusa, EAGLE, EAGLE-3, DFlash; a draft",
        ),
        ("eagle", {"drafter_device": "cuda:0,cuda:1"}, "a head runs in one process; give it one"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    models: dict[str, str], drafter: str, settings: dict[str, Any], line: str
) -> None:
    config = pair_of(models, drafter, **settings)
    with pytest.raises(ConfigurationError) as caught:
        AUTO.check(config)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    SpeculationConfig(policy="ar").check(config)


@pytest.mark.parametrize(
    ("drafter", "heads", "also_ngram", "line"),
    [
        ("shallow", "medusa", False, "heads beside the drafter needs coupled verification, not "),
        ("ngram", "medusa", False, "ngram beside heads needs coupled verification, not "),
        ("medusa", "", True, "also_ngram beside heads needs coupled verification, not "),
        ("medusa", "", False, ""),
        ("eagle", "", False, ""),
    ],
)
def test_under_a_classical_rule_there_is_one_drafter(
    models: dict[str, str], drafter: str, heads: str, *, also_ngram: bool, line: str
) -> None:
    config = pair_of(models, drafter, heads=heads)
    SpeculationConfig(also_ngram=also_ngram).check(config)
    for verify in ("token", "block"):
        speculation = SpeculationConfig(also_ngram=also_ngram, verify=verify)
        if not line:
            speculation.check(config)
            continue
        with pytest.raises(ConfigurationError) as caught:
            speculation.check(config)
        rest = f"{verify}: to choose between two drafters would bias the text"
        assert str(caught.value) == line + rest


@pytest.mark.parametrize(
    ("method", "model", "line"),
    [
        ("eagle", None, 'the method eagle needs a "model": the folder or name of a head'),
        ("eagle3", "eagle", "is eagle3, and the model "),
        ("medusa", "shallow", "shallow is no head"),
    ],
)
def test_the_methods_of_heads_name_their_kind(
    models: dict[str, str], method: str, model: str | None, line: str
) -> None:
    config = {"method": method} | ({} if model is None else {"model": models[model]})
    with pytest.raises(ConfigurationError) as caught:
        LLM(models["target"], speculative_config=config)
    assert line in str(caught.value)


def test_the_layers_of_an_eagle_3_head_are_those_that_it_states_or_the_usual_three() -> None:
    def layers(config: dict[str, Any], num_layers: int = 32) -> tuple[int, ...]:
        return feature_layers(HeadKind.EAGLE3, config, num_layers)

    name = "eagle_aux_hidden_state_layer_ids"
    assert layers({}) == (2, 16, 29)
    assert layers({name: [1, 15, 28]}) == (1, 15, 28)
    assert layers({"eagle_config": {name: [1, 15, 28]}}) == (2, 16, 29)
    assert layers({"eagle_config": {name: [2, 16, 29]}}) == (2, 16, 29)
    assert layers({name: [2, 16, 32]}) == layers({name: "all"}) == layers({}, 2) == ()
    assert feature_layers(HeadKind.EAGLE, {}, 32) == feature_layers(HeadKind.MEDUSA, {}, 1) == (-1,)
