"""`measure` on the command line: a pair from end to end, and refusals before anything is loaded."""

import json
from pathlib import Path

import pytest

from coordinator.cli.app import EXIT_USAGE, command_line, run
from lab.pair import advising, measuring
from lab.pair.command import measure
from lab.plan.report import case_of
from lab.plan.settings import Costs, Texts
from rehearsal.planning import make_plan
from tests.lab.bytewise_pair import make_bytewise_pair


def run_measure(patch: pytest.MonkeyPatch, *options: str) -> int:
    patch.setattr("sys.argv", ["slipstream", "measure", *options])
    return run(command_line([measure]))


def models(folder: Path) -> tuple[str, ...]:
    target, drafter = make_bytewise_pair(folder, 0.1)
    return "--target", str(target), "--drafter", str(drafter)


@pytest.mark.process
@pytest.mark.long
def test_a_pair_is_measured_and_plan_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advising, "make_plan", lambda case, *_, **__: make_plan(case, (1,), ()))
    monkeypatch.setattr(advising, "SLOWER_LINKS_MS", ())
    monkeypatch.setattr(measuring, "TEMPERATURES", (0.0, 0.8))
    monkeypatch.setattr(measuring, "COMPARED", ("ar", "tree"))
    monkeypatch.setattr(measuring, "ROWS_APART", (1, 15))
    out = tmp_path / "pair.json"
    few = "--num-prompts", "2", "--max-tokens", "64", "--out", str(out)
    assert run_measure(monkeypatch, *models(tmp_path), *few) == 0
    said = capsys.readouterr()
    assert "this will take about" in said.err
    *report, paths = said.out.splitlines()
    assert max(map(len, report)) <= 80
    assert "pair.md is the same to read" in paths
    found = json.loads(out.read_text())
    assert [one["temperature"] for one in found["chances"]] == [0.0, 0.8]
    for one in found["chances"]:
        assert 0 < one["alpha"]["low"] <= one["alpha"]["value"] <= one["alpha"]["high"] <= 1
        assert one["num_tokens"] == sum(len(text["ranks"]) for text in one["texts"])
    assert found["chances"][0]["alpha"] == found["chances"][0]["ranks"][0]
    for node in ("target", "drafter"):
        assert all(ms > 0 for _, ms in found[node]["apart"] + found[node]["beside"])
        assert 0 <= found[node]["overlap"] <= 1
        assert found[node]["host_us"]["beside"] > 0
    # Which numbers of rows there were, a busy machine decides as well.
    assert len({rows for rows, _ in found["target"]["apart"] + found["target"]["beside"]}) > 2
    assert [(speed["temperature"], speed["policy"]) for speed in found["speeds"]] == [
        *((0.0, "ar"), (0.0, "tree")),
        *((0.8, "ar"), (0.8, "tree")),
    ]
    assert found["advice"][0]["what"] == "as measured, temperature 0"
    page = (tmp_path / "pair.md").read_text()
    assert page.count('"x plain" compares with the policy ar: the target alone, float32, on ') == 2
    assert "## What to use" in page
    case = case_of(Costs(pair=str(out)), Texts(num_tokens=64))
    assert case.target.forward.of(1) > 0
    assert case.drafter.hop_s == pytest.approx(found["way_ms"] / 1e3)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--prompt-file", "empty.txt"), "error: empty.txt has no prompts: every line is empty"),
        (("--prompt-file", "binary.txt"), "error: binary.txt is not UTF-8 (byte 0)"),
        (("--prompt-file", "nowhere.txt"), "error: cannot read nowhere.txt: No such file"),
        (("--out", "no/pair.json"), "error: --out: no/pair.json cannot be written: "),
        (("--out", "pair.md"), "error: --out: pair.md would be the page; give the file another"),
        (("--drafter", "ngram"), "error: --drafter: `measure` needs a draft model"),
        (("--drafter", "models/eagle3"), "error: --drafter: `measure` needs a draft model"),
        (("--max-tokens", "4000"), "error: the target takes 2048 tokens, and a prompt has "),
        (("--num-prompts", "1"), "error: --num-prompts: expected at least 2, got '1'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    embedded = Path("models").absolute()
    monkeypatch.chdir(tmp_path)
    Path("models").symlink_to(embedded)
    Path("empty.txt").write_text("\n\n")
    Path("binary.txt").write_bytes(b"\x89PNG\xff\x00")
    assert run_measure(monkeypatch, *options) == EXIT_USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)
    assert len(said) <= 100
    assert not list(tmp_path.glob("pair*"))


def test_a_drafter_with_another_tokenizer_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = models(tmp_path)
    drafter = Path(pair[-1])
    (drafter / "model.safetensors").unlink()
    vocabulary = json.loads((drafter / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (drafter / "tokenizer.json").write_text(json.dumps(vocabulary))
    capsys.readouterr()  # what the making of models has said
    assert run_measure(monkeypatch, *pair) == EXIT_USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: --drafter: it has another vocabulary: alpha has no meaning; ")
    assert len(said) <= 100


def test_a_drafter_that_takes_less_text_than_is_wanted_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = models(tmp_path)
    config = Path(pair[-1]) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 90}))
    Path("prompts.txt").write_text("abc\nabcdefghijklmnopqrst\n")
    capsys.readouterr()  # what the making of models has said
    assert (
        run_measure(monkeypatch, *pair, "--prompt-file", "prompts.txt", "--max-tokens", "80")
        == EXIT_USAGE
    )
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: the drafter takes 90 tokens, and a prompt has 2")
    assert len(said) <= 100
