"""`plan` on the command line: a table that fits, a record, refusals of one line."""

import json
import sys
from functools import partial

import pytest

from coordinator.cli.app import EXIT_USAGE, command_line, run
from lab.plan import report
from lab.plan.command import plan
from lab.plan.likeness import H100, MEMORY_SHARE, num_devices
from lab.plan.settings import Costs, Texts
from lab.testbeds.shapes import Published, num_held, num_read
from proto.policies import TABLE
from rehearsal.acceptance import NEXT_RANK, SECOND_RANK
from rehearsal.planning import make_plan

COSTS = ("--target-ms", "30", "--draft-ms", "2", "--num-tokens", "64")


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "make_plan", partial(make_plan, drafts=(1, 3), wider=()))


def run_plan(patch: pytest.MonkeyPatch, *options: str) -> int:
    patch.setattr("sys.argv", ["slipstream", "plan", *options])
    return run(command_line([plan]))


def test_the_table_has_every_policy_and_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(monkeypatch, *COSTS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {row.name for row in TABLE} <= {line.split()[0] for line in lines if line}
    assert lines[-2].startswith("Best, ")
    assert lines[-1].startswith("  --policy ")


def test_the_help_says_how_often_further_choices_are_right() -> None:
    words = Texts.model_fields["acceptance"].description
    assert words is not None
    assert f"the second choice gets {SECOND_RANK} of the remaining" in words
    assert f"each further choice {NEXT_RANK} of what then remains" in words


def test_where_speculation_does_not_pay_that_is_said_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = ("--target-ms", "2", "--draft-ms", "2", "--acceptance", "0.3", "--num-tokens", "64")
    assert run_plan(monkeypatch, *costs) == 0
    assert "Speculation does not pay here" in capsys.readouterr().out


def test_the_record_has_the_same_figures_for_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(monkeypatch, *COSTS, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["pays"] is True
    assert record["plain_tokens_per_second"] == pytest.approx(1e3 / 30.1)
    assert [best["policy"] for best in record["best"]] == [row.name for row in TABLE if row.drafts]
    assert all(best in record["cells"] for best in record["best"])


def test_a_model_on_the_roofline_is_as_fast_as_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--target-params", "8e9", "--target-bandwidth", "4e12", "--draft-ms", "0.5")
    assert run_plan(monkeypatch, *sizes, "--num-tokens", "64", "--json") == 0
    assert json.loads(capsys.readouterr().out)["target_ms"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("target", "drafter", "target_ms", "draft_ms"),
    [
        ("llama-3.1-70b", "llama-3.2-1b", 20.75, 0.738),
        ("llama-3.1-405b", "llama-3.2-1b", 15.07, 0.738),
        ("qwen3-32b", "qwen3-0.6b", 19.10, 0.356),
    ],
)
def test_a_large_model_is_planned_by_its_name_with_the_usual_drafter(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: Published,
    drafter: Published,
    target_ms: float,
    draft_ms: float,
) -> None:
    words = ("--like", target, "--num-tokens", "64")
    assert run_plan(monkeypatch, *words, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["target_ms"] == pytest.approx(target_ms, rel=1e-3)
    assert record["draft_ms"] == pytest.approx(draft_ms, rel=1e-3)
    assert run_plan(monkeypatch, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"target: the shape of {target}, ")
    assert lines[1].startswith(f"drafter: the shape of {drafter}, ")
    assert max(map(len, lines)) <= 80


def test_other_devices_than_the_usual_ones_can_be_given() -> None:
    costs = Costs(like="llama-3.1-8b", target_bandwidth=2e12, target_flops=1e14, draft_ms=1.0)
    forward = report.case_of(costs, Texts(num_tokens=64)).target.forward
    read = num_read("llama-3.1-8b")
    assert forward.of(1) == pytest.approx(2 * read / 2e12)
    assert forward.of(100) == pytest.approx(100 * 2 * read / 1e14)


@pytest.mark.parametrize(
    ("model", "number"),
    [("llama-3.1-8b", 1), ("qwen3-32b", 1), ("llama-3.1-70b", 2), ("llama-3.1-405b", 16)],
)
def test_a_model_gets_as_many_devices_as_hold_its_weights(model: Published, number: int) -> None:
    num_bytes = 2.0 * num_held(model)
    assert num_devices(num_bytes) == number
    assert num_bytes <= number * MEMORY_SHARE * H100.memory


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "error: say what a forward takes: --like, --target-ms, or --target-params and"),
        (("--target-ms", "3"), "error: say what a forward takes: --drafter-like, --draft-ms, or"),
        ((*COSTS, "--draft-params", "1e9"), "error: say what a forward takes: --drafter-like, "),
        ((*COSTS, "--like", "qwen3-32b"), "error: --like says what a forward takes: leave out "),
        ((*COSTS, "--drafter-like", "qwen3-0.6b"), "error: --drafter-like says what a forward "),
        (("--like", "llama-3.2-1b"), "error: say what a forward takes: --drafter-like, "),
        (("--like", "llama"), "error: --like: expected one of llama-3.2-1b, "),
        ((*COSTS, "--acceptance", "1.2"), "error: --acceptance: expected chances like 0.75"),
        ((*COSTS, "--trace", "/nowhere"), "error: --trace: /nowhere cannot be read"),
        ((*COSTS, "--num-tokens", "3"), "error: --num-tokens: "),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    line: str,
) -> None:
    assert run_plan(monkeypatch, *options) == EXIT_USAGE
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(line)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("/nonexist/x.png", "--plot: /nonexist/x.png cannot be written: No such file or directory"),
        ("/dev/null/x.png", "--plot: /dev/null/x.png cannot be written: Not a directory; "),
        ("x.pgn", "--plot: x.pgn ends in no kind of picture that can be drawn; those are "),
    ],
)
def test_where_a_figure_cannot_be_written_is_said_before_anything_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, line: str
) -> None:
    def rehearsed(*_: object, **__: object) -> None:
        raise AssertionError("it was rehearsed")

    monkeypatch.setattr(report, "make_plan", rehearsed)
    assert run_plan(monkeypatch, *COSTS, "--plot", name) == EXIT_USAGE
    assert f"error: {line}" in capsys.readouterr().err


def test_a_figure_needs_matplotlib_and_says_so_before_anything_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run_plan(monkeypatch, *COSTS, "--plot", "x.png") == EXIT_USAGE
    assert "--plot needs the package `matplotlib`" in capsys.readouterr().err
