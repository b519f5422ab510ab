"""Writes the results of an experiment beside its rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.experiments.folder import ANSWERS, REPORT, SUMMARY, Header, write_whole
from deploy.experiments.results.answers import Decode, spec_bench_answers
from deploy.experiments.results.pictures import draw_all
from deploy.experiments.results.report import page
from deploy.experiments.results.summary import summarize
from deploy.experiments.results.tables import device_table, table, to_csv
from deploy.experiments.results.words import answers, warnings
from deploy.experiments.rows import Row, file_name, with_void_arms
from proto.errors import OutputError
from proto.system_errors import cannot_write


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is written besides the summary and the pictures.

    decoders   by arm: tokens into the text of an answer
    predicted  tokens a second by arm, as the predictor says; None: it was not asked
    report     a page with everything
    command    that makes the same experiment again, for the page
    traces     where traces are, in words; empty: nowhere
    """

    decoders: Mapping[str, Decode]
    predicted: Mapping[str, float] | None
    report: bool
    command: str
    traces: str


def write_results(folder: Path, header: Header, rows: Sequence[Row], wanted: Wanted) -> str:
    """Returns what a person reads in the terminal. Raises OutputError."""
    rows = with_void_arms(rows)
    summaries = summarize(header, rows)
    write_whole(folder / SUMMARY, to_csv(summaries))
    pictures = draw_all(header, rows, summaries, wanted.predicted)
    for name, picture in pictures.items():
        write_whole(folder / name, picture)
    _write_answers(folder / ANSWERS, header, rows, wanted.decoders)
    made = [SUMMARY, *pictures]
    if wanted.report:
        text = page(header, rows, summaries, pictures, wanted.traces, command=wanted.command)
        write_whole(folder / REPORT, text)
        made.append(REPORT)
    return "\n".join(
        [
            table(summaries),
            *([f"\n{devices}\n"] if (devices := device_table(summaries)) else []),
            *answers(header, summaries),
            *warnings(header, rows, summaries),
            f"{folder}: {', '.join(made)}",
            *([wanted.traces] if wanted.traces else []),
        ]
    )


def _write_answers(
    folder: Path, header: Header, rows: Sequence[Row], decoders: Mapping[str, Decode]
) -> None:
    """Of sets with categories and numbered questions, an arm each. Raises OutputError."""
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
