"""The command that tells how often a drafter of another vocabulary is right."""

from pathlib import Path

import pytest

from lab.measure import other_vocabulary
from proto.installation import MODELS
from tests.other_vocabulary import permuted


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_same_tokens_with_other_numbers_are_right_as_often(
    temperature: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os; class Reader(object):\nfor name in names:\n")
    drafter = permuted(tmp_path / "drafter")
    sizes = ["--max-tokens", "12", "--temperature", temperature]
    monkeypatch.setattr(
        "sys.argv",
        ["x", str(prompts), "--drafter", str(drafter), "--beside", str(MODELS / "drafter"), *sizes],
    )
    assert other_vocabulary.main() == 0
    every, shared = capsys.readouterr().out.splitlines()
    assert every.split(maxsplit=1)[1] == shared.split(maxsplit=2)[2], "all tokens are shared"
    shares = {
        name: float(share)
        for name, share in (one.split() for one in every.split("positions: ")[1].split(", "))
    }
    assert shares["right"] == pytest.approx(shares["beside"], abs=0.13)
    assert shares["right"] > 0.2


def test_a_wrong_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    monkeypatch.setattr("sys.argv", ["x", str(prompts), "--drafter", str(tmp_path)])
    assert other_vocabulary.main() == 1
    assert capsys.readouterr().err
