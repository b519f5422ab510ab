"""Settings that do nothing where they are given, or count as another value, are told in a line."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import naming_flags
from coordinator.api.launch import LaunchConfig
from coordinator.api.params import SamplingParams
from coordinator.api.without_effect import (
    OF_DRAFT_STEPS,
    OF_MODELS,
    OF_THE_DRAFTER,
    of_devices,
    without_effect,
)
from proto.installation import MODELS
from proto.messages import Hello

MEDUSA, EAGLE = str(MODELS / "medusa"), str(MODELS / "eagle")
TOY = str(MODELS / "target")

NOT_HEEDED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"drafter": MEDUSA, "drafter_device": "cpu:1"},
        {"policy": "ar", "num_speculative_tokens": 4, "adaptive": False},
        [
            "--num-speculative-tokens, --no-adaptive, --drafter, --drafter-device have "
            "no effect: nothing is drafted (--policy ar)"
        ],
    ),
    (
        {"drafter": "ngram", "drafter_dtype": "float32", "simulate_draft_ms": 5.0},
        {"window": 8},
        [
            "--drafter-dtype, --simulate-draft-ms, --window have no effect: nothing runs "
            "beside the target's process: the drafter ngram is no model"
        ],
    ),
    (
        {"drafter": MEDUSA, "drafter_restarts": 0, "simulate_draft_ms": 5.0},
        {},
        [
            "--drafter-restarts has no effect: nothing runs beside the target's process: the "
            "drafter runs in it"
        ],
    ),
    (
        {
            "target": TOY,
            "drafter_home": "target",
            "drafter_dtype": "float32",
            "drafter_device": "cpu",
        },
        {},
        [
            "--drafter-device has no effect: nothing runs beside the target's process: the drafter "
            "runs in it"
        ],
    ),
    (
        {"drafter": "ngram", "link": ("drafter:delay=5ms",)},
        {},
        [
            "--link has no effect: nothing runs beside the target's process: the drafter ngram "
            "is no model"
        ],
    ),
    (
        {},
        {"ngram_max": 6},
        ["--ngram-max has no effect: nothing is copied; --also-ngram or --drafter ngram does that"],
    ),
    (
        {},
        {"policy": "sync", "window": 8, "adaptive": False},
        [
            "--window has no effect: under --policy sync the drafter waits for each verdict",
            "--no-adaptive has no effect: --policy sync weighs no measured costs",
        ],
    ),
    (
        {},
        {"policy": "tree", "window": 4, "num_speculative_tokens": 8},
        ["--window 4 counts as 8: it is never below --num-speculative-tokens"],
    ),
    (
        {},
        {"policy": "tree", "policy_option": {"launch_min": 20.0}},
        [
            "--policy-option launch_min=20 counts as 8: no pass has more drafts "
            "(--num-speculative-tokens)"
        ],
    ),
    (
        {"max_draft_candidates": 8},
        {},
        ["--max-draft-candidates has no effect: only --verify token and block use it"],
    ),
    (
        {},
        {"policy": "tree", "verify": "token"},
        [
            "a chain is drafted and no tree, in spite of --policy tree: --verify token can "
            "judge a chain only"
        ],
    ),
    (
        {},
        {"policy_option": {"width": 3.0}, "verify": "block"},
        [
            "a chain is drafted and no tree, in spite of --policy-option width: --verify block "
            "can judge a chain only"
        ],
    ),
    ({"link_seed": 3}, {}, ["--link-seed has no effect: there is no --link"]),
]


def told(
    pair: dict[str, Any], speculation: dict[str, Any], params: dict[str, Any] | None = None
) -> list[str]:
    configs = PairConfig(**pair), SpeculationConfig(**speculation)
    with naming_flags():
        return without_effect(*configs, SamplingParams(**(params or {})))


@pytest.mark.parametrize(("pair", "speculation", "lines"), NOT_HEEDED)
def test_what_is_not_heeded_is_told(
    pair: dict[str, Any], speculation: dict[str, Any], lines: list[str]
) -> None:
    assert told(pair, speculation) == lines


@pytest.mark.parametrize(
    ("pair", "speculation"),
    [
        ({}, {}),
        ({}, {"policy": "ar"}),
        ({"drafter": "ngram"}, {"ngram_max": 6, "ngram_min": 3}),
        ({}, {"remember": True, "ngram_max": 6}),
        ({"drafter": EAGLE, "simulate_draft_ms": 5.0, "drafter_device": "cpu:1"}, {}),
        ({"max_draft_candidates": 8}, {"policy": "sync", "verify": "token"}),
        ({}, {"verify": "token"}),
        ({}, {"policy": "tree", "window": 16, "policy_option": {"launch_min": 4.0, "width": 8.0}}),
        ({}, {"adaptive": False}),
        ({"link_seed": 3, "link": ("drafter:delay=5ms",)}, {}),
    ],
)
def test_what_is_heeded_is_not_told(pair: dict[str, Any], speculation: dict[str, Any]) -> None:
    assert told(pair, speculation) == []


def test_who_samples_greedily_is_told_which_cuts_do_nothing() -> None:
    line = (
        "--top-k, --top-p have no effect: at --temperature 0 the likeliest token is taken; raise "
        "it to sample"
    )
    assert told({}, {}, {"top_k": 40, "top_p": 0.9}) == [line]
    assert told({}, {}, {"top_k": 40, "temperature": 0.7}) == []
    assert told({}, {}, {"seed": 7}) == []  # the text of a seed is always the same


def test_programs_are_told_the_names_of_fields() -> None:
    config = SpeculationConfig(policy="sync", adaptive=False)
    assert without_effect(PairConfig(), config) == [
        "adaptive has no effect: policy sync weighs no measured costs"
    ]


def test_nodes_that_are_started_by_hand_are_not_started_again() -> None:
    assert LaunchConfig(nodes="remote", listen="tcp://127.0.0.1:5570").nodes == "remote"
    lines = without_effect(
        PairConfig(drafter_restarts=1), SpeculationConfig(), None, is_remote=True
    )
    assert lines == ["drafter_restarts has no effect: nodes are started by hand"]


def test_every_setting_of_a_drafter_is_one_of_the_pair() -> None:
    """A new one has to be named there."""
    names = {name for name in PairConfig.model_fields if name.startswith("drafter")}
    assert names <= {*OF_MODELS, *OF_THE_DRAFTER, *OF_DRAFT_STEPS}


def test_a_placement_among_cores_does_nothing_on_a_gpu() -> None:
    gpu, cores = (cast(Hello, SimpleNamespace(device=name)) for name in ("cuda:0", "cpu:0-6"))
    shared = PairConfig(placement="shared")
    with naming_flags():
        wanted = ["--placement has no effect: the target runs on cuda:0"]
        assert of_devices(shared, gpu, []) == wanted
    assert of_devices(shared, cores, []) == of_devices(PairConfig(), gpu, []) == []


@pytest.mark.parametrize("home", ["own", "target"])
def test_a_head_that_is_to_be_rounded_on_a_gpu_is_not_and_that_is_said(home: Any) -> None:
    gpu, cores = (cast(Hello, SimpleNamespace(device=name)) for name in ("cuda:0", "cpu:0-6"))
    asked = PairConfig(drafter=EAGLE, drafter_home=home, drafter_quantization="int4")
    places = (gpu, [cores]) if home == "target" else (cores, [gpu])
    with naming_flags():
        wanted = ["--drafter-quantization has no effect: the head runs on cuda:0"]
        assert of_devices(asked, *places) == wanted
    assert of_devices(asked, cores, [cores]) == []
    assert of_devices(PairConfig(drafter=EAGLE, drafter_home=home), *places) == []
