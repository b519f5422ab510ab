"""The file of a measured pair: what `plan` reads of it, what it refuses, what people read."""

import errno
import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.cli.app import EXIT_USAGE, command_line, run
from lab.pair import words
from lab.pair.files import write
from lab.pair.intervals import chances_of, share_of
from lab.pair.record import FORMAT, VERSION, Advice, Hosts, Measured, MeasuredNode, SeenText, Speed
from lab.pair.stages import as_json
from lab.plan import report
from lab.plan.command import plan
from lab.plan.report import case_of
from lab.plan.settings import Costs, Texts
from proto.errors import OutputError
from proto.policies import POLICIES
from rehearsal.planning import make_plan

APART, BESIDE = ((1, 30.0), (5, 34.0)), ((1, 36.0), (9, 44.0))


def text(first: float, length: int = 80) -> SeenText:
    """A text of which the drafter's first choice is right at this share of the positions."""
    ranks = [0 if index < first * length else None for index in range(length)]
    return SeenText(
        (1, 2), (3,) * length, 7, (first,) * length, tuple(ranks), ((-0.1, -3.0),) * length
    )


def measured() -> Measured:
    def node(name: str, share: float) -> MeasuredNode:
        plain = ((1, 29.0),) if share == 1.0 else ()
        hosts = Hosts(100.0, 150.0, 200.0)
        apart, beside = (
            tuple((rows, ms * share) for rows, ms in curve) for curve in (APART, BESIDE)
        )
        about = name, "bfloat16", "cpu:0", "fused", 8_000_000
        return MeasuredNode(*about, plain, apart, beside, 0.6, 0.01, hosts, 512.0)

    found = [chances_of(0.0, [text(0.9), text(0.7)]), chances_of(0.7, [text(0.5), text(0.5)])]
    speeds = (
        *(Speed(0.0, "ar", 30.0, 33.0, 1.0, None), Speed(0.0, "tree", 60.0, 57.0, 3.0, 0.31)),
        *(Speed(0.8, "ar", 25.0, 24.0, 1.0, None), Speed(0.8, "tree", 40.0, 42.0, 2.0, 0.21)),
    )
    advice = (Advice("as measured", "--policy tree", 2.0, 60.0),)
    sizes = node("big", 1.0), node("small", 0.1)
    return Measured(FORMAT, VERSION, "a machine", *sizes, 0.4, tuple(found), speeds, advice)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pair.json"
    write(path, as_json(measured()))
    return path


def test_plan_takes_costs_and_acceptance_from_the_file(file: Path) -> None:
    case = case_of(Costs(pair=str(file)), Texts())
    assert case.target.forward.of(1) == pytest.approx(36e-3)
    assert case.target.host_s == pytest.approx(200e-6)
    assert (case.drafter.forward.of(9), case.drafter.hop_s) == pytest.approx((4.4e-3, 0.4e-3))
    target, drafter = case.costs(POLICIES["sync"])
    assert (target.host_s, case.costs(POLICIES["ar"])[0].host_s) == pytest.approx((150e-6, 100e-6))
    assert (target.forward.of(5), drafter.forward.of(1)) == pytest.approx((34e-3, 3e-3))
    assert case.costs(POLICIES["tree"]) == (case.target, case.drafter)
    (ranks,) = ([position.rank for position in text] for text in case.trace)
    assert ranks.count(0) / len(ranks) == pytest.approx(0.8)


def test_a_flag_replaces_a_single_value_of_the_file(file: Path) -> None:
    costs = Costs(pair=str(file), hop_ms=5.0, target_ms=10.0)
    case = case_of(costs, Texts(temperature=0.8))
    assert case.apart is not None
    for drafter in (case.drafter, case.apart[1]):
        assert drafter.hop_s == pytest.approx(5e-3)
    assert case.target.forward.of(9) == case.apart[0].forward.of(9) == pytest.approx(10e-3)
    assert sum(position.rank == 0 for position in case.trace[0]) == len(case.trace[0]) / 2
    assert case_of(Costs(pair=str(file)), Texts(acceptance="1")).trace[0][0].rank == 0


def test_plan_says_of_which_models_the_file_is() -> None:
    long = replace(measured(), target=replace(measured().target, model="/models/" * 9 + "large"))
    target, drafter = report.about(long).splitlines()
    assert target.startswith("measured target: ...")
    assert target.endswith("/large, bfloat16 on cpu:0")
    assert drafter == "measured drafter: small, bfloat16 on cpu:0"
    assert max(len(target), len(drafter)) <= 80


def test_plan_prints_a_plan_of_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "make_plan", partial(make_plan, drafts=(1, 3), wider=()))
    monkeypatch.setattr("sys.argv", ["slipstream", "plan", "--pair", str(file), "--json"])
    assert run(command_line([plan])) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["plain_tokens_per_second"] == pytest.approx(1 / 29.1e-3, rel=1e-3)
    assert record["acceptance"][0] == pytest.approx(0.8)


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a file in which one thing is not as `measure` writes it."""
    found = json.loads(as_json(measured()))
    change(found)
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "was not made by this release's `measure`; make it again"),
        (b"\xff\xfe", "is no text; `measure` makes such a file"),
        (b'{"format": "slipstream pair"}', "was not made by this release's `measure`"),
        (None, "cannot be read: "),
        (_changed(lambda found: found.update(version=1)), "was not made by this release's"),
        (_changed(lambda found: found["target"].update(apart=[[5, 3.0], [1, 4.0]])), "was not"),
        (_changed(lambda found: found["drafter"].update(beside=[[1, -1.0]])), "was not made by"),
        (_changed(lambda found: found["target"].update(beside=[[1, float("nan")]])), "was not"),
        (_changed(lambda found: found["chances"][0]["texts"][0]["ranks"].pop()), "was not made"),
        (_changed(lambda found: found.update(chances=[])), "was not made by this release's"),
    ],
)
def test_another_file_is_refused_in_one_line(
    content: bytes | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("p.json").write_bytes(content)
    monkeypatch.setattr("sys.argv", ["slipstream", "plan", "--pair", "p.json"])
    assert run(command_line([plan])) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --pair: p.json ")
    assert words in line
    assert len(line) <= 100


def test_a_temperature_needs_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["slipstream", "plan", "--temperature", "1"])
    assert run(command_line([plan])) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: --temperature chooses texts of --pair")


def test_a_full_disk_is_said_in_one_line_and_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutputError, match=r"^/dev/full cannot be written: [^\n]{1,60}$"):
        write(Path("/dev/full"), "{}")
    path = tmp_path / "pair.json"
    write(path, "older")

    def fill(self: Path, *_: object, **__: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OutputError, match=r"pair\.json cannot be written: No space left"):
        write(path, "newer")
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interval_holds_the_mean_and_is_wider_where_texts_differ() -> None:
    alike, apart = [[0.5] * 20] * 6, [[0.0] * 20, [1.0] * 20] * 3
    assert share_of(alike) == share_of([[0.5]])
    share = share_of(apart)
    assert 0.0 <= share.low < share.value == 0.5 < share.high <= 1.0
    assert share_of([[1.0, 1.0, 1.0], [0.0]]).value == 0.75  # every token counts alike


def test_on_a_terminal_of_80_columns_no_figure_is_cut_or_broken() -> None:
    file = io.StringIO()
    Console(file=file, width=80).print(words.on_screen(measured()))
    lines = file.getvalue().splitlines()
    assert not [line for line in lines if "\N{HORIZONTAL ELLIPSIS}" in line]
    assert [
        line for line in lines if line.startswith("0.7    0.50 [0.50, 0.50]  0.50 [0.50, 0.50]")
    ]
    assert [line for line in lines if line.startswith("target pass, drafter 60% busy  ")]
    assert [line for line in lines if line.startswith("0.8      tree ")]


def test_the_page_has_all_figures_and_tells_alpha_from_drafts_accepted() -> None:
    page = words.as_page(measured())
    assert "| 0.7 | 0.50 [0.50, 0.50] | 0.50 [0.50, 0.50] | 0.00 |" in page
    assert "| target pass, drafter 60% busy | 36 |  |  |  | 44 |  |" in page
    assert "| 0 | tree | 60 | 2.00 | 57 | -5% | 3.00 | 31% |" in page
    assert "| 0.8 | tree | 40 | 1.60 | 42 | +5% | 2.00 | 21% |" in page
    assert "Some of it is far off" not in page
    slow = replace(measured(), speeds=(Speed(0.0, "auto", 20.0, 57.0, 3.0, 0.31),))
    assert "Some of it is far off" in words.as_page(slow)
    base = measured()
    stalled = words.as_page(replace(base, drafter=replace(base.drafter, stalled=0.3)))
    assert "One of the models lost 30% of its time to stalls" in stalled
    assert "alpha is the chance that the classical rules (--verify token) accept a draft" in page
    assert 'Neither is the "% of drafts accepted"' in page
