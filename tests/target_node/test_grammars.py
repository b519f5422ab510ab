"""A target that cannot follow a text's grammar ends that text, and the others go on.

What it cannot follow behind a draft ends no text, because alone it might never come there.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.choice.vocabulary import byte_vocabulary, of_lark
from node.forwards import Forwards, SimulatedDevice
from proto.messages import FaultCode, Open, Policy, Proposal, Rule, SamplingSpec, Verdict
from proto.policies import POLICIES
from target_node.worker import Worker
from tests.target_node.real import RealTarget, heart
from tests.target_node.test_not_finite import (
    ALONE,
    OTHER,
    PIPELINED,
    PROMPT,
    asked,
    executor,
    faults_of,
    text_of,
    written,
)
from tests.texts import draft
from tests.tiny_models import make_model

END, LOST = 2, 99
# Behind LOST only the end-of-text token could follow, where the grammar does not let a text end.
DEAD_END = of_lark(f"start: <[10-98]>* | <[10-98]>* <[{LOST}]> <[{END}]> <[10]>")
ENDS_AT_ONCE = of_lark(f"start: <[{LOST}]> <[{END}]> <[10]>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def test_a_text_whose_grammar_cannot_be_followed_ends_alone_with_a_line(folder: Path) -> None:
    other = asked(OTHER, session=2)
    want = written(RealTarget(executor(folder, "fused", is_bad=False)), other)
    target = RealTarget(executor(folder, "fused", is_bad=False))  # it has no vocabulary
    opened = asked(PROMPT)
    sampling = replace(opened.sampling, grammar="start: /a/", end_ids=(1,))
    target.hear(replace(opened, sampling=sampling), other)
    target.run()
    (fault,) = faults_of(target)
    assert (fault.session, fault.code) == (1, FaultCode.FAILED)
    assert "the target cannot follow this text's grammar: llguidance or" in fault.detail
    assert "\n" not in fault.detail
    assert text_of(target, 2) == want


def held(folder: Path) -> RealTarget:
    """A target with a vocabulary: the tokens are bytes."""
    target = RealTarget(executor(folder, "fused", is_bad=False))
    vocabulary = byte_vocabulary([])
    forwards = Forwards(target.executor, heart(), SimulatedDevice(0.0, 0.0), vocabulary)
    target.worker = Worker(forwards)
    return target


def asked_for(grammar: str, policy: Policy = ALONE, rule: Rule = Rule.COUPLED) -> Open:
    """A text that fits a grammar, of the likeliest tokens."""
    sampling = SamplingSpec(grammar=grammar, end_ids=(END,))
    if rule is not Rule.COUPLED:  # these rules are not for greedy texts
        sampling = replace(sampling, temperature=1.0, top_k=1)
    return asked(PROMPT, policy=policy, sampling=sampling, rule=rule)


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TOKEN, Rule.BLOCK])
def test_a_wrong_draft_behind_which_nothing_may_follow_ends_nothing(
    folder: Path, rule: Rule
) -> None:
    want = written(held(folder), asked_for(DEAD_END))
    assert LOST not in want
    tested = held(folder)
    tested.hear(asked_for(DEAD_END, PIPELINED, rule))
    tested.turn()
    tested.turn()
    base = (*PROMPT, *text_of(tested))
    made = len(base) - len(PROMPT)
    drafts = (want[made], LOST, want[made + 1])
    said = draft(base, *drafts)
    if rule is not Rule.COUPLED:
        said = replace(said, proposals=tuple(Proposal((one,), (1.0,)) for one in drafts))
    tested.hear(said)
    tested.turn()
    (last,) = tested.sent[-1:]
    assert isinstance(last, Verdict)
    assert (last.num_drafted, last.num_accepted) == (3, 1)
    tested.run()
    assert (text_of(tested), faults_of(tested)) == (want, [])


def test_a_right_draft_behind_which_nothing_may_follow_ends_the_text_as_without_drafts(
    folder: Path,
) -> None:
    alone = held(folder)
    alone.hear(asked_for(ENDS_AT_ONCE))
    alone.run()
    assert text_of(alone) == (LOST,)
    tested = held(folder)
    tested.hear(asked_for(ENDS_AT_ONCE, POLICIES["tree"].make(8, 16)), draft(PROMPT, LOST, 11))
    tested.run()
    assert text_of(tested) == (LOST,)
    (fault,), (expected,) = faults_of(tested), faults_of(alone)
    assert fault.detail == expected.detail
    assert "no token may follow" in fault.detail


def test_such_a_text_ends_alone_also_where_its_features_are_wanted(folder: Path) -> None:
    target = held(folder)
    target.hear(replace(asked_for(ENDS_AT_ONCE), layers=(1,)))
    target.run()
    (fault,) = faults_of(target)
    assert "no token may follow" in fault.detail
