"""What becomes of the texts: shown to a person as they come, or printed as JSON when complete.

Standard output carries the texts or the objects and nothing else. What stands around them (the
prompt's number, the figures) goes to standard error.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

import typer

from coordinator.api.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from coordinator.api.params import SamplingParams
from coordinator.cli.display import figures_in_short, figures_of_all, heading, summary
from coordinator.cli.harmless import harmless
from coordinator.cli.speculation_view import SpeculationView, legend
from coordinator.text.detokenization import Decoder
from coordinator.text.metrics import Metrics
from coordinator.text.session import Emit
from proto.errors import OutputError
from proto.system_errors import cannot_write


@dataclass(frozen=True, slots=True)
class Place:
    """A prompt among all: `index` of `total`; `decoder` makes one for an answer to its ids."""

    index: int
    total: int
    prompt: str | None
    decoder: Callable[[Sequence[int]], Decoder]

    def __str__(self) -> str:
        return f"prompt {self.index + 1} of {self.total}"


class Writer(Protocol):
    """Told of every text: begin, add..., then end or failed; close after the last."""

    def begin(self, place: Place) -> None:
        """The text of this prompt comes next."""

    def add(self, emit: Emit | None, part: RequestOutput) -> None:
        """A pass, and what it adds to the text; None for what was held back until the end."""

    def break_off(self) -> None:
        """No more of this text will come; what ended it is said next."""

    def end(self, whole: RequestOutput) -> None:
        """All of it."""

    def failed(self, place: Place, reason: str) -> None:
        """There will be no text for this prompt."""

    def close(self) -> None:
        """That was all."""


class JsonWriter:
    """One object per prompt, one per line."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._index = 0

    def begin(self, place: Place) -> None:
        """Remember which prompt it is."""
        self._index = place.index

    def add(self, emit: Emit | None, part: RequestOutput) -> None:
        """Nothing yet."""

    def break_off(self) -> None:
        """Half an object is never printed."""

    def end(self, whole: RequestOutput) -> None:
        """Print the object: with one text all in it, with several a list of them."""
        texts = [_as_record(made) for made in whole.outputs]
        record: dict[str, object] = {"index": self._index, "prompt": whole.prompt}
        record |= texts[0] if len(texts) == 1 else {"outputs": texts}
        record |= {"policy": self._policy, "seed": whole.seed}
        if whole.prompt_logprobs is not None:
            record["prompt_logprobs"] = [row and _named(row) for row in whole.prompt_logprobs]
        self._print(record)

    def failed(self, place: Place, reason: str) -> None:
        """An object that says so, so that lines and prompts correspond."""
        self._print({"index": place.index, "prompt": place.prompt, "error": reason})
        typer.echo(f"error: {place}: {reason}", err=True)

    def close(self) -> None:
        """Every line has been written."""

    def _print(self, record: dict[str, object]) -> None:
        write_out(json.dumps(record) + "\n")


def _as_record(made: CompletionOutput) -> dict[str, object]:
    record: dict[str, object] = {
        "text": made.text,
        "token_ids": made.token_ids,
        "token_origins": made.token_origins,
        "finish_reason": made.finish_reason,
        "stop_reason": made.stop_reason,
        "metrics": made.metrics and dataclasses.asdict(made.metrics),
    }
    if made.error is not None:
        record["error"] = made.error
    if made.logprobs is not None:
        record["logprobs"] = [_named(row) for row in made.logprobs]
        record["cumulative_logprob"] = made.cumulative_logprob
    return record


def _named(row: TokenLogprobs) -> dict[str, object]:
    return {str(token): dataclasses.asdict(entry) for token, entry in row.items()}


class TextWriter:
    """The text as it comes, with or without its speculation, then its figures."""

    def __init__(
        self,
        policy: str,
        request: SamplingParams,
        *,
        show_speculation: bool,
        verbose: bool = False,
    ) -> None:
        self._policy = policy
        self._request = request
        self._show_speculation = show_speculation
        self._verbose = verbose
        self._view: SpeculationView | None = None
        self._place: Place | None = None
        self._text_index = 0  # which of several texts of the prompt
        self._is_only = True  # one text: all of its figures; several: a line each
        self._ends_line = True  # what was written last ended with a newline
        self._done: list[Metrics] = []

    def begin(self, place: Place) -> None:
        """Say which prompt it is, if there are several, and what the colours mean."""
        self._is_only = place.total == self._request.n == 1
        self._place = place
        in_colour = wants_colour(sys.stdout)
        if self._show_speculation and place.index == 0:
            typer.echo(legend(in_colour=in_colour), err=True, color=True)
        if place.total > 1:
            typer.echo(heading(place.index, place.total, place.prompt), err=True)
        self._begin_text(0)

    def _begin_text(self, index: int) -> None:
        """The next of several texts of a prompt, or the only one."""
        self._text_index = index
        self._view = None
        if self._request.n > 1:
            typer.echo(f"text {index + 1} of {self._request.n}", err=True)

    def add(self, emit: Emit | None, part: RequestOutput) -> None:
        """Show what a pass adds."""
        if part.outputs[0].index != self._text_index:
            self._end_line()
            self._begin_text(part.outputs[0].index)
        text = part.outputs[0].text
        if self._show_speculation:
            self._view = self._view or self._new_view(part.prompt_token_ids)
            self._write(self._view.finish(text) if emit is None else self._view.push(emit, text))
        else:
            self._write(for_reader(text))

    def _new_view(self, prompt: Sequence[int]) -> SpeculationView:
        assert self._place is not None
        return view_of(self._place.decoder(prompt))

    def break_off(self) -> None:
        """End what is marked, and on a terminal the line."""
        if self._view is not None:
            self._write(self._view.close())
        if not self._ends_line and sys.stdout.isatty():
            self._write("\n")

    def end(self, whole: RequestOutput) -> None:
        """Show the figures."""
        if not self._ends_line or not whole.outputs[-1].text:
            self._write("\n")
        found = [made.metrics for made in whole.outputs if made.metrics is not None]
        self._done += found
        if self._is_only and found:
            seed = whole.seed if self._request.temperature > 0 else None
            figures = summary(found[0], policy=self._policy, seed=seed, verbose=self._verbose)
            typer.echo("\n" + figures, err=True)
        else:
            for metrics in found:
                typer.echo(figures_in_short(metrics), err=True)
            if self._request.n > 1:
                typer.echo(f"seed {whole.seed}", err=True)

    def failed(self, place: Place, reason: str) -> None:
        """Say why."""
        typer.echo(f"error: {place}: {reason}", err=True)

    def close(self) -> None:
        """The figures of all texts, if there were several."""
        if not self._is_only and self._done:
            figures = figures_of_all(self._done, policy=self._policy, verbose=self._verbose)
            typer.echo("\n" + figures, err=True)

    def _end_line(self) -> None:
        if not self._ends_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            write_out(text)
            self._ends_line = text.endswith("\n")


def for_reader(text: str) -> str:
    """A text as it is written to standard output: as it is, or without what steers a terminal."""
    return harmless(text) if sys.stdout.isatty() else text


def view_of(decoder: Decoder) -> SpeculationView:
    """A view for standard output."""
    return SpeculationView(
        decoder, in_colour=wants_colour(sys.stdout), on_terminal=sys.stdout.isatty()
    )


def write_out(text: str) -> None:
    """Write to standard output at once. Raises BrokenPipeError, OutputError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {cannot_write(error)}") from error


def wants_colour(stream: TextIO) -> bool:
    """Whether to write colours there: to a terminal, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
