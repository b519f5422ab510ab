"""Texts are the same in bfloat16 whatever is done to them: few of those of `tests.exact_texts`."""

import pytest

from coordinator.launching import launcher
from proto.messages import Role
from proto.policies import POLICIES
from tests.exact_texts import FAMILIES, VOCAB, is_exact_family, requests_of

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_under_every_policy_alone_and_in_a_crowd_texts_are_those_of_plain_decoding(
    family: str,
) -> None:
    wanted = requests_of(16, VOCAB, longest=120, num_tokens=24)
    settings = {"dtype": "bfloat16", "max_num_seqs": 8, "drafter_restarts": 6}
    assert is_exact_family(family, wanted, list(POLICIES), settings)


def test_a_choice_that_depends_on_the_rows_of_a_pass_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(launcher.MODULES, Role.TARGET, "tests.process.inexact_target")
    wanted = requests_of(8, VOCAB, longest=60, num_tokens=24)
    settings = {"dtype": "bfloat16", "max_num_seqs": 8}
    assert not is_exact_family("llama", wanted, ["sync", "tree"], settings)
    said = capsys.readouterr().out
    assert "sync of 1: text " in said, "what differs is named"
