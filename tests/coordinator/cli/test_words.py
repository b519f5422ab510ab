"""Settings that are written as flags are read again as the same settings."""

from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.params import SamplingParams
from coordinator.api.replicas import ReplicasConfig
from coordinator.cli.flags import Command, with_settings
from coordinator.cli.words import words_of
from coordinator.http.settings import ServeConfig
from proto.errors import ConfigurationError

CHANGED: list[BaseModel] = [
    PairConfig(),
    PairConfig(target="toy", drafter="ngram", dtype="float32", max_num_seqs=3, targets=2),
    PairConfig(
        link=("drafter:delay=5ms", "target:loss=1%"), reproducible=True, require_same_tokenizer=True
    ),
    PairConfig(gpu_memory_utilization=0.5, busy_poll_us=0, keep_speeds=False),
    SpeculationConfig(policy="tree", num_speculative_tokens=3, adaptive=False),
    SpeculationConfig(policy="tree", policy_option={"branches": 2.0, "width": 4.0}),
    ServeConfig(host="0.0.0.0", port=1, allow_origin=("https://a.example", "https://b.example")),
    ServeConfig(api_key_file=Path("keys"), max_queue=0, insecure=True, drain_timeout_s=1.5),
    SamplingParams(stop=("a", "b"), stop_token_ids=(7, 8), logit_bias={5: -1.0}, seed=0),
    ReplicasConfig(ray_serve=True, replicas=2, max_replicas=3, replica_gpus=0, replica_cpus=0.5),
]


def read(kind: type[BaseModel], words: list[str]) -> BaseModel:
    """What a command that has flags for this config is called with."""
    seen: list[BaseModel] = []

    def command(*, config: BaseModel) -> None:
        seen.append(config)

    command.__annotations__["config"] = kind
    made: Command = with_settings(command)
    app = typer.Typer()
    app.command()(made)
    app(words, standalone_mode=False)
    (config,) = seen
    return config


@pytest.mark.parametrize("config", CHANGED, ids=lambda one: type(one).__name__)
def test_what_is_written_is_read_again(config: BaseModel) -> None:
    words = words_of(config)
    assert read(type(config), words) == config
    assert words or config == type(config)()


def test_what_is_left_out_is_not_written() -> None:
    config = ServeConfig(host="0.0.0.0", port=1, max_queue=2)
    assert words_of(config, but=("host", "port")) == ["--max-queue", "2"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"replicas": 2}, "--replicas is for --ray-serve"),
        ({"replica_gpus": 0}, "--replica-gpus is for --ray-serve"),
        ({"ray_serve": True, "replicas": 3, "max_replicas": 2}, "2 is fewer than --replicas 3"),
    ],
)
def test_replicas_are_for_ray_serve(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        ReplicasConfig.model_validate(given)
