"""Prompts from nothing but seeds: all different, the same for the same seed."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.api.params import SamplingParams
from lab.training import chat_prompts
from lab.training.chat_prompts import (
    FILLINGS,
    PLACE,
    TASKS,
    WHOLE,
    main,
    seeded,
    with_articles,
)
from proto.installation import ROOT


def test_every_prompt_is_another_and_a_seed_gives_the_same_ones() -> None:
    made = seeded(3000, 1)
    assert len(set(made)) == len(made) == 3000
    assert set(WHOLE) < set(made)
    assert seeded(3000, 1) == made
    assert len(set(seeded(3000, 2)) & set(made)) < 1000
    assert not [text for text in made if "{" in text or "}" in text or " a a" in text]


def test_every_place_of_a_task_has_a_list_with_enough_entries() -> None:
    tasks = [task for kind in TASKS.values() for task in kind]
    assert len(set(tasks)) == len(tasks)
    places = [Counter(PLACE.findall(task)) for task in tasks]
    assert set().union(*places) == set(FILLINGS)
    for names in places:
        assert all(len(set(FILLINGS[name])) >= number for name, number in names.items())


def test_the_questions_that_measure_are_not_among_the_prompts() -> None:
    file = ROOT / "lab" / "experiments" / "questions.jsonl"
    asked = {json.loads(line)["prompt"] for line in file.read_text().splitlines()}
    assert not asked & set(seeded(5000, 1))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("a apple and a pear", "an apple and a pear"),
        ("A umbrella for a used car", "An umbrella for a used car"),
        ("via air", "via air"),
    ],
)
def test_an_article_fits_the_word_behind_it(text: str, right: str) -> None:
    assert with_articles(text) == right


def test_the_file_has_a_prompt_in_each_line(tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    usual = ["--target", "nothing", "--made-up", "0", "--seeded", "60", "--out", str(out)]
    assert main(usual) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == sorted(seeded(60, 1))


def test_a_target_without_a_chat_template_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target", "toy", "--out", str(tmp_path / "prompts.jsonl")]) == 1
    assert "it has no chat template" in capsys.readouterr().err


def test_what_a_model_makes_up_is_kept_once_and_if_it_is_long_enough_and_ended() -> None:
    class Answers:
        """A model that makes up these."""

        def generate(self, prompts: list[str], params: list[SamplingParams]) -> list[Any]:
            assert prompts == ["<user>"] * 5
            assert len({one.seed for one in params}) == 5
            said = ["How long is a year?", "Hm", "How long is a year? ", "What is a lake?"]
            ended = [SimpleNamespace(text=text, finish_reason="stop") for text in said]
            longer = SimpleNamespace(text="Tell me of every lake, such", finish_reason="length")
            return [SimpleNamespace(outputs=[answer]) for answer in (*ended, longer)]

    found = list(chat_prompts.made_up(Answers(), "<user>", 5, 1))  # type: ignore[arg-type]
    assert found == ["How long is a year?", "What is a lake?"]
