"""Which arms are void because their simulated devices were late."""

from lab.experiments.results.lateness import with_void_arms
from lab.experiments.rows import Row
from tests.lab.experiments.made import row

BASELINES = {"fast": "plain"}


def cell(arm: str, prompt: int, speed: float = 100.0, *, late: float = 0.0, text: int = 0) -> Row:
    """A text in 100 ms, of which so many were lost."""
    figures = {"simulated": {"elapsed_ms": 100.0, "late_ms": late}}
    return row(arm, prompt, speed=speed, figures=figures, text=text)


def voids(rows: list[Row]) -> dict[str, str]:
    return {one.arm: one.void for one in with_void_arms(rows, BASELINES)}


def compared(speeds: list[float], *, late: float, base_late: float = 0.0) -> dict[str, str]:
    rows = [cell("fast", prompt, speed, late=late) for prompt, speed in enumerate(speeds)]
    return voids([*rows, *[cell("plain", prompt, late=base_late) for prompt in range(len(speeds))]])


WIDE = [150.0, 160.0, 170.0, 180.0, 190.0, 200.0]
NARROW = [170.0, 170.5, 169.5, 170.2, 169.8, 170.1]


def test_an_arm_is_void_by_all_of_its_forwards_together() -> None:
    rows = [cell("a", 0, late=12), *[cell("a", prompt) for prompt in (1, 2)], cell("b", 0, late=6)]
    assert voids([*rows, row("c", 0)]) == {
        "a": "",
        "b": "its forwards were late by 6% of the time",
        "c": "",
    }


def test_a_little_lateness_is_within_a_wide_interval_and_not_within_a_narrow_one() -> None:
    assert compared(WIDE, late=3) == {"fast": "", "plain": ""}
    found = compared(NARROW, late=3)
    assert found["plain"] == ""
    assert found["fast"] == (
        "its forwards were late by 3% of the time, those of its baseline by 0%: "
        "its speed-up may be 1.75, outside its interval"
    )
    assert compared(NARROW, late=0.9) == {"fast": "", "plain": ""}


def test_what_both_arms_have_lost_is_not_in_their_ratio() -> None:
    assert compared(NARROW, late=3, base_late=3) == {"fast": "", "plain": ""}
    assert compared(NARROW, late=0, base_late=3)["fast"] != ""


def test_a_starved_machine_has_no_figures_however_wide_their_intervals_are() -> None:
    found = compared([100.0, 300.0, 50.0, 900.0, 20.0, 400.0], late=8, base_late=8)
    assert set(found.values()) == {"its forwards were late by 8% of the time"}


def test_of_one_text_nobody_knows_whether_lateness_matters() -> None:
    assert compared([170.0], late=2)["fast"].endswith("nobody knows whether that matters")


def test_what_texts_that_were_written_at_once_have_lost_counts_once() -> None:
    rows = [cell("a", 0, late=8, text=text) for text in range(8)]
    assert set(voids([*rows, cell("a", 1), cell("a", 2)]).values()) == {""}
