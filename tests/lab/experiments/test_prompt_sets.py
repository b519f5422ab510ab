"""Prompt sets as benchmarks write them, and the turns of a conversation."""

import json
from pathlib import Path

import pytest

from coordinator.api.chat import ChatTemplate
from coordinator.api.prompts import Tokenization
from lab.experiments.command import SHIPPED
from lab.experiments.prompt_sets import Conversation, Prompt, read
from proto.errors import ConfigurationError
from proto.installation import MODELS


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_names_and_categories_are_those_of_the_set(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "set.jsonl",
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        {"question_id": 81, "category": "writing", "turns": ["One.", "Two."]},
    )
    assert read(path, None) == [
        Prompt(("def f():\n",), "HumanEval/0", ""),
        Prompt(("One.", "Two."), "81", "writing"),
    ]


def test_plain_text_is_a_prompt_per_line_and_a_limit_takes_them_from_all_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "set.txt"
    path.write_text("".join(f"line {number}\n" for number in range(10)))
    assert [prompt.turns for prompt in read(path, 3)] == [("line 0",), ("line 3",), ("line 6",)]
    assert len(read(path, 99)) == 10


@pytest.mark.parametrize("record", [{"prompt": 1}, {"turns": []}, {"turns": ["a", 2]}, [1], {}])
def test_a_record_without_a_prompt_is_refused_with_its_line(tmp_path: Path, record: object) -> None:
    path = lines(tmp_path / "set.jsonl", {"prompt": "a"}, record)
    with pytest.raises(ConfigurationError, match=r"set\.jsonl, line 2: expected an object"):
        read(path, None)


def tokenization() -> Tokenization:
    found = Tokenization.of_model(str(MODELS / "target"), None)
    assert found is not None
    return found


def test_a_turn_follows_the_answer_to_the_one_before() -> None:
    tokens = tokenization()
    talk = Conversation(Prompt(("a = 1", "b = 2")), tokens, max_tokens=99, template=None)
    first = talk.next_turn()
    assert first == tokens.encode("a = 1")
    talk.answered((7, 8))
    assert not talk.is_over
    second = talk.next_turn()
    assert second[: len(first) + 2] == (*first, 7, 8)
    assert tokens.decode(second[len(first) + 2 :]) == "\n\nb = 2\n\n"
    assert talk.is_over


def test_a_chat_template_is_given_all_that_was_said() -> None:
    tokens = tokenization()
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {}, ""
    )
    talk = Conversation(Prompt(("one two", "b")), tokens, max_tokens=1, template=template)
    first = tokens.decode(talk.next_turn())
    assert first.startswith("<user>")
    assert len(first) < len("<user>one two"), "a turn is cut to its first tokens"
    talk.answered(tokens.encode("yes", special_tokens=False))
    assert tokens.decode(talk.next_turn()).startswith(first + "<assistant>yes<user>")


def test_the_prompts_that_ship_have_names_and_categories() -> None:
    found = read(SHIPPED / "prompts.jsonl", None)
    assert len({prompt.name for prompt in found}) == len(found) >= 20
    assert {prompt.category for prompt in found} == {"function", "class"}
