"""The pictures of the README: what a terminal shows, and two policies side by side."""

import dataclasses
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lab.experiments.folder import FILE, ROWS
from lab.experiments.results import curves
from lab.experiments.rows import RowFile
from lab.pictures import __main__ as program
from lab.pictures import rounds, screen
from lab.plan.figure import empty
from lab.records import from_json
from lab.trace.critical_path import Path as PathOfText
from lab.trace.critical_path import Round
from lab.trace.reading import Forward, Process, Trace
from proto.errors import ConfigurationError
from tests.lab.experiments.results.made_up import Truth, arm, header, measured

GREEN = "\x1b[32mgreen\x1b[0m"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_command_is_recorded_with_the_colours_and_the_width_of_a_terminal(
    columns: int, tmp_path: Path
) -> None:
    code = f"import os, sys; print({GREEN!r}, os.get_terminal_size().columns, sys.stdout.isatty())"
    said = screen.record([sys.executable, "-c", code], tmp_path, 60.0, columns)
    assert said == f"{GREEN} {columns} True\n"


def test_a_command_that_fails_says_its_last_line(tmp_path: Path) -> None:
    code = "import sys; print('one'); sys.exit('the last line')"
    with pytest.raises(ConfigurationError, match=r"the last line$"):
        screen.record([sys.executable, "-c", code], tmp_path, 60.0)
    said = screen.record([sys.executable, "-c", code], tmp_path, 60.0, may_fail=True)
    assert said.endswith("the last line\n")


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="too long"):
        screen.record([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 0.5)


def test_what_comes_before_is_left_out() -> None:
    assert screen.after(f"loading\n{GREEN} is first\nmore", "green is") == f"{GREEN} is first\nmore"
    assert screen.after("one\ntwo", "three") == "one\ntwo"


def test_the_drawing_has_every_word_in_its_colour_and_fetches_nothing() -> None:
    drawn = screen.as_svg(f"plain {GREEN} and <angle> & more\n", "a title")
    assert drawn == screen.as_svg(f"plain {GREEN} and <angle> & more\n", "a title")
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    words = "".join(ET.fromstring(drawn).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "plain green and <angle> & more" in words.replace("\n", "")
    assert "a title" in words


def trace(pass_ms: float) -> Trace:
    """A target whose passes take so long and add two tokens each; its path is kept with it."""
    pass_ns = round(pass_ms * 1e6)
    spans = [(number * pass_ns, (number + 1) * pass_ns) for number in range(40)]
    passes = [Forward(start, end - pass_ns // 4, "pass", {}) for start, end in spans]
    verdicts = [Round(start, end, {}, 2, 1, 1, 0, {}) for start, end in spans]
    path = PathOfText(1, "tree", 0, spans[-1][1], verdicts)
    processes = {
        number: Process(number, role, role, [], {}, forwards=passes)
        for number, role in enumerate(("target", "drafter"), 1)
    }
    return Trace(processes, [], [], {"path": path})


def test_as_much_time_is_drawn_of_each_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "paths_of", lambda trace: [trace.about["path"]])
    traces = {"sync": trace(10.0), "tree": trace(5.0)}
    found = rounds.rounds_of(traces, "a title", ("nothing is simulated",))
    kept = from_json(rounds.Rounds, json.dumps(dataclasses.asdict(found)))
    assert kept == found
    figure = empty(tmp_path / "x.png")
    rounds.draw(figure, kept)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["sync: 10 tokens in 50 ms", "tree: 20 tokens in 50 ms"]
    assert [len(axes.texts) for axes in figure.axes] == [5, 10]
    assert figure.axes[-1].get_xlim() == (0.0, 50.0)
    assert figure.get_suptitle() == "a title\nnothing is simulated"
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == [*rounds.LABELS.values(), rounds.VERDICT_LABEL]


def test_what_is_kept_draws_the_pictures_again(tmp_path: Path) -> None:
    for name in ("rounds", *program.EXPERIMENTS):
        kept = program.ROOT / "docs" / "pictures" / f"{name}.json"
        (tmp_path / kept.name).write_bytes(kept.read_bytes())
    program.pictures(out=tmp_path, redraw=True)
    assert len(list(tmp_path.glob("*.png"))) == len(program.EXPERIMENTS) + 1
    with pytest.raises(ConfigurationError, match="NAMES"):
        program.pictures(["demo"], out=tmp_path, redraw=True)


def test_the_picture_of_an_experiment_is_drawn_of_data_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, truths = [arm("ar", "")], {"ar": Truth(1)}
    for k in (2, 4):
        arms.append(arm(f"sync {k}", num_speculative_tokens=k))
        truths[f"sync {k}"] = Truth(1.2, 0.7, k)

    def run(command: list[str], *_: object) -> str:
        folder = Path(command[-1])
        made = header(arms, x="num_speculative_tokens")
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(made)), encoding="utf-8")
        RowFile(folder / ROWS).append(measured(truths))
        return ""

    monkeypatch.setattr(screen, "record", run)
    program.experiment("hop", tmp_path)
    kept = from_json(curves.Curves, (tmp_path / "hop.json").read_text(encoding="utf-8"))
    assert [point.x for point in kept.lines[0].points] == [2, 4]
    assert (tmp_path / "hop.png").read_bytes().startswith(b"\x89PNG")
    arms[2:] = []
    with pytest.raises(ConfigurationError, match="drew nothing"):
        program.experiment("hop", tmp_path)
