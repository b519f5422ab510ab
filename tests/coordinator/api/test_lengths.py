"""What is said of a prompt that has no room: never to do what cannot be done."""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.models.lengths import (
    cut_answers,
    how_longer,
    longest_of,
    not_smaller,
    too_long,
)
from coordinator.api.params import MAX_TOKENS, SamplingParams
from proto.messages import Hello


def model(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions", "n_ctx"])
def test_the_models_own_limit_is_known_by_whatever_name_it_has(tmp_path: Path, name: str) -> None:
    target = model(tmp_path, **{name: 512})
    assert longest_of(target, None) == 512
    line = too_long(PairConfig(target=target), 600, 512)
    assert line == "the model itself takes 512 at most, with the answer; shorten it"


@pytest.mark.parametrize("max_len", [100, 512])
def test_a_prompt_beyond_the_models_own_limit_is_not_advised_to_raise_it(
    tmp_path: Path, max_len: int
) -> None:
    config = PairConfig(target=model(tmp_path, n_ctx=512), max_model_len=max_len)
    assert "--max-model-len" not in too_long(config, 512, max_len)


def test_whoever_asked_for_little_is_told_how_much_there_could_be(tmp_path: Path) -> None:
    config = PairConfig(target=model(tmp_path, n_ctx=512), max_model_len=100)
    assert too_long(config, 200, 100) == (
        "texts have 100 at most here, with the answer; shorten it, or raise --max-model-len (the "
        "model takes 512)"
    )
    assert how_longer(config, 512) == ""


def test_where_nobody_asked_for_little_it_is_the_memory_or_the_heads(tmp_path: Path) -> None:
    config = PairConfig(target=model(tmp_path, n_ctx=512))
    assert how_longer(config, 100) == "ask for more with --max-model-len (the model takes 512)"
    assert how_longer(config, 100, has_heads=True).startswith("leave out the heads")
    rounded = PairConfig(target=model(tmp_path, n_ctx=9999), reproducible=True)
    assert how_longer(rounded, 4096) == "raise --max-model-len (the model takes 9999)"


def test_a_longrope_takes_more_where_it_is_asked_for(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    target = model(tmp_path, model_type="phi3", n_ctx=512, rope_parameters=rope)
    raised = "raise --max-model-len (the model takes 512)"
    assert how_longer(PairConfig(target=target), 64) == raised
    assert how_longer(PairConfig(target=target, max_model_len=60), 60) == raised
    assert how_longer(PairConfig(target=target, max_model_len=512), 512) == ""


def test_of_a_model_that_says_nothing_no_limit_is_named(tmp_path: Path) -> None:
    config = PairConfig(target=model(tmp_path), max_model_len=100)
    assert too_long(config, 200, 100).endswith("; shorten it, or raise --max-model-len")


def test_whoever_asks_for_more_than_fits_is_told_where_an_answer_ends() -> None:
    params = SamplingParams(max_tokens=4096)
    assert cut_answers(params, 2048, [12], "raise it") == [
        "max_tokens 4096 is more than fits: prompt and answer have 2048 tokens together, so an "
        "answer ends after 2036 at the latest; raise it"
    ]
    (line,) = cut_answers(params, 4100, [4, 5, 90])
    assert "more than fits after 2 of 3 prompts" in line
    assert line.endswith("ends after 4010 at the latest")


@pytest.mark.parametrize("max_tokens", [128, MAX_TOKENS, None, 36])
def test_who_asks_for_no_length_or_for_one_that_fits_is_told_nothing(
    max_tokens: int | None,
) -> None:
    assert cut_answers(SamplingParams(max_tokens=max_tokens), 48, [12]) == []


def hello(num_parameters: int, **more: Any) -> Hello:
    values: dict[str, Any] = {one.name: None for one in fields(Hello) if one.default is MISSING}
    return Hello(**{**values, **more, "num_parameters": num_parameters})


def test_a_drafter_that_is_not_smaller_than_its_target_is_told() -> None:
    large, small = hello(8_030_000_000), hello(918_144)
    assert not_smaller(large, [small]) == []
    (line,) = not_smaller(small, [large, small])
    assert line.startswith(
        "the drafter (8.03 billion parameters) is not smaller than the target (0.918 million): "
    )
    assert not_smaller(small, [small]) != []
    assert not_smaller(small, []) == []


def test_a_head_or_a_simulated_device_says_nothing_of_time() -> None:
    large, small = hello(8_030_000_000), hello(918_144)
    assert not_smaller(small, [hello(8_030_000_000, layers=(-1,))]) == []
    assert not_smaller(small, [hello(8_030_000_000, simulated_us=5)]) == []
    assert not_smaller(hello(918_144, simulated_us=5), [large]) == []
