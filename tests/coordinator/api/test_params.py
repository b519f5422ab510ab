"""What the Python API takes, before any process is started."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import coordinator
from coordinator import LLM, SamplingParams
from coordinator.api.config import NGRAM, PairConfig, SpeculationConfig
from coordinator.api.config_base import checked
from coordinator.api.prompts import Tokenization
from coordinator.cli import flags
from engine.checkpoint.checkpoint import find_checkpoint
from engine.errors import ModelError
from proto.errors import ConfigurationError


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"temperatur": 1.0}, "SamplingParams has no setting 'temperatur'; there are temperature"),
        ({"temperature": -1}, "temperature: expected at least 0"),
        ({"top_p": 0}, "top_p: expected more than 0, got 0"),
        ({"seed": -2}, "seed: "),
        ({"max_tokens": "many"}, "max_tokens: "),
        ({"min_p": 1.5}, "min_p: expected at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: "),
        ({"presence_penalty": 2.5}, "presence_penalty: "),
        ({"logit_bias": {"word": 1}}, "logit_bias: "),
        ({"logit_bias": {5: -101}}, "logit_bias: "),
        ({"stop": ["a", ""]}, "stop: expected a text that is not empty, got ''"),
        ({"stop": 5}, "stop: "),
        ({"stop_token_ids": [-1]}, "stop_token_ids: "),
        ({"stop_token_ids": list(range(200))}, "stop_token_ids: "),
        ({"logprobs": 21}, "logprobs: expected at most 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: "),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; it must be at most max_tokens, 8"),
        ({"n": 2}, "n is 2, but at temperature 0 all texts are the same"),
        ({"n": 65, "temperature": 1}, "n: "),
    ],
)
def test_a_bad_sampling_parameter_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SamplingParams(**values)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"speculative_config": {"method": "magic"}},
            "draft_model, ngram, medusa, eagle, eagle3, mtp, dflash, auto, ",
        ),
        ({"speculative_config": {"K": 3}}, "speculative_config has no 'K'; there are method"),
        ({"speculative_config": {"num_speculative_tokens": 0}}, "num_speculative_tokens: "),
        ({"drafter": "a", "speculative_config": {"model": "b"}}, "named twice"),
        (
            {"speculative_config": {"method": "ngram", "model": "b"}},
            "the method ngram has no model",
        ),
        (
            {"drafter": "toy", "speculative_config": {"also_ngram": True, "verify": "block"}},
            "not block: to choose",
        ),
        ({"speculative_config": {"remember": True, "verify": "token"}}, "not token: copies"),
        (
            {"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 4}},
            "ngram_min is 5, which is above ngram",
        ),
        ({"speculative_config": {"prompt_lookup_max": 17}}, "prompt_lookup_max: "),
        (
            {"drafter": "toy", "speculative_config": {"reference": "x.py"}},
            "choose the drafter ngram or also_ngram",
        ),
        ({"reproducible": True, "speculative_config": {"num_speculative_tokens": 16}}, "is 16"),
        ({"max_model_len": 1}, "max_model_len: "),
        ({"speculative_config": "ngram"}, "speculative_config: expected a dict of method, model,"),
        ({"speculative_config": []}, "speculative_config: expected a dict of method, model,"),
        ({"speculative_config": {5: 1}}, "speculative_config has no 5; there are method"),
        ({"speculative_config": {"method": []}}, "ssd, tree, not []"),
        ({"speculative_config": {"model": 5}}, "drafter: expected a text, got 5"),
        ({"speculative_config": {"window": "wide"}}, "window: expected a whole number"),
        ({"drafter": ""}, "drafter: expected a text that is not empty"),
        ({"drafter": 5}, "drafter: expected a text, got 5"),
        ({"dtype": None}, "dtype: expected one of auto, "),
        ({"reproducible": "perhaps"}, "reproducible: expected true or false"),
        ({"target_device": 0}, "target_device: expected a text"),
        ({"max_model_len": 10**5000}, "max_model_len: "),
        ({"max_num_seqs": 0}, "max_num_seqs: expected at least 1"),
        ({"max_num_seqs": 65}, "max_num_seqs: expected at most 64"),
        ({"target_revision": ""}, "target_revision: expected a text that is not empty"),
        (
            {"drafter": "ngram", "drafter_revision": "main"},
            "drafter_revision is for a model on the hub, but n-gram drafts come from no model",
        ),
        (
            {"tensor_parallel": 2},
            "there is no setting tensor_parallel; did you mean tensor_parallel_size?",
        ),
    ],
)
def test_a_bad_setting_is_one_line_and_starts_nothing(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LLM("./nowhere", **values)
    assert line in str(caught.value)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_folder_has_no_revision(tmp_path: Path, role: str) -> None:
    values: dict[str, Any] = {"target": "a/b", "drafter": "a/b", f"{role}_revision": "main"}
    assert PairConfig(**values).target == "a/b"
    values[role] = str(tmp_path)
    rest = f"revision is for a model on the hub, but {tmp_path} is a folder; leave it out"
    with pytest.raises(ConfigurationError) as caught:
        PairConfig(**values)
    assert str(caught.value) == f"{role}_{rest}"
    with pytest.raises(ConfigurationError) as caught:
        checked(PairConfig, **values)
    assert str(caught.value) == f"--{role}-{rest}"
    with pytest.raises(ModelError, match="is a folder, which has no revision 'main'; leave it out"):
        find_checkpoint(str(tmp_path), "main")


def test_eight_texts_at_once_are_asked_for_and_one_in_reproducible_mode() -> None:
    assert PairConfig().num_seqs == 8
    assert PairConfig(reproducible=True).num_seqs == 1
    assert PairConfig(max_num_seqs=3).num_seqs == 3
    assert PairConfig(max_num_seqs=3, reproducible=True).num_seqs == 3


def test_one_string_and_nothing_stand_for_lists() -> None:
    params = SamplingParams(stop="\n", bad_words=None, stop_token_ids=[3], logit_bias={"5": -1})
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("\n",), (), (3,))
    assert params.logit_bias == {5: -1.0}
    assert SamplingParams(stop=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (flags.parse_ids, "1,x"),
        (flags.parse_biases, "5"),
        (flags.parse_biases, "5:a"),
        (flags.parse_biases, "5:1:2"),
        (flags.parse_biases, ""),
    ],
)
def test_a_bad_list_on_the_command_line_is_one_line(parse: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match="--flag: expected "):
        parse("--flag", text)
    assert flags.parse_biases("--flag", "50:-100,7:2.5") == {50: -100.0, 7: 2.5}


def test_a_bad_word_is_banned_alone_and_after_a_space() -> None:
    vocabulary = {"<": 0, "a": 1, "\u0120a": 2, "b": 3, "\u0120": 4, "ab": 5}
    tokenizer = Tokenizer(BPE(vocabulary, [("\u0120", "a"), ("a", "b")], unk_token="<"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenization = Tokenization(tokenizer)
    assert tokenization.bans(["a", " b"]) == ((1,), (2,), (3,))
    assert tokenization.bans(["ab"]) == ((5,),)  # after a space it is two tokens


def test_settings_do_not_change() -> None:
    config = PairConfig()
    for name in ("target", "no_such"):
        for change in (partial(setattr, config, name, "x"), partial(delattr, config, name)):
            with pytest.raises(ConfigurationError) as caught:
                change()
            said = f"{name}: a PairConfig does not change; make another PairConfig"
            assert str(caught.value) == said
    assert config == PairConfig()


def test_sampling_parameters_change_as_far_as_they_stay_right() -> None:
    params = SamplingParams(temperature=0.5, min_tokens=2)
    params.temperature, params.max_tokens = 0.7, None
    assert params == SamplingParams(temperature=0.7, min_tokens=2, max_tokens=None)
    for name, value in (("temperature", -1), ("max_tokens", 1), ("top_p", "x"), ("no_such", 1)):
        with pytest.raises(ConfigurationError) as caught:
            setattr(params, name, value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError):
        del params.temperature
    assert params == SamplingParams(temperature=0.7, min_tokens=2, max_tokens=None)


def test_the_api_is_loaded_when_it_is_used_and_never_loads_torch() -> None:
    code = (
        "import sys, coordinator\n"
        "assert 'coordinator.api.llm' not in sys.modules\n"
        "assert 'pydantic' not in sys.modules\n"
        "from coordinator import LLM, SamplingParams\n"
        "import coordinator.__main__\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_api_is_there_and_no_other() -> None:
    assert all(hasattr(coordinator, name) for name in coordinator.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        coordinator.Llm  # noqa: B018


def test_a_memory_comes_with_n_gram_drafts_whoever_drafts_besides() -> None:
    speculation = SpeculationConfig(remember=True)
    assert speculation.uses_ngrams(PairConfig())
    assert speculation.uses_ngrams(PairConfig(drafter=NGRAM))
    assert speculation.lookup(()).remember
    assert not SpeculationConfig(policy="ar", remember=True).uses_ngrams(PairConfig())
    assert not SpeculationConfig().uses_ngrams(PairConfig())
    assert not SpeculationConfig(also_ngram=True).lookup(()).remember


def test_a_folder_is_known_by_its_whole_path_and_a_name_stays_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "ngram"):
        (tmp_path / name).mkdir()
    config = PairConfig(target="mine", drafter="ngram", heads="./mine")
    assert (config.target, config.drafter) == (str(tmp_path / "mine"), "ngram")
    assert config.heads == str(tmp_path / "mine")
    assert PairConfig(target="organisation/model").target == "organisation/model"
    assert PairConfig().heads == ""
