"""Pairs of every family write what transformers' own `generate` writes, several texts at once."""

from pathlib import Path

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching import launcher
from coordinator.text.metrics import Metrics
from proto.messages import Role
from tests.families import FAMILIES, LENGTH, PROMPTS, USUAL, greedy_text, make_drafter, make_family
from tests.process.reference import Reference, assert_same_but_for_near_ties, generate

pytestmark = pytest.mark.process

ALONE = SpeculationConfig(policy="ar")
SYNC = SpeculationConfig(policy="sync", num_speculative_tokens=4, adaptive=False)
TREE = SpeculationConfig(policy="tree")
POLICIES = (SYNC, TREE, SpeculationConfig(policy="auto"))
SEEDED = {"temperature": 0.9, "seed": 7}
# One family of each mechanism of running states, and of short convolutions.
WITH_STATES = (
    *("bamba", "jamba", "kimi_linear", "lfm2", "minimax", "qwen3_5_text", "recurrent_gemma"),
)


def make_pair(name: str, folder: Path) -> tuple[PairConfig, Reference]:
    """Return a pair whose drafter nearly always agrees, and transformers' own target."""
    target = make_family(name, folder / "target")
    reference = Reference(target)
    text = [*PROMPTS[1], *greedy_text(reference.model, PROMPTS[1])]
    drafter = make_drafter(target, folder / "drafter", text)
    config = PairConfig(
        target=str(target),
        drafter=str(drafter),
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=len(PROMPTS),
        simulate_target_ms=4.0,  # a drafter is as large, and would else be worth no wait
    )
    return config, reference


def together(
    pair: Pair, speculation: SpeculationConfig, **wanted: float
) -> tuple[list[list[int]], list[Metrics]]:
    """Return the texts of all prompts, written at once, and what was measured."""
    streams = []
    for prompt in PROMPTS:
        params = SamplingParams(max_tokens=LENGTH - len(prompt), ignore_eos=True, **wanted)
        streams.append(pair.generate(prompt, speculation, params)[0])
    texts = [[token for chunk in stream for token in chunk.tokens] for stream in streams]
    return texts, [stream.result.metrics for stream in streams if stream.result is not None]


def check_greedy(
    pair: Pair, reference: Reference, wanted: list[list[int]], speculation: SpeculationConfig
) -> None:
    """Compare the greedy texts with those of transformers; some drafts must be accepted."""
    texts, metrics = together(pair, speculation, temperature=0)
    num_ties = 0
    for prompt, want, got in zip(PROMPTS, wanted, texts, strict=True):
        assert len(set(want)) > 8, "a text that repeats itself shows little"
        what = f"{speculation.policy}, a prompt of {len(prompt)}"
        num_ties += not assert_same_but_for_near_ties(reference, prompt, want, got, what)
    assert num_ties <= 1
    num_accepted = sum(one.num_accepted_tokens for one in metrics)
    if speculation.policy == "sync":
        num_drafts = sum(one.num_draft_tokens for one in metrics)
        assert num_drafts / 2 <= num_accepted < num_drafts, "most are accepted, some rolled back"
    assert num_accepted > 0 or speculation.policy == "auto", "speculation is dead"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in USUAL else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_texts_at_once_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, reference = make_pair(name, tmp_path)
    wanted = [greedy_text(reference.model, prompt) for prompt in PROMPTS]
    with Pair(config) as pair:
        assert (pair.max_len, pair.num_seqs) == (LENGTH, len(PROMPTS))
        for speculation in (SYNC, TREE) if name in USUAL else POLICIES:
            check_greedy(pair, reference, wanted, speculation)
        alone, _ = together(pair, ALONE, **SEEDED)
        for speculation in (TREE,) if name in USUAL else POLICIES:
            assert together(pair, speculation, **SEEDED)[0] == alone


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_STATES)
def test_a_drafter_that_is_killed_in_the_middle_changes_no_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(make_family(name, tmp_path))
    config = PairConfig(
        target=target,
        drafter=target,
        dtype="float32",
        max_model_len=LENGTH,
        simulate_target_ms=4.0,
        drafter_restarts=0,
    )
    monkeypatch.setitem(launcher.MODULES, Role.DRAFTER, "tests.process.failing_drafter")
    monkeypatch.setenv("SLIPSTREAM_TEST_FAILURE", "killed run")
    prompt = PROMPTS[1]
    greedy = SamplingParams(max_tokens=LENGTH - len(prompt), ignore_eos=True)
    with Pair(config) as pair:
        got = generate(pair, prompt, SYNC, greedy)  # it waits for drafts, however busy the machine
        assert 0 < (got.metrics.drafter_lost_at or 0) < len(got.tokens)
        assert got.metrics.num_accepted_tokens > 0
        assert pair.pids().keys() == {"target"}
        assert got.tokens == generate(pair, prompt, ALONE, greedy).tokens
    assert len(got.tokens) == LENGTH - len(prompt)
