"""The output of `plan` in docs/rehearsing.md is what the command of that page prints today."""

import re
import shlex

import pytest

from coordinator.cli.app import command_line, run
from lab.plan.command import plan
from proto.installation import ROOT

pytestmark = pytest.mark.long


def test_the_output_in_the_docs_is_todays_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "rehearsing.md").read_text()
    found = re.search(r"-m coordinator (plan (?:.*\\\n)*.*)\n", page)
    assert found is not None
    shown = page.partition("```\n")[2].partition("```\n")[0]
    monkeypatch.setattr("sys.argv", ["slipstream", *shlex.split(found[1].replace("\\\n", " "))])
    assert run(command_line([plan])) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert shown.strip().splitlines() == printed
