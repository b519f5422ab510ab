"""Names in pictures, and which arms are one line."""

import dataclasses

import pytest

from lab.experiments.results.words import (
    Series,
    baseline_words,
    clipped,
    family,
    series,
    shortened,
    x_of,
)
from tests.lab.experiments.results.made_up import arm, header


def test_long_names_are_cut_in_the_middle() -> None:
    name = shortened("sync num_speculative_tokens=4 link=drafter:delay=5ms")
    assert name == "sync K=4 delay=5ms"
    assert clipped(name, 40) == name
    assert len(clipped(name, 12)) == 12
    assert clipped(name, 12)[0] == "s"
    assert clipped(name, 12).endswith("5ms")


@pytest.mark.parametrize(
    ("x", "settings", "expected"),
    [
        ("link", {"link": "drafter:delay=5ms"}, 5.0),
        ("link", {"link": "to-drafter:delay=4ms from-drafter:delay=2ms"}, 3.0),
        ("link", {"link": "target:delay=4ms"}, 0.0),
        ("link", {"link": ""}, 0.0),
        ("link", {}, 0.0),
        ("cost_ratio", {"simulate_target_ms": 24.0, "simulate_draft_ms": 3}, 8.0),
        ("cost_ratio", {"simulate_target_ms": 24.0}, None),
        ("temperature", {"temperature": 0.8}, 0.8),
        ("target", {"target": "models/small"}, "models/small"),
        ("reproducible", {"reproducible": True}, "True"),
        ("temperature", {}, None),
    ],
)
def test_an_arm_stands_where_its_setting_says(
    x: str, settings: dict[str, object], expected: float | str | None
) -> None:
    assert x_of(header([], x=x), arm("sync", **settings)) == pytest.approx(expected)


def test_arms_that_differ_in_x_alone_are_a_line_in_its_order() -> None:
    arms = [arm("ar", "")]
    for link in ("drafter:delay=20ms", "", "drafter:delay=5ms"):
        for policy, k in (("sync", 2), ("sync", 4), ("tree", 8)):
            settings = {"policy": policy, "link": link, "num_speculative_tokens": k}
            arms.append(arm(f"{len(arms)}", **settings))
    found = series(header(arms, x="link"), [one.name for one in arms])
    assert found == [
        Series("sync K=2", "sync", ((0.0, "4"), (5.0, "7"), (20.0, "1"))),
        Series("sync K=4", "sync", ((0.0, "5"), (5.0, "8"), (20.0, "2"))),
        Series("tree K=8", "tree", ((0.0, "6"), (5.0, "9"), (20.0, "3"))),
    ]


def test_the_best_of_each_sweep_are_one_line() -> None:
    arms = [
        dataclasses.replace(
            arm(f"sync K={k} {ms}", num_speculative_tokens=k, link=f"drafter:delay={ms}ms"),
            swept_from=f"sync {ms}",
        )
        for ms in (1, 5)
        for k in (2, 4)
    ]
    found = series(header(arms, x="link"), ["sync K=4 1", "sync K=2 5"])
    assert [line.points for line in found] == [((1.0, "sync K=4 1"), (5.0, "sync K=2 5"))]


def test_families_are_policies_and_what_peers_do() -> None:
    assert family(arm("sync")) == "sync"
    assert family(dataclasses.replace(arm("x"), settings={})) == "auto"
    peer = dataclasses.replace(arm("x"), settings={"peer": "llamacpp", "mode": "lookup"})
    assert family(peer) == "llamacpp lookup"


def test_what_one_is_depends_on_the_baselines() -> None:
    assert baseline_words(header([arm("ar", ""), arm("tree")])) == "plain decoding"
    assert baseline_words(header([arm("sync", ""), arm("tree", "sync")])) == "sync"
    mixed = [arm("ar", ""), arm("sync"), arm("tree", "sync")]
    assert baseline_words(header(mixed)) == "the baseline"
