"""The race of times: what is known of it without measuring."""

from dataclasses import replace

import pytest

from lab.measure.steps_in_flight import CHAINED, CHANCES, TWO, Form, Node, Race, Times, speed

NOW = Times(5.0, 1.0)


def test_without_drafts_in_time_it_is_plain_decoding() -> None:
    late = replace(NOW, draft=1e9, between_passes=0.0)
    assert speed(late, 300, 1) == pytest.approx(1.0)
    assert speed(replace(late, between_passes=5.0), 300, 1) == pytest.approx(0.5)


def test_a_draft_is_right_by_its_rank_as_often_as_the_chances_say() -> None:
    race = Race(NOW, "one", 1)
    choices = [race._choice_of(Node(0, 0.0)) for _ in range(4000)]
    found = [choices.count(rank) / len(choices) for rank in range(len(CHANCES))]
    assert found == pytest.approx(CHANCES, abs=0.03)


@pytest.mark.parametrize("form", ["one", TWO, CHAINED])
def test_drafts_are_accepted_and_the_same_seed_tells_the_same_story(form: Form) -> None:
    races = [Race(NOW, form, 3) for _ in range(2)]
    assert races[0].run(500) == races[1].run(500) > 1.5
    assert races[0].num_tokens > 1.5 * races[0].num_passes  # drafts are accepted


def test_less_time_on_the_way_is_never_much_worse() -> None:
    before = speed(NOW, 2000, 2)
    for name in ("between_passes", "between_steps", "verdict", "draft"):
        assert speed(replace(NOW, **{name: 0.0}), 2000, 2) > before * 0.99
