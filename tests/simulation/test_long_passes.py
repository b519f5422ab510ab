"""A pass may take as long as it takes: no text is told anew while its target works."""

from dataclasses import replace
from random import Random

import pytest

from coordinator.cluster.link import Link
from proto.messages import Limits
from proto.policies import POLICIES
from rehearsal.setting import Forwards, NodeCosts, Setting, Text
from tests.simulation.pauses import Case, Run
from tests.simulation.toys import ToyModel

PASS_S, STEP_S, NUM_TOKENS = 9.0, 0.5, 12
NEAR = Link(0.001, 0.0, 0.0, False)
MODEL = ToyModel(salt=1, vocab_size=50, agreement=1.0, num_children=2)


def case_of(policy: str, lengths: tuple[int, ...], *, blocking: bool) -> Case:
    """Texts with prompts of these lengths at a target whose every pass takes PASS_S."""
    random = Random(0)
    prompts = [tuple(random.choices(range(50), k=length)) for length in lengths]
    setting = Setting(
        policy=POLICIES[policy].make(4, 16),
        texts=tuple(Text(prompt, Limits(len(prompt) + NUM_TOKENS, ())) for prompt in prompts),
        target=NodeCosts(Forwards(((1, PASS_S),)), timed_rows=(1, 2, 4, 8)),
        drafter=NodeCosts(Forwards(((1, STEP_S),)), timed_rows=(1, 2, 4)),
        max_num_seqs=len(prompts),
        drafter_lanes=len(prompts),
        submit_every_s=0.0,
        blocking=blocking,
    )
    return Case(0, setting, MODEL, NEAR, limit_s=10_000.0)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("policy", ["ar", "sync", "pipelined", "auto", "tree"])
def test_a_prompt_of_many_long_passes_is_told_once(policy: str, *, blocking: bool) -> None:
    run = Run(case_of(policy, (1900,), blocking=blocking))
    run.run()
    assert run.timeline.now > 60.0, "more than a minute goes by before the first token"
    assert run.sessions[0].counts.num_reopened == 0
    assert run.num_accepted or not POLICIES[policy].drafts


@pytest.mark.parametrize("blocking", [False, True])
def test_texts_that_wait_for_the_passes_of_others_are_told_once(*, blocking: bool) -> None:
    run = Run(case_of("pipelined", (1900, 700, 5, 1200), blocking=blocking))
    run.run()
    assert [session.counts.num_reopened for session in run.sessions] == [0] * 4
    assert run.num_accepted


def test_what_is_lost_between_long_passes_is_told_again_and_no_text_fails() -> None:
    for seed in range(6):
        case = case_of("pipelined", (1900, 700), blocking=bool(seed % 2))
        run = Run(replace(case, seed=seed, link=Link(0.05, 0.02, 0.1, bool(seed % 3))))
        run.run()
        assert run.num_accepted
