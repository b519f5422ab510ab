"""`verify-lossless` says what it proved, and no more than that."""

import math

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.cli.app import EXIT_USAGE, command_line, run
from proto.errors import ConfigurationError
from rehearsal.lossless import command
from rehearsal.lossless.checks import (
    NEAR_TIE,
    Check,
    Difference,
    Pace,
    Written,
    difference,
    greedy_check,
    near_tie,
    not_tested,
    seeds_promised,
    with_drafts,
)
from rehearsal.lossless.command import explained, how_long, line_of, verdict

EQUAL = Check("greedy", "auto", held=True, detail="256 tokens, 170 of them drafted")
WRONG = Check("greedy", "auto", held=False, detail="256 tokens, 170 of them drafted")
SEEDS = Check("seeds", "auto", held=True, detail="4 of 4 texts equal those of ar")
SAMPLED = Check("sampled", "auto token", held=True, detail="p = 0.5, 50% of 90 drafts accepted")
CAUGHT = Check("sampled", "planted mistake", held=False, detail="p = 0", expected=False)
MISSED = Check("sampled", "planted mistake", held=True, detail="p = 0.4", expected=False)
WIDTH = 80


def tied(number: int) -> Check:
    ties = [Difference(9, 0.01)] * number
    return greedy_check("auto", (5,) * 64, [*ties, None], 40, NEAR_TIE["bfloat16"])


# -- what is compared ------------------------------------------------------------------------------


def test_equal_texts_have_no_difference() -> None:
    assert difference((3, 4), [{3: -0.1}, {4: -0.2}], (3, 4)) is None


def test_the_margin_is_between_the_two_tokens_and_not_between_the_two_likeliest() -> None:
    best = [{3: -0.25}, {4: -1.0, 7: -1.125, 8: -1.5}]
    assert difference((3, 4), best, (3, 7)) == Difference(1, 0.125)
    assert difference((3, 4), best, (3, 8)) == Difference(1, 0.5)


def test_a_token_that_is_not_among_the_likeliest_is_no_near_tie() -> None:
    found = difference((3, 4), [{3: -0.1}, {4: -1.0, 7: -1.01}], (3, 9))
    assert found == Difference(1, math.inf)
    assert not greedy_check("auto", (3, 4), [found], 1, NEAR_TIE["bfloat16"]).held


def test_a_text_that_ends_early_is_wrong() -> None:
    assert difference((3, 4), [{3: -0.1}, {4: -1.0}], (3,)) == Difference(1, math.inf)


def test_near_ties_are_counted_and_a_wrong_token_is_none_of_them() -> None:
    near, wrong = Difference(3, 0.1), Difference(5, 0.4)
    check = greedy_check("auto", (5,) * 64, [near, wrong, None, near], 40, 0.25)
    assert not check.held
    assert check.num_near_ties == 2
    assert greedy_check("auto", (5,) * 64, [near, None], 40, 0.25).held


def test_without_accepted_drafts_nothing_was_shown() -> None:
    assert not greedy_check("auto", (5,) * 64, [None], 0, 0.25).held


@pytest.mark.parametrize(("rests", "takes"), [(False, [True]), (True, [True, False])])
def test_texts_are_written_again_where_the_drafter_has_only_rested(
    *, rests: bool, takes: list[bool]
) -> None:
    asked: list[bool] = []

    def write(policy: SpeculationConfig) -> list[Written]:
        asked.append(policy.adaptive)
        drafted = 0 if policy.adaptive and rests else 3
        return [Written((1,), (), num_drafted=drafted, num_accepted=0)]

    got = with_drafts(write, SpeculationConfig())
    assert asked == takes
    assert [one.num_drafted for (one,) in got] == ([0, 3] if rests else [3])


def test_a_reproducible_text_has_no_near_ties() -> None:
    near = near_tie("bfloat16", is_exact=True)
    check = greedy_check("auto", (5,) * 64, [Difference(9, 0.0)], 40, near)
    assert not check.held
    assert check.num_near_ties == 0


def test_seeds_are_tested_in_float32_and_wherever_a_text_is_reproducible() -> None:
    assert seeds_promised("float32", is_exact=False)
    assert seeds_promised("bfloat16", is_exact=True)
    assert not seeds_promised("bfloat16", is_exact=False)
    assert not seeds_promised("float16", is_exact=False)


# -- what is said ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ([EQUAL, SEEDS, SAMPLED, CAUGHT], "lossless"),
        ([tied(2), SEEDS, SAMPLED, CAUGHT], "equal but for 2 near ties"),
        (
            [tied(1), not_tested("bfloat16"), SAMPLED, CAUGHT],
            "equal but for 1 near tie; seeds not tested",
        ),
        (
            [EQUAL, not_tested("bfloat16"), SAMPLED, CAUGHT],
            "greedy texts equal, no difference found in the distribution; seeds not tested",
        ),
        ([WRONG, SEEDS, SAMPLED, CAUGHT], "NOT lossless"),
        ([EQUAL, SEEDS, SAMPLED, MISSED], "NOT lossless"),
    ],
)
def test_only_equal_texts_and_tested_seeds_are_lossless(checks: list[Check], said: str) -> None:
    assert verdict(checks) == said


def test_each_line_says_its_outcome() -> None:
    outcomes = {
        "ok": EQUAL,
        "1 near tie": tied(1),
        "12 near ties": tied(12),
        "not tested": not_tested("bfloat16"),
        "FAILED": WRONG,
        "caught": CAUGHT,
        "NOT CAUGHT": MISSED,
    }
    for outcome, check in outcomes.items():
        assert f" {outcome} " in line_of(check).split("\n", maxsplit=1)[0]


def test_no_line_has_more_than_80_columns() -> None:
    every = [EQUAL, SEEDS, SAMPLED, CAUGHT, MISSED, tied(12), not_tested("bfloat16")]
    said = [explained(1_000_000, 0.123), *map(line_of, every), verdict([*every[:3], tied(12)])]
    assert max(len(line) for text in said for line in text.splitlines()) <= WIDTH


def test_the_time_is_that_of_every_text() -> None:
    pace = Pace(start_s=5.0, long_s=4.0, short_s=0.5)
    long = 4 * (1 + 2) * (4.0 + 3.0)  # 4 prompts; alone and 2 policies; 64 and 48 tokens
    short = (1 + 3 + 9 + 27 + 6 * 600 + 600) * 0.5  # the prefixes; 6 lines; the planted mistake
    assert pace.duration_s(4, 2, 3, 600) == 5.0 + long + short


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (48.4, "48 s"), (130, "2 min"), (9000, "2.5 h")]
)
def test_a_time_is_said_in_its_own_unit(seconds: float, said: str) -> None:
    assert how_long(seconds) == said


# -- what is run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype"), [((), PairConfig().dtype), (("--dtype", "float32"), "float32")]
)
def test_the_number_type_is_that_of_generate_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], dtype: str
) -> None:
    started: list[PairConfig] = []

    def start(config: PairConfig, **_: object) -> Pair:
        started.append(config)
        raise ConfigurationError("nothing is started here")

    monkeypatch.setattr(command, "Pair", start)
    monkeypatch.setattr("sys.argv", ["slipstream", "verify-lossless", *options])
    assert run(command_line([command.verify_lossless])) == EXIT_USAGE
    assert [config.dtype for config in started] == [dtype]
