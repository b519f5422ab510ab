"""Pictures: those for which there is something to see, and what they say."""

import dataclasses
import json
import struct

import pytest
from matplotlib.figure import Figure

from lab.experiments.results import canvas, curves, pictures
from lab.experiments.results.summary import overall, summarize
from lab.experiments.results.words import facts
from lab.records import from_json
from proto.policies import POLICIES
from tests.lab.experiments.results.made_up import RUN, Truth, arm, header, measured

TRUTHS = {"ar": Truth(1), "sync": Truth(1.4, 0.7, 4), "tree": Truth(1.8, 0.8, 8)}


def size(png: bytes) -> tuple[int, int]:
    """Pixels."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_every_picture_is_drawn_where_its_rows_are_there() -> None:
    arms = [arm("ar", "")]
    truths = {"ar": Truth(1)}
    for ms in (0, 5):
        arms.append(arm(f"sync {ms}", link=f"drafter:delay={ms}ms"))
        truths[f"sync {ms}"] = Truth(1.4 - 0.1 * ms, 0.7, 4)
    head = header(arms, x="link")
    rows = measured(truths, categories=("qa", "rag"))
    found = pictures.draw_all(head, rows, summarize(head, rows), {"ar": 40.0, "sync 0": 55.0})
    assert set(found) == {
        *("speedup.png", "along_x.png", "categories.png", "acceptance.png"),
        *("tokens_per_pass.png", "predicted.png"),
    }
    assert all(size(png)[0] == round(canvas.WIDTH * canvas.DPI) for png in found.values())


def test_nothing_is_drawn_of_nothing() -> None:
    head = header([arm("ar", "")])
    rows = measured({"ar": Truth(1)})
    assert pictures.draw_all(head, rows, summarize(head, rows)) == {}
    assert pictures.draw_all(head, [], []) == {}


def test_the_same_rows_make_the_same_bytes() -> None:
    head = header([arm("ar", ""), arm("sync"), arm("tree")])
    rows = measured(TRUTHS, prompts=3)
    first, second = (pictures.draw_all(head, rows, summarize(head, rows)) for _ in range(2))
    assert first == second


def test_many_arms_make_a_longer_picture_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_ROWS", 6)
    heights = []
    for number in (2, 6, 9):
        names = [f"sync {k}" for k in range(number)]
        head = header([arm("ar", ""), *map(arm, names)])
        rows = measured({"ar": Truth(1), **dict.fromkeys(names, Truth(1.3, 0.5, 2))}, prompts=2)
        drawn = pictures.draw_all(head, rows, summarize(head, rows))
        heights.append(size(drawn["speedup.png"])[1])
    assert heights[0] < heights[1] == heights[2]


def test_a_line_that_goes_through_one_is_marked_where_it_does() -> None:
    assert curves.crossings([0, 10, 20], [1.5, 1.25, 0.75]) == [(15.0, True)]
    assert curves.crossings([1, 3], [0.5, 1.5]) == [(2.0, False)]
    assert curves.crossings([0, 10], [1.5, 1.2]) == []


def test_a_policy_looks_the_same_in_every_experiment() -> None:
    alone, beside = canvas.looks(["tree"]), canvas.looks(["huggingface plain", "sync", "tree"])
    assert alone["tree"] == beside["tree"]
    assert set(beside) == {*POLICIES, "huggingface plain"}
    assert len({look.colour for look in beside.values()}) == len(beside)
    assert len({look.mark for look in beside.values()}) == len(beside)


def test_what_a_line_picture_shows_can_be_kept_and_drawn_again() -> None:
    arms = [arm("ar", "")]
    truths = {"ar": Truth(1)}
    for ms in (0, 5, 10):
        arms.append(arm(f"sync {ms}", link=f"drafter:delay={ms}ms"))
        truths[f"sync {ms}"] = Truth(1.4 - 0.1 * ms, 0.7, 4)
    head = header(arms, x="link")
    rows = measured(truths)
    whole = overall(summarize(head, rows))
    found = curves.curves_of(head, {one.arm: one.speedup for one in whole if one.speedup})
    assert found is not None
    assert [point.x for point in found.lines[0].points] == [0.0, 5.0, 10.0]
    kept = from_json(curves.Curves, json.dumps(dataclasses.asdict(found)))
    assert kept == found
    assert curves.draw(kept) == pictures.draw_all(head, rows, summarize(head, rows))["along_x.png"]
    assert curves.curves_of(header(arms), {}) is None


def test_a_picture_says_what_was_measured_and_what_was_not() -> None:
    plain = header([arm("ar", ""), arm("tree")])
    assert facts(plain, ["ar", "tree"]) == [
        "8 prompts, 2 times each, at most 24 tokens a text.",
        "Measured on 2 cores of a machine. Not measured: GPUs, and other machines.",
    ]
    slow = [
        arm(f"tree {ms}", simulate_target_ms=ms, simulate_draft_ms=5, link="drafter:delay=1ms")
        for ms in (20, 160)
    ]
    said = facts(header(slow, repetitions=1), [one.name for one in slow])
    assert said[0] == "8 prompts, at most 24 tokens a text."
    assert said[1].replace("\N{NO-BREAK SPACE}", " ") == (
        "Simulated: a target pass of 20 to 160 ms, a draft step of 5 ms and the link. "
        "Not measured: real devices and links like these."
    )
    gpu = header([arm("tree")], runs=(dataclasses.replace(RUN, machine="8 cores, NVIDIA H100"),))
    assert facts(gpu, ["tree"])[1].endswith("Not measured: other machines.")
    rows = header([arm("tree", simulate_target_ms_per_row=1)], runs=())
    assert "Simulated: time for each row of a pass." in facts(rows, ["tree"])[1]


def test_no_legend_has_more_entries_than_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    num_entries: list[int] = []

    def counted(figure: Figure) -> None:
        num_entries.append(sum(len(axes.get_legend_handles_labels()[1]) for axes in figure.axes))

    monkeypatch.setattr(pictures, "legend_below", counted)
    families = ("sync", "pearl", "amusd", "pipelined", "ssd", "tree", "auto")
    for number in (pictures.ONE_PANEL, 14):
        names = [f"{family} {k}" for family in families for k in (0, 1)][:number]
        head = header([arm("ar", ""), *map(arm, names)])
        rows = measured({"ar": Truth(1), **dict.fromkeys(names, Truth(1.3, 0.5, 2))}, prompts=2)
        pictures.draw_all(head, rows, summarize(head, rows))
    assert num_entries == [pictures.ONE_PANEL]  # of 14 arms each panel is named instead
