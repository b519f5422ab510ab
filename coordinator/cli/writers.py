"""Writes the texts: shown to a person as they come, or printed as JSON when complete.

Standard output gets only the texts or the JSON objects. Everything around them (the prompt's
number, the figures) goes to standard error.
"""

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Protocol, TextIO

import typer
from rich.console import Console
from rich.status import Status

from coordinator.api.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.cli.harmless import harmless
from coordinator.cli.loading_screen import Progress as Progress
from coordinator.cli.speculation_view import SpeculationView, legend
from coordinator.cli.wrapping import WIDTH as WIDTH
from coordinator.cli.wrapping import for_stderr
from coordinator.cluster.node import Node
from coordinator.launching.load import BUSY_CORES, Load
from coordinator.text.detokenization import Decoder
from coordinator.text.metrics import MODEL, TITLES, Metrics, Simulated
from coordinator.text.session_events import Emit, EmitRead
from proto.errors import OutputError
from proto.messages import Role
from proto.system import cannot_write

# -- display ---------------------------------------------------------------------------------------

# The figures that a person sees after the text, on stderr. docs/screens.md explains every word.


def summary(
    metrics: Metrics,
    *,
    policy: str,
    seed: int | None,
    verbose: bool = False,
    others: float = 0.0,
) -> str:
    """Return the figures of one text, in lines of at most 80 columns.

    Two lines; a third one for a long seed or a lost drafter; lines where drafts brought nothing or
    the machine was not quiet; a note if hardware is simulated. `verbose` adds all other figures.

    others  processor cores that other programs used meanwhile
    """
    m = metrics
    # Without drafts the text was decoded plainly, so there is no speed-up to show.
    worth = [f"{m.speedup:.1f} x plain"] if m.speedup and m.num_draft_tokens else []
    words = [_tokens(m.num_tokens), *_speed(m), *worth, *_accepted(m)]
    lost = m.drafter_lost_at
    more = [] if lost is None else [f"the drafter was lost after {_tokens(lost)}"]
    # A random seed is long.
    is_long = len(", ".join([*words, *_seed(seed)])) > WIDTH
    (more if is_long else words).extend(_seed(seed))
    lines = [", ".join(words), ", ".join((_reading(m), *_writing(m)))]
    if more:
        lines.append(", ".join(more))
    lines += doubts(m, others)
    if verbose:
        lines += _details(m, policy)
    if m.simulated is not None:
        lines.append(simulation(m.simulated))
    return "\n".join(lines)


FEW_PASSES = 8  # fewer say nothing about what drafts bring
SLOWER = 0.95  # a ratio to plain decoding that is shown as 0.9 or less
LEAST_S = 0.1  # the system counts the load of others in steps of 10 ms


def doubts(m: Metrics, others: float) -> list[str]:
    """Return a line why drafts did not pay, and one if x plain was measured beside other programs.

    others  processor cores that other programs used meanwhile
    """
    lines = []
    has_ratio = m.speedup > 0 and m.num_draft_tokens > 0
    num_rested, num_passes = m.fallbacks.get("resting", 0), m.num_target_passes
    if 2 * num_rested > num_passes:
        lines.append(
            f"the drafter rested in {num_rested} of {num_passes} passes: the target alone is about "
            "as fast"
        )
    elif has_ratio and m.speedup < SLOWER and num_passes >= FEW_PASSES and m.writing_s > 0:
        num_tokens = m.writing_tokens_per_second * m.writing_s / (num_passes - 1)
        alone_ms = 1e3 * m.speedup / m.writing_tokens_per_second
        lines.append(
            f"drafts did not pay: {num_tokens:.1f} tokens took "
            f"{1e3 * m.writing_s / (num_passes - 1):.1f} ms, alone "
            f"{num_tokens * alone_ms:.1f} ms (--policy ar)"
        )
    if has_ratio and others > BUSY_CORES and m.elapsed_s >= LEAST_S and m.simulated is None:
        lines.append(
            f"other programs used {others:.1f} cores meanwhile: on a quiet machine x plain differs"
        )
    return lines


def rounded(number: float) -> str:
    """Return a number with three digits, or all digits before the point of a larger one."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


def shown_time(seconds: float) -> str:
    """Return a duration for people: 31 ms, 1.24 s."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{rounded(seconds)} s"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _speed(m: Metrics) -> list[str]:
    """Return the speed in words; [] where all tokens came at once."""
    return [f"{rounded(m.writing_tokens_per_second)} tokens/s"] if m.writing_s > 0 else []


def _accepted(m: Metrics) -> list[str]:
    return [f"{m.acceptance_rate * 100:.0f} % of drafts accepted"] if m.num_draft_tokens else []


def _seed(seed: int | None) -> list[str]:
    return [] if seed is None else [f"seed {seed}"]


def _reading(m: Metrics) -> str:
    took = shown_time(m.time_to_first_token_s)
    return f"prompt: {_tokens(m.num_prompt_tokens)} in {took}" + (
        f" ({rounded(m.prompt_tokens_per_second)} tokens/s)" if m.prompt_tokens_per_second else ""
    )


def _writing(m: Metrics) -> list[str]:
    passes = "1 pass" if m.num_target_passes == 1 else f"{m.num_target_passes} passes"
    return [f"text: {passes} in {shown_time(m.writing_s)}"] if m.writing_s > 0 else []


def _details(m: Metrics, policy: str) -> list[str]:
    """Return the lines of figures that only --verbose shows: speed, host time, drafts."""
    lines = [
        f"in all {m.tokens_per_second:.1f} tokens/s in {m.elapsed_s:.2f} s, policy {policy}",
        f"target busy {m.target_busy:.0%}, host {m.host_ms_per_pass:.2f} ms a pass",
    ]
    if m.num_draft_tokens:
        lines.append(
            f"{m.tokens_per_pass:.2f} tokens a pass "
            f"({m.num_accepted_tokens} of {m.num_draft_tokens} drafts accepted)"
        )
    lines += _by_source(m.accepted_by_source, m.hits_by_source)
    if m.speculative_decoding is not None:
        lines.append("; ".join(_what_failed(m)))
    return lines


def how_far(read: EmitRead) -> str:
    """Return how far the target has read a prompt, in words."""
    return f"prompt: {read.num_read:,} of {read.num_prompt:,} tokens read"


def engines(nodes: Iterable[Node]) -> str:
    """Return what ran the models (backend, dtype, device), in one line."""
    return "; ".join(
        f"{hello.role}: {hello.backend}, {hello.dtype}, {hello.device}"
        + (f", {hello.home_drafter}" if hello.home_drafter else "")
        + (", exact" if hello.bits and hello.role is Role.TARGET else "")
        for node in nodes
        if (hello := node.hello) is not None
    )


def ran_on(pair: Pair, *, compares: bool = True, with_forms: bool = False) -> list[str]:
    """Return what ran the models, in a line, and what `x plain` compares with, in another.

    compares    False: it was not shown
    with_forms  True: also what computed the target's passes
    """
    lines = [engines(pair.service.registry.nodes)]
    if with_forms:
        lines.append(f"target computed by {pair.hello(Role.TARGET).forms}")
    if compares:
        hello, also = pair.hello(Role.TARGET), pair.service.alone_on
        where = hello.device
        if also not in ("", where):
            where = f"the faster of {where} and {also}"
        lines.append(f"plain: the target alone, {hello.dtype}, on {where}")
    return lines


def _by_source(accepted: Mapping[str, int], hits: Mapping[str, int]) -> list[str]:
    """Return whose drafts were accepted, in lines of 80 columns; [] if all were the drafter's."""
    if not set(accepted) - {MODEL}:
        return []
    words = [
        f"{TITLES.get(name, f'drafter {name}')} {number} ({hits.get(name, 0)} hits)"
        for name, number in sorted(accepted.items(), key=lambda item: -item[1])
    ]
    line = f"accepted drafts by source: {', '.join(words)}"
    return [fill(line, WIDTH, subsequent_indent="  ", break_long_words=False)]


def _what_failed(m: Metrics) -> list[str]:
    """Return how often drafts were of use, and why they were not, in words."""
    misses = ", ".join(f"{number} {why}" for why, number in m.misses.items() if number)
    words = [f"hit rate {m.hit_rate:.0%}" + (f", misses: {misses}" if misses else "")]
    if fallbacks := ", ".join(f"{number} {cause}" for cause, number in m.fallbacks.items()):
        words.append(fallbacks)
    if m.num_reopened:
        words.append(f"{m.num_reopened} reopened")
    return words


def simulation(simulated: Simulated) -> str:
    """Return a note that figures are of simulated hardware, in lines of at most 80 columns."""
    words = f"SIMULATED: {simulated.words}"
    if simulated.verdict:
        words += f"; {simulated.verdict}"
    return fill(words, WIDTH, subsequent_indent="  ", break_long_words=False)


def heading(index: int, total: int, prompt: str | None) -> str:
    """Return the line of 80 columns above the text of one of several prompts."""
    shown = "" if prompt is None else harmless(" ".join(prompt.split()))
    line = f"── {index + 1} of {total} ── {shown}"
    line = line if len(line) < WIDTH - 3 else line[: WIDTH - 4] + "…"
    return "\n" + line + " " + "─" * (WIDTH - 1 - len(line))


def figures_in_short(metrics: Metrics) -> str:
    """Return the figures of one of several texts, in one line."""
    return ", ".join((_tokens(metrics.num_tokens), *_speed(metrics), *_accepted(metrics)))


def figures_of_all(done: Sequence[Metrics], *, policy: str, verbose: bool = False) -> str:
    """Return the figures of all texts of one call together, from its start."""
    num_tokens = sum(m.num_tokens for m in done)
    num_passes = sum(m.num_target_passes for m in done)
    # Texts run at the same time, and all were queued at once, so this is the time from first to
    # last.
    elapsed_s = max(m.queued_s + m.elapsed_s for m in done) - min(m.queued_s for m in done)
    accepted, drafted = (
        sum(m.num_accepted_tokens for m in done),
        sum(m.num_draft_tokens for m in done),
    )
    line = f"{len(done)} texts, {num_tokens} tokens, {rounded(num_tokens / elapsed_s)} tokens/s"
    if drafted:
        line += f", {accepted / drafted * 100:.0f} % of drafts accepted"
    if num_lost := sum(m.drafter_lost_at is not None for m in done):
        line += f"\nthe drafter was lost: {num_lost} texts were without it"
    line += f"\nall of it, prompts and texts, in {shown_time(elapsed_s)}"
    if drafted:
        line += f" ({accepted} of {drafted} drafts accepted)"
    if verbose:
        line += f"\npolicy {policy}, {num_passes} target passes"
        accepted_by, hits_by = Counter[str](), Counter[str]()
        for one in done:
            accepted_by.update(one.accepted_by_source)
            hits_by.update(one.hits_by_source)
        line += "".join(f"\n{more}" for more in _by_source(accepted_by, hits_by))
    # Overruns are counted from the start of the call, so the last text to end has all of them.
    simulated = [m.simulated for m in done if m.simulated is not None]
    if simulated:
        line += "\n" + simulation(max(simulated, key=lambda one: one.num_forwards))
    return line


# -- writers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """Which prompt of how many this is; `decoder` makes a decoder from the prompt's token ids."""

    index: int
    total: int
    prompt: str | None
    decoder: Callable[[Sequence[int]], Decoder]

    def __str__(self) -> str:
        return f"prompt {self.index + 1} of {self.total}"


class Writer(Protocol):
    """Gets every text: begin, add..., then end, failed or break_off; close after the last."""

    def begin(self, place: ShownPrompt) -> None:
        """Called before the text of this prompt comes."""

    def add(self, emit: Emit | None, part: RequestOutput) -> None:
        """Write what a pass adds to the text; `emit` is None at the end of the text."""

    def reading(self, read: EmitRead) -> None:
        """Called now and then while the target reads a long prompt."""

    def break_off(self) -> None:
        """Called when no more of this text will come; the error is reported next."""

    def end(self, whole: RequestOutput) -> None:
        """Called when all texts of the prompt are complete."""

    def failed(self, place: ShownPrompt, reason: str) -> None:
        """Called if the prompt was refused for this reason: there will be no text."""

    def close(self) -> None:
        """Called when there are no more prompts."""


class JsonWriter:
    """Prints one JSON object per prompt, on one line."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._index = 0

    def begin(self, place: ShownPrompt) -> None:
        """Remember the number of the prompt whose text comes next."""
        self._index = place.index

    def add(self, emit: Emit | None, part: RequestOutput) -> None:
        """Do nothing: the object is printed at the end."""

    def reading(self, read: EmitRead) -> None:
        """Do nothing: programs read the object alone."""

    def break_off(self) -> None:
        """Do nothing: half an object is never printed."""

    def end(self, whole: RequestOutput) -> None:
        """Print the object: with the one text in it, or with a list of several."""
        texts = [_as_record(made) for made in whole.outputs]
        record: dict[str, object] = {"index": self._index, "prompt": whole.prompt}
        record |= texts[0] if len(texts) == 1 else {"outputs": texts}
        record |= {"policy": self._policy, "seed": whole.seed}
        if whole.prompt_logprobs is not None:
            record["prompt_logprobs"] = [row and _named(row) for row in whole.prompt_logprobs]
        self._print(record)

    def failed(self, place: ShownPrompt, reason: str) -> None:
        """Print an object with the error, so that lines and prompts correspond."""
        self._print({"index": place.index, "prompt": place.prompt, "error": reason})
        typer.echo(for_stderr(f"error: {place}: {reason}"), err=True)

    def close(self) -> None:
        """Do nothing: every line has been written."""

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
    """Shows the text as it comes, with or without its speculation, then its figures."""

    def __init__(
        self,
        policy: str,
        params: SamplingParams,
        *,
        show_speculation: bool,
        verbose: bool = False,
    ) -> None:
        self._policy = policy
        self._params = params
        self._show_speculation = show_speculation
        self._verbose = verbose
        self._view: SpeculationView | None = None
        self._place: ShownPrompt | None = None
        self._text_index = 0  # which of several texts of the prompt
        self._is_only = True  # one text gets all of its figures; several get a line each
        self._ends_line = True  # the last character written was a newline
        self._done: list[Metrics] = []
        self._status: Status | None = None  # shows how far the prompt was read
        self._load: Load | None = None  # of other programs, since the first prompt

    def begin(self, place: ShownPrompt) -> None:
        """Show which of several prompts it is, and what the colours mean."""
        self._is_only = place.total == self._params.n == 1
        self._load = self._load or Load()
        self._place = place
        in_colour = wants_colour(sys.stdout)
        if self._show_speculation and place.index == 0:
            typer.echo(legend(in_colour=in_colour), err=True, color=True)
        if place.total > 1:
            typer.echo(heading(place.index, place.total, place.prompt), err=True)
        self._begin_text(0)

    def _begin_text(self, index: int) -> None:
        """Begin the next text of a prompt; if there are several, show its number."""
        self._text_index = index
        self._view = None
        if self._params.n > 1:
            typer.echo(f"text {index + 1} of {self._params.n}", err=True)

    def add(self, emit: Emit | None, part: RequestOutput) -> None:
        """Write the text that a pass adds, coloured by who drafted it if that was asked for."""
        self._end_reading()
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

    def reading(self, read: EmitRead) -> None:
        """Show on a terminal how far the prompt was read, until the first of its text comes."""
        if self._status is None:
            console = Console(stderr=True)
            if not console.is_terminal:
                return
            self._status = console.status("")
            self._status.start()
        self._status.update(how_far(read))

    def _end_reading(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def break_off(self) -> None:
        """Close open marks, and on a terminal end the line."""
        self._end_reading()
        if self._view is not None:
            self._write(self._view.close())
        if not self._ends_line and sys.stdout.isatty():
            self._write("\n")

    def end(self, whole: RequestOutput) -> None:
        """End the text's line and show its figures."""
        if not self._ends_line or not whole.outputs[-1].text:
            self._write("\n")
        found = [made.metrics for made in whole.outputs if made.metrics is not None]
        self._done += found
        if self._is_only and found:
            seed = whole.seed if self._params.temperature > 0 else None
            figures = summary(
                found[0],
                policy=self._policy,
                seed=seed,
                verbose=self._verbose,
                others=0.0 if self._load is None else self._load.cores(),
            )
            typer.echo("\n" + for_stderr(figures), err=True)
        else:
            for metrics in found:
                typer.echo(for_stderr(figures_in_short(metrics)), err=True)
            if self._params.n > 1:
                typer.echo(f"seed {whole.seed}", err=True)

    def failed(self, place: ShownPrompt, reason: str) -> None:
        """Show why the prompt was refused."""
        typer.echo(for_stderr(f"error: {place}: {reason}"), err=True)

    def close(self) -> None:
        """Show the figures of all texts, if there were several."""
        if not self._is_only and self._done:
            figures = figures_of_all(self._done, policy=self._policy, verbose=self._verbose)
            typer.echo("\n" + for_stderr(figures), err=True)

    @property
    def compares(self) -> bool:
        """True if `x plain` was shown."""
        return self._is_only and any(m.speedup and m.num_draft_tokens for m in self._done)

    def _end_line(self) -> None:
        if not self._ends_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            write_out(text)
            self._ends_line = text.endswith("\n")


def for_reader(text: str) -> str:
    """Return a text for standard output; on a terminal without control characters."""
    return harmless(text) if sys.stdout.isatty() else text


def view_of(decoder: Decoder) -> SpeculationView:
    """Return a speculation view for standard output."""
    return SpeculationView(
        decoder, in_colour=wants_colour(sys.stdout), on_terminal=sys.stdout.isatty()
    )


def write_out(text: str) -> None:
    """Write to standard output and flush. Raises BrokenPipeError, OutputError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {cannot_write(error)}") from error


def wants_colour(stream: TextIO) -> bool:
    """True if the stream is a terminal that shows colours and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
