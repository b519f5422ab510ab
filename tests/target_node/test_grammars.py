"""A target that cannot follow a text's grammar ends that text, and the others go on."""

from dataclasses import replace
from pathlib import Path

import pytest

from proto.messages import FaultCode
from tests.target_node.real import RealTarget
from tests.target_node.test_not_finite import (
    OTHER,
    PROMPT,
    asked,
    executor,
    faults_of,
    text_of,
    written,
)
from tests.tiny_models import make_model


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
