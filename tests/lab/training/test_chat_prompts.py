"""Prompts from nothing but seeds: all different, the same for the same seed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.api.params import SamplingParams
from lab.training import chat_prompts
from lab.training.chat_prompts import TASKS, TOPICS, WHOLE, main, seeded
from proto.errors import ConfigurationError


def test_every_prompt_is_another_and_a_seed_gives_the_same_ones() -> None:
    made = seeded(800, 1)
    assert len(set(made)) == 800
    assert set(WHOLE) < set(made)
    assert seeded(800, 1) == made
    assert set(seeded(800, 2)) != set(made)
    most = len(TASKS) * len(TOPICS) + len(WHOLE)
    assert len(set(seeded(most, 1))) == most
    with pytest.raises(ConfigurationError, match=f"at most {most} prompts"):
        seeded(most + 1, 1)


def test_every_task_has_a_place_for_its_topic() -> None:
    assert all(task.count("{}") == 1 for task in TASKS)
    assert len(set(TOPICS)) == len(TOPICS)


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


def test_what_a_model_makes_up_is_kept_once_and_only_if_it_is_long_enough() -> None:
    class Answers:
        """A model that makes up these."""

        def generate(self, prompts: list[str], params: list[SamplingParams]) -> list[Any]:
            assert prompts == ["<user>"] * 4
            assert len({one.seed for one in params}) == 4
            said = ["How long is a year?", "Hm", "How long is a year? ", "What is a lake?"]
            return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in said]

    found = list(chat_prompts.made_up(Answers(), "<user>", 4, 1))  # type: ignore[arg-type]
    assert found == ["How long is a year?", "What is a lake?"]
