"""Flags made of the fields of settings."""

import inspect
import re
from pathlib import Path
from typing import Annotated

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.launch import LaunchConfig
from coordinator.api.params import SamplingParams
from coordinator.api.replicas import ReplicasConfig
from coordinator.api.structured import StructuredOutputsParams
from coordinator.cli.flags import FORMS, Command, Flags, with_settings
from coordinator.cli.generate import generate, structured
from coordinator.cli.help import METAVARS, OF_CONFIG, OF_NAME
from coordinator.http.settings import ServeConfig
from proto.errors import ConfigurationError

CONFIGS = (PairConfig, SpeculationConfig, SamplingParams, LaunchConfig)


def called(command: Command, *arguments: str) -> None:
    app = typer.Typer()
    app.command()(with_settings(command))
    app(list(arguments), standalone_mode=False)


def test_generate_has_a_flag_with_help_and_default_for_every_setting() -> None:
    flags = inspect.signature(generate).parameters
    for kind in CONFIGS:
        for name, field in kind.model_fields.items():
            assert field.description, f"{name} has no help"
            if name in ("speculate", "structured_outputs", "output_kind"):  # --policy, --regex ...
                assert name not in flags
                continue
            default = field.get_default(call_default_factory=True)
            assert flags[name].default == (default if default not in ((), {}) else None)
    assert all(field.description for field in ServeConfig.model_fields.values())
    kinds = (*CONFIGS, ServeConfig, ReplicasConfig)
    fields = {name for kind in kinds for name in kind.model_fields}
    assert {*FORMS, *OF_NAME, *METAVARS} <= fields
    assert {kind.__name__ for kind in kinds} == set(OF_CONFIG)


def test_what_is_given_comes_as_configs_and_what_is_not_has_its_default() -> None:
    seen: list[BaseModel] = []

    def command(
        *, pair: PairConfig, request: SamplingParams, speculation: SpeculationConfig
    ) -> None:
        seen.extend((pair, request, speculation))

    called(command)
    assert seen == [PairConfig(), SamplingParams(), SpeculationConfig()]
    seen.clear()
    texts = ("--stop", "a", "--stop", "b", "--stop-token-ids", "7,8", "--logit-bias", "5:-1,6:2")
    called(command, "--dtype", "float32", "--no-adaptive", "--reproducible", "--seed", "3", *texts)
    assert seen == [
        PairConfig(dtype="float32", reproducible=True),
        SamplingParams(seed=3, stop=("a", "b"), stop_token_ids=(7, 8), logit_bias={5: -1, 6: 2}),
        SpeculationConfig(adaptive=False),
    ]


def test_a_command_may_have_some_fields_and_defaults_of_its_own() -> None:
    seen: list[PairConfig] = []

    flags = Flags("dtype", "backend", dtype="float32", max_num_seqs=1)

    def command(*, pair: Annotated[PairConfig, flags]) -> None:
        seen.append(pair)

    called(command, "--backend", "fused")
    assert seen == [PairConfig(dtype="float32", backend="fused", max_num_seqs=1)]
    with pytest.raises(typer.TyperException, match="--max-model-len"):
        called(command, "--max-model-len", "8")


def test_a_field_refuses_a_value_by_the_name_of_its_flag() -> None:
    def command(*, request: SamplingParams) -> None:
        raise AssertionError(request)

    with pytest.raises(ConfigurationError, match=r"^--top-p: expected at most"):
        called(command, "--top-p", "2")
    with pytest.raises(ConfigurationError, match=r"^--logit-bias: expected biases like"):
        called(command, "--logit-bias", "5")


def test_options_of_a_policy_are_numbers_by_name() -> None:
    seen: list[SpeculationConfig] = []

    def command(*, speculation: SpeculationConfig) -> None:
        seen.append(speculation)

    called(command, "--policy-option", "width=2, min-score=-1.5,subtree=0")
    assert seen[0].policy_option == {"width": 2.0, "min_score": -1.5, "subtree": 0.0}
    for given, why in (
        ("wide=2", "there is no 'wide'; there are "),
        ("width=99", "width is a whole number in 1..16, not 99"),
        ("width=1.5", "width is a whole number in 1..16, not 1.5"),
        ("width=nan", "width is a whole number in 1..16, not nan"),
        ("width", "expected numbers like width=4,branches=3, got 'width'"),
        ("width=many", "expected numbers like width=4,branches=3, got 'width=many'"),
    ):
        with pytest.raises(ConfigurationError, match=f"^--policy-option: {re.escape(why)}"):
            called(command, "--policy-option", given)
    with pytest.raises(ConfigurationError, match=r"^policy_option: there is no 'wide'"):
        SpeculationConfig(policy_option={"wide": 2})


def test_the_help_says_what_the_field_says() -> None:
    app = typer.Typer()
    app.command()(generate)
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.replace("│", " ").split())
    assert "sync: draft K tokens, then wait until the target has verified them." in shown
    assert "ID:BIAS,..." in shown
    assert "--adaptive" in shown
    assert "--no-adaptive" in shown


def test_flags_say_what_an_answer_must_look_like(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    given = SamplingParams(temperature=0.5, seed=3)
    made = structured(given, file, None)
    assert made.structured_outputs == StructuredOutputsParams(json='{"type": "object"}')
    assert made.model_copy(update={"structured_outputs": None}) == given
    pattern = structured(given, None, "a+").structured_outputs
    assert pattern == StructuredOutputsParams(regex="a+")
    assert structured(given, None, None) is given
    with pytest.raises(ConfigurationError, match="has one form: give --json-schema or --regex"):
        structured(given, file, "a+")
    with pytest.raises(ConfigurationError, match="cannot read"):
        structured(given, tmp_path / "none", None)
