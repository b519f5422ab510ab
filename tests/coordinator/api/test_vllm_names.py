"""vLLM's names: what they mean here, what is refused, and with which words. Starts nothing."""

import collections
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tqdm import tqdm

import coordinator.api.llm
from coordinator import LLM, AsyncLLM, AsyncLLMEngine, Counter, SamplingParams, Vector
from coordinator.api import vllm as speculation
from coordinator.api.asking import Asking
from coordinator.api.config import NGRAM, PairConfig, SpeculationConfig
from coordinator.api.models import heads
from coordinator.api.models.lengths import longest_of, shortened
from coordinator.api.models.nodes import node_configs
from coordinator.api.outputs import CompletionOutput, RequestOutput
from coordinator.api.params import MAX_TOKENS
from coordinator.api.requests import Batch
from coordinator.api.vllm import (
    ARGUMENTS_NOT_OURS,
    METHODS_GONE,
    METHODS_NOT_OURS,
    NOT_OURS,
    OF_ITS_ENGINE,
    Bar,
    check_arguments,
    in_our_names,
    sampling_params_of,
)
from coordinator.api.vllm_metrics import Totals
from coordinator.text.metrics import Metrics, SessionCounts
from proto.errors import ConfigurationError
from proto.installation import MODELS
from proto.messages import Hello
from tests.coordinator.api.scripted import Script, ScriptedPair


class FakePair:
    """Remembers what an LLM has asked for."""

    def __init__(self, config: PairConfig, *, with_drafter: bool) -> None:
        self.config, self.with_drafter = config, with_drafter

    def notices(self) -> list[str]:
        return []

    def close(self) -> None:
        """There is nothing to end."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakePair]:
    """The pairs that have been started, without a process."""
    made: list[FakePair] = []

    def make(config: PairConfig, *, with_drafter: bool) -> FakePair:
        made.append(FakePair(config, with_drafter=with_drafter))
        return made[-1]

    monkeypatch.setattr(coordinator.api.llm, "Pair", make)
    return made


def refusal(**values: Any) -> str:
    """The line with which an LLM is refused."""
    with pytest.raises(ConfigurationError) as caught:
        LLM("./nowhere", **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_model_is_called_model_or_target_and_has_a_revision(started: list[FakePair]) -> None:
    LLM(model="a/b", revision="main")
    LLM(target="a/b", target_revision="main")
    LLM("a/b", revision="main")
    assert len(started) == 3
    assert {pair.config for pair in started} == {PairConfig(target="a/b", target_revision="main")}
    assert "model and target are one setting; give one of them" in refusal(target="b")
    line = "revision and target_revision are one setting; give one of them"
    assert refusal(revision="a", target_revision="b") == line


def test_a_model_without_drafter_and_configuration_writes_alone(started: list[FakePair]) -> None:
    LLM("a/b")
    LLM()
    LLM(str(MODELS / "target"))
    LLM("a/b", "c/d")
    LLM("a/b", heads="e/f")
    LLM("a/b", speculative_config={"model": "c/d"})
    assert [pair.with_drafter for pair in started] == [False, True, True, True, True, True]


def test_a_speculative_config_names_model_revision_and_ranks_of_the_drafter(
    started: list[FakePair],
) -> None:
    config = {
        "model": "c/d",
        "revision": "main",
        "method": "draft_model",
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 2,
        "quantization": "int4",
    }
    LLM(model="a/b", quantization="int8", tensor_parallel_size=1, speculative_config=config)
    (pair,) = started
    assert pair.config == PairConfig(
        target="a/b",
        drafter="c/d",
        drafter_revision="main",
        drafter_tensor_parallel_size=2,
        quantization="int8",
        drafter_quantization="int4",
    )
    read = speculation.read(config)
    assert (read.settings.policy, read.settings.num_speculative_tokens) == ("auto", 5)


@pytest.mark.parametrize(
    ("config", "policy", "verify"),
    [
        ({"method": "ngram"}, "auto", "coupled"),
        ({"method": "ngram", "policy": "sync"}, "sync", "coupled"),
        ({"method": "tree"}, "tree", "coupled"),
        ({"policy": "tree"}, "tree", "coupled"),
        ({"method": "draft_model", "rejection_sample_method": "standard"}, "auto", "token"),
        ({"rejection_sample_method": "block"}, "auto", "block"),
        ({"rejection_sample_method": "token"}, "auto", "token"),
        ({"rejection_sample_method": "coupled"}, "auto", "coupled"),
        ({"verify": "block", "method": None}, "auto", "block"),
    ],
)
def test_method_says_who_drafts_and_policy_when(
    config: dict[str, Any], policy: str, verify: str
) -> None:
    read = speculation.read(config)
    assert (read.settings.policy, read.settings.verify) == (policy, verify)
    assert read.model == (NGRAM if config.get("method") == "ngram" else None)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (2, 4)),
        ({"prompt_lookup_max": 3}, (2, 3)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 5}, (5, 5)),
        ({"prompt_lookup_min": 1}, (1, 4)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 7}, (3, 7)),
        ({"ngram_min": 3, "ngram_max": 7}, (3, 7)),
    ],
)
def test_the_length_of_an_n_gram_that_is_not_given_fits_the_other(
    given: dict[str, int], lengths: tuple[int, int]
) -> None:
    settings = speculation.read({"method": "ngram", **given}).settings
    assert (settings.ngram_min, settings.ngram_max) == lengths


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"method": "mlp"},
            '["method"] is one of draft_model, ngram, medusa, eagle, eagle3, mtp, dflash, ',
        ),
        ({"method": "sync", "policy": "tree"}, 'a policy twice: "method" is sync, "policy" is'),
        ({"rejection_sample_method": "synthetic"}, "speculative_config, rejection_sample_method: "),
        ({"rejection_sample_method": []}, "speculative_config, rejection_sample_method: "),
        (
            {"rejection_sample_method": "block", "verify": "token"},
            "says rejection_sample_method and verify, which are one setting",
        ),
        ({"prompt_lookup_max": 0}, "speculative_config, prompt_lookup_max: expected "),
        ({"prompt_lookup_max": "x"}, "speculative_config, prompt_lookup_max: expected "),
        ({"draft_sample_method": "greedy"}, "speculative_config has no 'draft_sample_method'"),
    ],
)
def test_what_a_speculative_config_cannot_say_is_refused_in_a_line(
    config: dict[str, Any], line: str
) -> None:
    assert line in refusal(speculative_config=config)


def test_a_head_is_no_draft_model(tmp_path: Path) -> None:
    (tmp_path / heads.CONFIG).write_text(json.dumps({"medusa_num_heads": 4}))
    config = {"method": "draft_model", "model": str(tmp_path)}
    assert refusal(speculative_config=config) == (
        f'speculative_config["method"] is draft_model, and the model {tmp_path} is a head of the '
        "kind medusa"
    )


def test_settings_of_vllm_that_ask_for_nothing_are_taken_and_others_say_what_there_is() -> None:
    harmless = {
        "trust_remote_code": False,
        "seed": 0,
        "tokenizer": None,
        "enable_prefix_caching": True,
        "dtype": "half",
    }
    assert in_our_names({"model": "a", **harmless}) == {"target": "a", "dtype": "float16"}
    for name, (accepted, _) in NOT_OURS.items():
        assert in_our_names(dict.fromkeys([name], accepted[0])) == {}
        assert name not in PairConfig.model_fields
    assert refusal(cpu_offload_gb=4) == (
        "cpu_offload_gb=4 is not a setting here: everything stays on its device"
    )
    assert refusal(trust_remote_code=True).endswith("that comes with a checkpoint is never run")
    assert "seed=False is not a setting" in refusal(seed=False)
    assert refusal(dtype=["half"]).startswith("dtype: expected ")


def test_eager_is_a_backend_and_a_tokenizer_may_be_named_if_it_is_the_models_own() -> None:
    assert in_our_names({"enforce_eager": True}) == {"backend": "fused"}
    assert in_our_names({"enforce_eager": True, "backend": "fused"}) == {"backend": "fused"}
    assert in_our_names({"enforce_eager": False}) == {}
    assert in_our_names({"model": "a", "tokenizer": "a"}) == {"target": "a"}
    assert refusal(tokenizer="b") == (
        "tokenizer='b' is not a setting here: the target's own is used"
    )
    assert refusal(enforce_eager=True, backend="graphs") == (
        "enforce_eager and backend are one setting; give one of them"
    )
    assert refusal(enforce_eager=1) == "enforce_eager: expected true or false, got 1"


def test_arguments_of_vllm_are_accepted_as_their_defaults_and_refused_with_what_to_use() -> None:
    for name, (accepted, instead) in ARGUMENTS_NOT_OURS.items():
        check_arguments("generate", dict.fromkeys([name], accepted[0]))
        with pytest.raises(ConfigurationError) as caught:
            check_arguments("generate", {name: "something"})
        assert str(caught.value) == f"generate takes no {name}: {instead}"
    check_arguments("generate", {"lora_request": [None, None], "priority": 0})
    with pytest.raises(ConfigurationError, match="priority"):
        check_arguments("generate", {"priority": False})
    with pytest.raises(TypeError, match="generate has no argument 'lora'"):
        check_arguments("generate", {"lora": None})


def test_each_request_has_an_id_that_does_not_change_what_it_is() -> None:
    first = RequestOutput("x", [1], [], finished=True, seed=0, request_id="0")
    assert first == RequestOutput("x", [1], [], finished=True, seed=0, request_id="1")
    pair = ScriptedPair(num_seqs=1)
    asking = Asking(pair.as_pair(), SpeculationConfig())
    assert [next(asking._numbers) for _ in range(3)] == [0, 1, 2]


def test_the_async_one_has_the_names_of_vllms_too() -> None:
    assert AsyncLLMEngine is AsyncLLM
    names = ("get_metrics", "get_tokenizer", "get_default_sampling_params", "check_health")
    assert all(callable(getattr(AsyncLLM, name)) for name in names)
    made = AsyncLLM.__new__(AsyncLLM)
    with pytest.raises(AttributeError, match="AsyncLLM has no 'encode', which vLLM's has: this"):
        _ = made.encode


def test_a_share_of_memory_reaches_both_nodes_with_the_size_of_the_other_model(
    tmp_path: Path,
) -> None:
    for name, size in (("large", 300), ("small", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / heads.CONFIG).write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"0" * size)
        (tmp_path / name / "model.bin").write_bytes(b"0" * 7)
    pair = {"target": str(tmp_path / "large"), "drafter": str(tmp_path / "small")}

    def shares(**settings: Any) -> list[tuple[float, int]]:
        config = PairConfig(**pair, **settings)
        nodes = node_configs(config, endpoint="", outside="", secret="", drafts=True)
        return [(node.gpu_memory_utilization, node.peer_bytes) for node in nodes]

    assert shares() == [(0.0, 20), (0.0, 300)]
    assert shares(gpu_memory_utilization=0.8) == [(0.8, 20), (0.8, 300)]
    assert shares(gpu_memory_utilization=0.8, drafter_home="target") == [(0.8, 0)]
    (tmp_path / "gguf").mkdir()  # a folder without config.json
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"0" * 50)
    pair["target"] = str(tmp_path / "gguf")
    assert shares(gpu_memory_utilization=0.8) == [(0.8, 20), (0.8, 50)]


def test_several_targets_and_drafters_have_names_devices_and_lanes_of_their_own() -> None:
    config = PairConfig(targets=2, drafters=2, target_device="cpu:0,cpu:1", max_num_seqs=3)
    nodes = node_configs(config, endpoint="", outside="", secret="", drafts=True)
    assert [(one.identity, one.max_num_seqs) for one in nodes] == [
        ("target-1", 3),
        ("target-2", 3),
        ("drafter-1", 6),
        ("drafter-2", 6),
    ]
    assert [one.device for one in nodes[:2]] == ["cpu:0", "cpu:1"]
    alone = node_configs(config, endpoint="", outside="", secret="", drafts=False)
    assert [(one.identity, one.peer_device) for one in alone] == [
        ("target-1", None),
        ("target-2", None),
    ]


def test_a_models_own_sampling_parameters_are_read_on_demand(tmp_path: Path) -> None:
    assert sampling_params_of(str(tmp_path), None) == SamplingParams()
    file = tmp_path / "generation_config.json"
    stated = {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 7, "do_sample": True}
    file.write_text(json.dumps(stated | {"top_k": None, "eos_token_id": [1, 2]}))
    found = sampling_params_of(str(tmp_path), None)
    assert found == SamplingParams(temperature=0.6, top_p=0.95, max_tokens=7)
    file.write_text(json.dumps({"top_p": 2}))
    with pytest.raises(ConfigurationError, match=r"generation_config.json: top_p"):
        sampling_params_of(str(tmp_path), None)
    with pytest.raises(ConfigurationError, match="expected auto or vllm, got 'other'"):
        LLM(str(tmp_path), generation_config="other")


def test_metrics_are_counted_over_texts_under_the_names_of_vllm() -> None:
    totals = Totals("a")
    for steps in ({(2, 1): 3, (2, 2): 1}, {(1, 0): 1}, {}):
        metrics = Metrics.of(
            SessionCounts(num_passes=2, acceptance=collections.Counter(steps)),
            started=0.5,
            emitted=[(1.0, 1), (2.0, 2)],
            drafter_lost_at=None,
            queued_s=0.0,
            num_spec_tokens=2,
        )
        made = CompletionOutput(0, "y", [3], "stop", metrics=metrics)
        totals.ended(RequestOutput("x", [1, 2], [made], finished=True, seed=0))
    failed = CompletionOutput(0, "", [], "error", error="it broke")
    totals.ended(RequestOutput("x", [1, 2], [failed], finished=True, seed=0))
    assert totals.metrics() == [
        *(
            Counter(f"vllm:{name}", {"model_name": "a"}, value)
            for name, value in {
                "prompt_tokens": 6,
                "generation_tokens": 9,
                "request_success": 3,
                "spec_decode_num_drafts": 5,
                "spec_decode_num_draft_tokens": 9,
                "spec_decode_num_accepted_tokens": 5,
            }.items()
        ),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {"model_name": "a"}, values=[4, 1]),
    ]


def test_sampling_parameters_know_the_values_that_mean_no_limit() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(max_tokens=None).max_tokens == MAX_TOKENS
    assert SamplingParams(max_tokens=None, min_tokens=500_000).min_tokens == 500_000
    assert SamplingParams().skip_special_tokens
    for values in ({"top_k": -2}, {"top_k": -1.5}, {"max_tokens": 0}, {"max_tokens": -1}):
        with pytest.raises(ConfigurationError):
            SamplingParams(**values)


def test_the_bar_counts_prompts_whose_texts_are_complete() -> None:
    def bars(**values: Any) -> Any:
        made.append(tqdm(file=out, mininterval=0, **values))
        return made[-1]

    def speak(script: Script) -> None:
        script.add(1, 2)
        script.end()

    out, made = io.StringIO(), []
    pair = ScriptedPair(num_seqs=2)
    pair.begin = speak
    params = SamplingParams(temperature=1.0, n=2)
    requests = [pair.request(1, params=params), pair.request(2)]
    counts = []
    with Bar(len(requests), bars) as bar:
        for step in Batch(pair.as_pair(), requests).steps():
            bar.show(step)
            counts.append(made[0].n)
    assert (made[0].total, counts[-1], counts.count(0)) == (2, 2, 3)
    assert "prompts: 100%" in out.getvalue()
    assert "tokens/s" in out.getvalue()
    assert made[0].disable, "it is not closed"
    with Bar(2, use_tqdm=False) as none:
        for step in Batch(pair.as_pair(), [pair.request(3)]).steps():
            none.show(step)
    assert len(made) == 1


def test_a_length_that_nobody_asks_for_is_the_models_but_for_reproducible_passes() -> None:
    def lengths(config: PairConfig) -> list[int]:
        nodes = node_configs(config, endpoint="", outside="", secret="", drafts=True)
        return [node.max_model_len for node in nodes]

    assert lengths(PairConfig()) == [0, 0]
    assert lengths(PairConfig(max_model_len=300)) == [300, 300]
    # What a seed writes must not depend on how much memory is free.
    assert lengths(PairConfig(reproducible=True)) == [4096, 4096]
    assert lengths(PairConfig(reproducible=True, max_model_len=64)) == [64, 64]


def test_texts_that_must_be_shorter_than_the_model_allows_are_told_in_a_line(
    tmp_path: Path,
) -> None:
    def notices(
        target: int, drafter: int, *, with_heads: bool = False, **settings: Any
    ) -> list[str]:
        config = PairConfig(target=str(tmp_path), **settings)
        theirs = SimpleNamespace(max_model_len=target, has_heads=with_heads, num_lanes=8)
        drafters = [SimpleNamespace(max_model_len=drafter), SimpleNamespace(max_model_len=9999)]
        return shortened(config, cast(Hello, theirs), cast(list[Hello], drafters))

    (tmp_path / heads.CONFIG).write_text(json.dumps({"max_position_embeddings": 9000}))
    rest = "; --max-model-len says how many there should be"
    line = "texts have at most 5000 tokens, of the 9000 that the target can take"
    assert notices(9000, 9000) == []
    assert notices(5000, 5000) == [f"{line}: there is no memory for more{rest}"]
    assert notices(5000, 5000, with_heads=True) == [line + rest]
    (fewer,) = notices(9000, 9000, max_num_seqs=9)
    assert fewer.startswith("8 texts of 9000 tokens are written at once, not 9: there is no memory")
    assert notices(9000, 700) == ["the drafter drafts up to token 700"]
    assert notices(5000, 700, max_model_len=5000) == [], "it was asked for"
    assert notices(4096, 4096, reproducible=True) == []
    windowed = {"model_type": "mistral", "max_position_embeddings": 9000, "sliding_window": 400}
    (tmp_path / heads.CONFIG).write_text(json.dumps(windowed))
    assert notices(9000, 9000) == [], "texts are longer than a window"
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 500}
    long = {"model_type": "phi3", "max_position_embeddings": 9000, "rope_parameters": rope}
    (tmp_path / heads.CONFIG).write_text(json.dumps(long))
    line = "texts have at most 500 tokens: their rope factors are for short ones; "
    assert notices(500, 500) == [line + "--max-model-len allows 9000"]
    (said,) = notices(400, 400)
    assert said.startswith("texts have at most 400 tokens, of the 9000 that the target can take")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 300}, 300),
        ({"max_position_embeddings": 1 << 24}, 1 << 20),
        ({"text_config": {"max_position_embeddings": 200}}, 200),
        ({"model_type": "phi3", "max_position_embeddings": 900, "sliding_window": 70}, 900),
        (
            {
                "max_position_embeddings": 9000,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 400},
            },
            400,
        ),
        (
            {
                "max_position_embeddings": 9000,
                "original_max_position_embeddings": 500,
                "rope_parameters": {"rope_type": "longrope"},
            },
            500,
        ),
        ({"max_position_embeddings": 900, "rope_parameters": {"rope_type": "llama3"}}, 900),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_model_is_read_of_its_config(
    tmp_path: Path, config: dict[str, Any], limit: int | None
) -> None:
    (tmp_path / heads.CONFIG).write_text(json.dumps(config))
    assert longest_of(str(tmp_path), None, 0) == limit
    assert longest_of(str(tmp_path / "nowhere"), None) is None


def test_methods_of_vllm_that_are_not_here_say_what_to_use() -> None:
    llm = LLM.__new__(LLM)
    for name, instead in METHODS_NOT_OURS.items():
        assert not hasattr(LLM, name)
        with pytest.raises(AttributeError, match=f"^LLM has no '{name}', which vLLM's has: ") as it:
            getattr(llm, name)
        assert str(it.value).endswith(instead)
        assert it.value.name == name
    for name, instead in METHODS_GONE.items():
        assert not hasattr(LLM, name)
        with pytest.raises(AttributeError, match=f"^LLM has no '{name}' any more: in an ") as it:
            getattr(llm, name)
        assert str(it.value).endswith(instead)
    with pytest.raises(AttributeError, match=r"^LLM has no 'other'$"):
        _ = llm.other  # type: ignore[attr-defined]
    assert not hasattr(llm, "sleep")


def test_how_vllms_engine_drafts_may_be_left_as_it_is() -> None:
    for name in OF_ITS_ENGINE:
        for nothing in (None, False):
            assert speculation.read({"method": "ngram", name: nothing}) == speculation.read(
                {"method": "ngram"}
            )
        assert f"speculative_config has no '{name}'" in refusal(speculative_config={name: True})
        assert f"speculative_config has no '{name}'" in refusal(speculative_config={name: 0})
    assert in_our_names({"load_format": "auto", "config_format": "auto"}) == {}
    assert refusal(load_format="gguf") == (
        "load_format='gguf' is not a setting here: the files of a model tell their format"
    )
