"""Writes the results of an experiment into its folder."""

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.cli.wrapping import wrapped
from lab.experiments.folder import ANSWERS, REPORT, SUMMARY, TABLE, Header, write_whole
from lab.experiments.results.lateness import with_void_arms
from lab.experiments.results.markdown import markdown
from lab.experiments.results.pictures import draw_all
from lab.experiments.results.report import TERMINAL, device_table, page, table, to_csv
from lab.experiments.results.summary import sound, summarize
from lab.experiments.results.words import answers, warnings
from lab.experiments.rows import Row, file_name
from proto.errors import OutputError
from proto.system import cannot_write

# -- answers ---------------------------------------------------------------------------------------

# Writes the texts of an arm in Spec-Bench's file format for answers, so that its evaluation
# can read them.
#
# A line per question: {question_id, category, model_id, answer_id, tstamp, choices}. A choice is
# the question answered once: `turns`, `decoding_steps`, `new_tokens` and `wall_time` have an entry
# per turn of the conversation, `accept_lengths` has the tokens of every pass of all turns in a row.
# Spec-Bench's evaluation takes the first choice: sum(new_tokens) / sum(wall_time) is the speed of a
# question, the mean of all accept_lengths the mean accepted tokens.

Decode = Callable[[Sequence[int]], str]


def spec_bench_answers(header: Header, rows: Sequence[Row], arm: str, decode: Decode) -> str:
    """Return an arm's answers as JSON Lines in Spec-Bench's format, in the order of the prompts.

    Each time that a question was answered is one choice. Void rows have no times, and are left out.
    """
    mine = sound([row for row in rows if row.arm == arm and row.stage == "main"])
    questions: dict[str, list[Row]] = defaultdict(list)
    # A cell may have several prompts at the same time: each of them answers its own question.
    for row in sorted(mine, key=lambda row: (row.repetition, row.text, row.prompt, row.turn)):
        questions[row.prompt_id or str(row.prompt)].append(row)
    return "".join(
        json.dumps(_question(header, asked, decode), ensure_ascii=False) + "\n"
        for asked in questions.values()
    )


def _question(header: Header, rows: Sequence[Row], decode: Decode) -> dict[str, Any]:
    """Return the record of one question with all of its answers."""
    first = rows[0]
    answers: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        answers[row.repetition, row.text, row.prompt].append(row)
    name = f"{header.digest} {first.arm} {first.prompt_id or first.prompt}"
    return {
        "question_id": int(first.prompt_id) if first.prompt_id.isdecimal() else first.prompt_id,
        "category": first.category,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, name).hex,  # the same whenever it is written
        "model_id": first.arm,
        "choices": [_choice(index, turns, decode) for index, turns in enumerate(answers.values())],
        "tstamp": min(map(_began, rows)),
    }


def _choice(index: int, turns: Sequence[Row], decode: Decode) -> dict[str, Any]:
    """Return the record of one answer (all turns of a conversation)."""
    return {
        "index": index,
        "turns": [decode(row.tokens) for row in turns],
        "decoding_steps": [len(row.accept_lengths) for row in turns],
        "new_tokens": [len(row.tokens) for row in turns],
        "wall_time": [row.wall_s for row in turns],
        "accept_lengths": [length for row in turns for length in row.accept_lengths],
    }


def _began(row: Row) -> float:
    """Return when the text of a row began, in seconds since 1970."""
    at = datetime.fromisoformat(row.at)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options of writing results, besides the summary and the pictures.

    decoders   by arm: the function that turns token ids into the text of an answer
    predicted  predicted tokens per second by arm; None: not wanted
    report     also write a page with everything
    command    the command that runs the same experiment again, for the page
    traces     words that say where traces are; empty: there are none
    """

    decoders: Mapping[str, Decode]
    predicted: Mapping[str, float] | None
    report: bool
    command: str
    traces: str


def write_results(folder: Path, header: Header, rows: Sequence[Row], wanted: Wanted) -> str:
    """Write all result files; return the text for the terminal. Raises OutputError."""
    rows = with_void_arms(rows, {arm.name: arm.baseline for arm in header.arms})
    summaries = summarize(header, rows)
    write_whole(folder / SUMMARY, to_csv(summaries))
    write_whole(folder / TABLE, markdown(header, summaries))
    pictures = draw_all(header, rows, summaries, wanted.predicted)
    for name, picture in pictures.items():
        write_whole(folder / name, picture)
    _write_answers(folder / ANSWERS, header, rows, wanted.decoders)
    made = [SUMMARY, TABLE, *pictures]
    if wanted.report:
        text = page(header, rows, summaries, pictures, wanted.traces, command=wanted.command)
        write_whole(folder / REPORT, text)
        made.append(REPORT)
    return "\n".join(
        [
            table(summaries),
            *([f"\n{devices}\n"] if (devices := device_table(summaries)) else []),
            *_wrapped(answers(header, summaries)),
            *_wrapped(warnings(header, rows, summaries)),
            *_wrapped([f"{folder}: {', '.join(made)}"]),
            *_wrapped([wanted.traces] if wanted.traces else []),
        ]
    )


def _wrapped(sentences: Iterable[str]) -> list[str]:
    return [line for one in sentences for line in wrapped(one, TERMINAL)]


def _write_answers(
    folder: Path, header: Header, rows: Sequence[Row], decoders: Mapping[str, Decode]
) -> None:
    """Write the answers of each arm, if prompts have categories and numbers (as in Spec-Bench).

    Raises OutputError.
    """
    if not any(row.category and row.prompt_id.isdecimal() for row in rows):
        return
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {cannot_write(error)}") from error
    for arm in dict.fromkeys(
        row.arm for row in rows if row.stage == "main" and row.arm in decoders
    ):
        text = spec_bench_answers(header, rows, arm, decoders[arm])
        write_whole(folder / f"{file_name(arm)}.jsonl", text)
