"""A token whose numbers are not finite: its text ends, if it needs them, and no other changes.

The models are small and random. One token's embedding is NaN, and so are its keys and values, and
all that meets them, masked or not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.checkpoint.model import load_model
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from proto.messages import (
    Close,
    Draft,
    Fault,
    FaultCode,
    Heartbeat,
    Limits,
    Open,
    Policy,
    PromptLogprobs,
    Proposal,
    Rule,
    SamplingSpec,
    SessionMark,
    Verdict,
)
from proto.policies import POLICIES
from tests.engine.forward.test_graphs import recordings  # noqa: F401 (a fixture)
from tests.policies import autoregressive, pipelined
from tests.target_node.real import RealTarget
from tests.texts import draft, name, opening
from tests.tiny_models import make_model

BAD = 127  # no token of the texts that are checked at load
NUM_LANES, CAPACITY, NUM_NEW = 3, 256, 12
ALONE, PIPELINED = autoregressive(), pipelined(6, 16)
PROMPT = tuple(range(3, 51))
OTHER = tuple(range(100, 60, -1))
ROWS = (1, 7)

Make = Callable[..., RealTarget]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["reference", "fused", pytest.param("graphs", marks=pytest.mark.long)])
def target(request: pytest.FixtureRequest, folder: Path, recordings: list[int]) -> Make:  # noqa: F811
    """Make a target; `is_bad`: with the token that is not finite."""

    def make(*, is_bad: bool = True, num_lanes: int = NUM_LANES) -> RealTarget:
        return RealTarget(executor(folder, request.param, is_bad=is_bad, num_lanes=num_lanes))

    return make


def executor(
    folder: Path, backend: str, *, is_bad: bool, num_lanes: int = NUM_LANES
) -> ModelExecutor:
    loaded = load_model(str(folder), dtype="float32")
    if is_bad:
        with torch.no_grad():
            loaded.model.get_input_embeddings().weight[BAD] = math.nan
    rows = ROWS if backend == "graphs" else ()
    return make_executor(loaded, CAPACITY, num_lanes=num_lanes, backend=backend, row_counts=rows)


def asked(
    tokens: Sequence[int],
    session: int = 1,
    policy: Policy = ALONE,
    sampling: SamplingSpec | None = None,
    rule: Rule = Rule.COUPLED,
    num_new: int = NUM_NEW,
) -> Open:
    limits = Limits(len(tokens) + num_new, ())
    opened = opening(*tokens, session=session, policy=policy, limits=limits)
    return replace(opened, sampling=sampling or SamplingSpec(), rule=rule)


def text_of(target: RealTarget, session: int = 1) -> tuple[int, ...]:
    """What it has written, each token once."""
    made: dict[int, int] = {}
    for message in target.sent:
        if isinstance(message, Verdict) and message.session == session:
            made.update(enumerate(message.tokens, message.base_len))
    return tuple(made[position] for position in sorted(made))


def faults_of(target: RealTarget) -> list[Fault]:
    return [message for message in target.sent if isinstance(message, Fault)]


def check_ended(target: RealTarget, position: int, session: int = 1) -> None:
    """Only this text has ended, with a line that names the position."""
    (fault,) = faults_of(target)
    assert (fault.session, fault.code) == (session, FaultCode.FAILED)
    assert f"not finite at token position {position} (from 0, prompt included)" in fault.detail


def is_clean(target: RealTarget) -> bool:
    lanes = range(target.executor.lanes.count)
    return all(target.executor.not_finite(lane) is None for lane in lanes)


def written(target: RealTarget, opened: Open) -> tuple[int, ...]:
    """A text by a target that is asked for nothing else."""
    target.hear(opened)
    target.run()
    assert not faults_of(target)
    made = text_of(target, opened.session)
    assert len(made) == opened.limits.max_len - len(opened.tokens)
    return made


def test_a_draft_that_is_rejected_ends_nothing(target: Make) -> None:
    want = written(target(is_bad=False), asked(PROMPT))
    assert BAD not in want
    tested = target()
    tested.hear(asked(PROMPT, policy=PIPELINED))
    tested.turn()
    tested.turn()
    base = (*PROMPT, *text_of(tested))
    made = len(base) - len(PROMPT)
    tested.hear(draft(base, *want[made : made + 2], BAD, want[made + 2]))
    tested.turn()
    (last,) = tested.sent[-1:]
    assert isinstance(last, Verdict)
    assert (last.num_drafted, last.num_accepted) == (4, 2)
    assert last.tokens == want[made : made + 3]
    tested.run()
    assert (text_of(tested), faults_of(tested)) == (want, [])
    assert is_clean(tested)


def test_bad_branches_of_a_tree_spoil_no_other_branch(target: Make) -> None:
    want = written(target(is_bad=False), asked(PROMPT))
    tested = target()
    tested.hear(asked(PROMPT, policy=POLICIES["tree"].make(8, 16)))
    tested.turn()
    tested.turn()
    base = (*PROMPT, *text_of(tested))
    made = len(base) - len(PROMPT)
    one, two = want[made : made + 2]
    tree = Draft(
        *(1, 1, 0, 1, 1, name(*base), len(base)),
        tokens=(BAD, one, 7, BAD, two),
        parents=(-1, -1, 0, 1, 1),
        scores=(-0.1, -0.2, -0.3, -0.1, -0.4),
        done=True,
        model_us=0,
    )
    tested.hear(tree)
    tested.turn()
    (last,) = tested.sent[-1:]
    assert isinstance(last, Verdict)
    assert (last.num_drafted, last.tokens) == (5, want[made : made + 3])
    tested.run()
    assert (text_of(tested), faults_of(tested)) == (want, [])


@pytest.mark.parametrize("where", [1, 20, len(PROMPT) - 1])
def test_a_prompt_with_such_a_token_ends_and_the_texts_beside_it_go_on(
    target: Make, where: int
) -> None:
    want = written(target(is_bad=False), asked(OTHER, 2))
    tested = target()
    tested.hear(asked(OTHER, 2), asked((*PROMPT[:where], BAD, *PROMPT[where + 1 :])))
    tested.run()
    check_ended(tested, where)
    assert (text_of(tested), text_of(tested, 2)) == ((), want)
    assert is_clean(tested)


def test_the_next_text_in_the_lane_is_what_it_would_be_anywhere(target: Make) -> None:
    want = written(target(is_bad=False, num_lanes=1), asked(PROMPT, 2))
    tested = target(num_lanes=1)
    tested.hear(asked((*PROMPT[:40], BAD, *PROMPT[41:])))
    tested.run()
    check_ended(tested, 40)
    tested.sent.clear()
    tested.hear(Close(1, "failed"), asked(PROMPT, 2))
    tested.run()
    assert (text_of(tested, 2), faults_of(tested)) == (want, [])


@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_a_text_that_was_left_while_it_was_read_does_not_spoil_the_next(
    target: Make, num_turns: int
) -> None:
    """Nobody has seen any logits of it."""
    want = written(target(is_bad=False, num_lanes=1), asked(PROMPT, 2))
    tested = target(num_lanes=1)
    tested.hear(asked((*PROMPT[:36], BAD, *PROMPT[37:], *OTHER, *OTHER)))
    for _ in range(num_turns):
        tested.turn()
    tested.hear(Close(1, "cancelled"), asked(PROMPT, 2))
    tested.run()
    assert (text_of(tested, 2), faults_of(tested)) == (want, [])
    assert is_clean(tested)


def test_a_text_that_begins_alike_is_not_spoilt_by_what_it_copies(target: Make) -> None:
    """The chunk of a prompt that has such a token makes all of its rows NaN, also those before."""
    long = (*PROMPT, *OTHER)
    want = written(target(is_bad=False), asked(long, 2))
    tested = target()
    spoilt = (*long[:60], BAD, *long[61:], *OTHER)
    tested.hear(asked(spoilt, 5))  # a later text, so that the other does not wait for it
    tested.turn()
    tested.turn()
    tested.hear(asked(long, 2))
    tested.run()
    assert any(copy.length > 32 for copy in tested.copies), "nothing was copied"
    check_ended(tested, 60, session=5)
    assert text_of(tested, 2) == want
    assert is_clean(tested)


def test_a_text_that_chooses_such_a_token_ends_with_it(target: Make) -> None:
    sampling = SamplingSpec(bias_ids=(BAD,), bias_values=(100.0,), min_tokens=3, late_ids=(BAD,))
    want = written(target(is_bad=False), asked(PROMPT, sampling=sampling, num_new=4))
    beside = written(target(is_bad=False), asked(OTHER, 2))
    tested = target()
    tested.hear(asked(PROMPT, sampling=sampling), asked(OTHER, 2))
    tested.run()
    check_ended(tested, len(PROMPT) + 3)
    assert text_of(tested) == want
    assert want[-1] == BAD
    assert text_of(tested, 2) == beside
    assert [1, 2] in tested.passes or [2, 1] in tested.passes


def test_such_a_token_may_end_a_text(target: Make) -> None:
    sampling = SamplingSpec(bias_ids=(BAD,), bias_values=(100.0,))
    opened = asked(PROMPT, sampling=sampling, policy=PIPELINED)
    tested = target()
    tested.hear(replace(opened, limits=Limits(len(PROMPT) + 5, (BAD,))), asked(OTHER, 2))
    tested.run()
    assert (text_of(tested), faults_of(tested)) == ((BAD,), [])


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TOKEN])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_draft_that_ends_its_text_is_read_anew_by_the_text_that_goes_on_from_there(
    target: Make, num_lanes: int, rule: Rule
) -> None:
    """What it wrote has been wiped: a next text that took its slot for read would go on from zeros,
    and so would one in another lane that copied it.
    """
    sampled = rule is not Rule.COUPLED
    sampling = SamplingSpec(float(sampled), bias_ids=(BAD,), bias_values=(100.0,))
    opened = asked(PROMPT, policy=PIPELINED, sampling=sampling, rule=rule)
    opened = replace(opened, limits=Limits(len(PROMPT) + NUM_NEW, (BAD,)))
    opened = replace(opened, sampling=replace(sampling, min_tokens=1, late_ids=(BAD,)))
    tested = target(num_lanes=num_lanes)
    tested.hear(opened)
    tested.turn()
    tested.turn()
    base = (*PROMPT, *text_of(tested))
    certain = (Proposal((BAD,), (1.0,)),) if sampled else ()
    tested.hear(replace(draft(base, BAD), proposals=certain))
    tested.run()
    (last,) = tested.sent[-1:]
    assert isinstance(last, Verdict)
    assert (last.tokens, last.num_accepted) == ((BAD,), 1)
    tested.sent.clear()
    if num_lanes == 1:
        tested.hear(Close(1, "done"))
    tested.hear(asked((*base, BAD, *OTHER), 2))
    tested.run()
    assert (len(tested.copies) > 0) == (num_lanes > 1)
    assert text_of(tested, 2) == ()
    check_ended(tested, len(base), session=2)


def test_a_good_draft_that_ends_its_text_stays_read(target: Make) -> None:
    sampling = SamplingSpec(bias_ids=(9,), bias_values=(100.0,), min_tokens=1, late_ids=(9,))
    opened = asked(PROMPT, policy=PIPELINED, sampling=sampling)
    tested = target(num_lanes=1)
    tested.hear(replace(opened, limits=Limits(len(PROMPT) + NUM_NEW, (9,))))
    tested.turn()
    tested.turn()
    base = (*PROMPT, *text_of(tested))
    tested.hear(draft(base, 9))
    tested.run()
    assert text_of(tested)[-1] == 9
    tested.hear(Close(1, "done"))
    following = (*base, 9, *OTHER)
    assert tested.lanes.take(following, b"another").num_cached_of(following) == len(base) + 1


def test_an_accepted_draft_is_committed_before_its_text_ends(target: Make) -> None:
    sampling = SamplingSpec(bias_ids=(BAD,), bias_values=(100.0,), min_tokens=3, late_ids=(BAD,))
    want = written(target(is_bad=False), asked(PROMPT, sampling=sampling, num_new=4))
    tested = target()
    tested.hear(asked(PROMPT, policy=PIPELINED, sampling=sampling))
    tested.turn()
    tested.turn()
    base = (*PROMPT, *text_of(tested))
    tested.hear(draft(base, *want[len(base) - len(PROMPT) :], 5))
    tested.run()
    check_ended(tested, len(PROMPT) + 3)
    assert text_of(tested) == want


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_under_the_classical_rules_the_chain_ends_with_such_a_draft(
    target: Make, rule: Rule
) -> None:
    """A biased target chooses the first drafts for certain, and that one, and then nothing."""
    ids, values = (7, BAD), (200.0, 100.0)
    sampling = SamplingSpec(1.0, bias_ids=ids, bias_values=values, banned=((7, 7),))
    tested = target()
    opened = asked(PROMPT, policy=PIPELINED, sampling=sampling, rule=rule)
    tested.hear(opened)
    tested.turn()
    tested.turn()
    assert text_of(tested) == (7,)
    base = (*PROMPT, 7)
    certain = tuple(Proposal((token,), (1.0,)) for token in (BAD, 7, 8))
    tested.hear(replace(draft(base, BAD, 7, 8), proposals=certain))
    tested.run()
    assert text_of(tested) == (7, BAD)
    check_ended(tested, len(PROMPT) + 1)


def test_logprobs_of_a_prompt_with_such_a_token_are_not_told(target: Make) -> None:
    tested = target()
    spoilt = (*PROMPT[:40], BAD, *PROMPT[41:])
    tested.hear(asked(spoilt, sampling=SamplingSpec(num_prompt_logprobs=1)))
    tested.run()
    check_ended(tested, 40)
    told = [message for message in tested.sent if isinstance(message, PromptLogprobs)]
    assert {message.start for message in told} == {1}, "those of the chunk before it"


def test_a_lost_fault_is_said_again_with_the_next_heartbeat(folder: Path) -> None:
    tested = RealTarget(executor(folder, "fused", is_bad=True))
    opened = asked((*PROMPT, BAD))
    tested.hear(opened)
    tested.run()
    check_ended(tested, len(PROMPT))
    said = tested.sent.pop()
    mark = SessionMark(1, 1, len(opened.tokens), name(*opened.tokens))
    tested.hear(Heartbeat((mark,), 0, ""))
    assert tested.sent == [said]


def test_reproducible_texts_are_the_same_beside_one_that_ends(folder: Path) -> None:
    def make(*, is_bad: bool) -> RealTarget:
        loaded = load_model(str(folder), dtype="float32")
        if is_bad:
            with torch.no_grad():
                loaded.model.get_input_embeddings().weight[BAD] = math.nan
        made = make_executor(loaded, CAPACITY, num_lanes=2, fixed_rows=8, backend="fused")
        made.set_total(CAPACITY)
        return RealTarget(made)

    want = written(make(is_bad=False), asked(OTHER, 2))
    tested = make(is_bad=True)
    tested.hear(asked((*PROMPT[:20], BAD, *PROMPT[21:])), asked(OTHER, 2))
    tested.run()
    check_ended(tested, 20)
    assert text_of(tested, 2) == want
