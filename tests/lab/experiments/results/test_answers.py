"""Answers, read as Spec-Bench's evaluation reads them."""

import json
from typing import Any

import pytest

from lab.experiments.results.writing import spec_bench_answers
from tests.lab.experiments.results.made_up import arm, header, row

HEADER = header([arm("ar", ""), arm("sync")])
ROWS = [
    row(
        "sync",
        prompt,
        repetition,
        turn=turn,
        num_rows=2,
        prompt_id=str(81 + prompt),
        category="writing",
        tokens=tuple(range(4 + turn)),
        wall_s=0.5 + turn,
        accept_lengths=(3, 1 + turn),
    )
    for prompt in (1, 0)
    for repetition in (0, 1)
    for turn in (1, 0)
]


def words(tokens: object) -> str:
    return "-".join(map(str, tokens)) if isinstance(tokens, tuple) else ""


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_question_is_a_line_with_a_list_over_its_turns() -> None:
    first, second = read(spec_bench_answers(HEADER, ROWS, "sync", words))
    assert (first["question_id"], second["question_id"]) == (81, 82)
    assert (first["category"], first["model_id"]) == ("writing", "sync")
    assert first["answer_id"] != second["answer_id"]
    assert first["tstamp"] == 1767225600.0
    choice = {
        "index": 0,
        "turns": ["0-1-2-3", "0-1-2-3-4"],
        "decoding_steps": [2, 2],
        "new_tokens": [4, 5],
        "wall_time": [0.5, 1.5],
        "accept_lengths": [3, 1, 3, 2],
    }
    assert first["choices"] == [choice, choice | {"index": 1}]


def test_the_sums_are_those_of_its_evaluation() -> None:
    speeds, lengths = [], []
    for line in spec_bench_answers(HEADER, ROWS, "sync", words).splitlines():
        choice = json.loads(line)["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths.extend(choice["accept_lengths"])
    assert speeds == pytest.approx([9 / 2, 9 / 2])
    assert sum(lengths) / len(lengths) == pytest.approx(18 / 8)
    assert sum(lengths) == sum(len(one.tokens) for one in ROWS if one.repetition == 0)


def test_texts_that_were_written_at_once_answer_their_own_questions() -> None:
    rows = [
        row(
            "sync", prompt, text=text, num_rows=2, prompt_id=f"{(prompt + text) % 2}", wall_s=prompt
        )
        for prompt in (0, 1)
        for text in (0, 1)
    ]
    found = read(spec_bench_answers(HEADER, rows, "sync", words))
    assert [one["question_id"] for one in found] == [0, 1]
    times = [[choice["wall_time"] for choice in one["choices"]] for one in found]
    assert times == [[[0], [1]], [[1], [0]]]


def test_void_rows_and_other_arms_are_no_answers() -> None:
    rows = [row("ar", 0), row("sync", 0, void="late"), row("sync", 1, stage="sweep")]
    assert spec_bench_answers(HEADER, rows, "sync", words) == ""
    (line,) = read(
        spec_bench_answers(HEADER, [*rows, row("sync", 2, prompt_id="q7")], "sync", words)
    )
    assert line["question_id"] == "q7"
