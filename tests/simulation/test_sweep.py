"""Many seeds are run by one command, and meet all that there is to be met."""

from collections import Counter

import pytest

from tests.simulation import __main__ as command
from tests.simulation import sweep
from tests.simulation.run import SimulationFailure
from tests.simulation.scenario import draw
from tests.simulation.sweep import Options, outcome_of, strata_of


def test_seeds_are_run_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [outcome_of(seed, Options(policy="sync")) for seed in range(3)]
    assert sweep.tell(outcomes) == 0
    said = capsys.readouterr().out
    assert "policy    sync 3\n" in said
    assert f"texts {sum(len(draw(seed, 'sync').texts) for seed in range(3))}" in said
    last = said.splitlines()[-1]
    assert last.startswith("ok: 3 seeds in ")
    assert last.endswith("all hold")


def test_a_seed_that_fails_is_told_at_once_and_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(seed: int, *_: object, **__: object) -> Counter[str]:
        if seed == 1:
            raise SimulationFailure("it is wrong\nand this is its story")
        return Counter(texts=1)

    monkeypatch.setattr(sweep, "simulate", fail)
    assert sweep.tell(outcome_of(seed, Options()) for seed in range(3)) == 1
    first, *_, which, last = capsys.readouterr().out.splitlines()
    assert first == "seed 1 fails: it is wrong"
    assert which == "seeds that fail: 1"
    assert last.startswith("FAILED: 1 of 3 seeds in ")
    assert "python -m tests.simulation 1 " in last


def test_the_story_of_a_seed_ends_with_whether_it_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(policy="sync", plain=True)
    assert command.replay(3, options, is_quiet=True) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("ok: seed 3 (policy sync, ")

    def fail(*_: object, **__: object) -> Counter[str]:
        raise SimulationFailure("it is wrong\nand this is its story\nreplay: thus")

    monkeypatch.setattr(command, "simulate", fail)
    for is_quiet in (False, True):
        assert command.replay(3, options, is_quiet=is_quiet) == 1
        said = capsys.readouterr().out.splitlines()
        assert said[-1].startswith("FAILED: seed 3 (policy sync, ")
        assert said[-1].endswith("): it is wrong")
        assert said[-2] == "replay: thus"
        assert ("and this is its story" in said) is is_quiet


def test_every_policy_meets_every_weather_and_every_source_every_number_of_texts() -> None:
    seen = [strata_of(draw(seed)) for seed in range(1000)]
    assert len({(one["policy"], one["weather"]) for one in seen}) == 3 * 4
    assert len({(one["sources"], one["texts"]) for one in seen}) == 6 * 6
    assert len({(one["rule"], one["weather"], one["at once"]) for one in seen}) >= 3 * 4 * 4
