"""Pictures: those for which there is something to see, and what they say."""

import struct

import pytest

from lab.experiments.folder import ArmRecord
from lab.experiments.results import pictures
from lab.experiments.results import pictures as canvas
from lab.experiments.results.summary import summarize
from proto.policies import POLICIES
from tests.lab.experiments.results.made_up import Truth, arm, header, measured

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
    monkeypatch.setattr(canvas, "MAX_ROWS", 6)
    heights = []
    for number in (2, 6, 9):
        names = [f"sync {k}" for k in range(number)]
        head = header([arm("ar", ""), *map(arm, names)])
        rows = measured({"ar": Truth(1), **dict.fromkeys(names, Truth(1.3, 0.5, 2))}, prompts=2)
        drawn = pictures.draw_all(head, rows, summarize(head, rows))
        heights.append(size(drawn["speedup.png"])[1])
    assert heights[0] < heights[1] == heights[2]


def test_a_line_that_goes_through_one_is_marked_where_it_does() -> None:
    assert pictures.crossings([0, 10, 20], [1.5, 1.25, 0.75]) == [(15.0, True)]
    assert pictures.crossings([1, 3], [0.5, 1.5]) == [(2.0, False)]
    assert pictures.crossings([0, 10], [1.5, 1.2]) == []


def test_a_policy_looks_the_same_in_every_experiment() -> None:
    peer = ArmRecord("hf", {"peer": "huggingface"})
    alone, beside = canvas.looks([arm("tree")]), canvas.looks([peer, arm("sync"), arm("tree")])
    assert alone["tree"] == beside["tree"]
    assert set(beside) == {*POLICIES, "huggingface plain"}
    assert len({look.colour for look in beside.values()}) == len(beside)
    assert len({look.mark for look in beside.values()}) == len(beside)
