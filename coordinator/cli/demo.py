"""`python -m coordinator demo`: plain decoding, then with drafts, and how much faster that is.

A chat model answers a question, the toy continues a piece of Python. With `--fetch`, as `make demo`
calls it, the chat model is fetched first; without it the toy is shown.

Both are measured first, several times in alternation, and nothing is printed meanwhile. Then the
run of median speed of each is shown.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated

import typer
from rich.console import Console

from coordinator.api import prompts
from coordinator.api.config import ALONE, PairConfig, SpeculationConfig
from coordinator.api.models.from_package import fetch as fetch_smollm2
from coordinator.api.models.named import CHOICE, NAME, SMOLLM2, TOY, is_there
from coordinator.api.models.settings import located
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request, Step
from coordinator.cli.flags import Flags, with_settings
from coordinator.cli.loading_screen import models_of
from coordinator.cli.speculation_view import SpeculationView, legend
from coordinator.cli.wrapping import for_stderr
from coordinator.cli.writers import (
    Progress,
    doubts,
    for_reader,
    ran_on,
    rounded,
    shown_time,
    simulation,
    view_of,
    wants_colour,
    write_out,
)
from coordinator.launching.devices import default_devices
from coordinator.launching.load import Load
from coordinator.text.metrics import Metrics
from proto.errors import ModelError, TextError

# -- replay ----------------------------------------------------------------------------------------

# Shows a measured text again at a speed that one can follow.
#
# Both texts are slowed down by the same factor, so the ratio of their speeds stays the same.


@dataclass(frozen=True, slots=True)
class Take:
    """One measured text, with the times of its steps.

    steps    pairs: seconds since the text was asked for, and the step that came then
    metrics  the metrics of the whole text
    """

    steps: tuple[tuple[float, Step], ...]
    metrics: Metrics

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens of the text."""
        steps = (step for _, step in self.steps)
        return tuple(token for step in steps for token in step.part.outputs[0].token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second over the whole time, that of the prompt included."""
        return self.metrics.tokens_per_second


def middle(takes: Sequence[Take]) -> Take:
    """Return the take of median speed; of an even number the slower of the middle two."""
    speed = median_low(take.tokens_per_second for take in takes)
    return next(take for take in takes if take.tokens_per_second == speed)


def slowdown(plain: Take, pace_s: float) -> float:
    """Return the factor by which both takes are slowed down, so that a plain pass takes `pace_s` s.

    0 means no delay at all: as fast as it can be written. Otherwise the factor is at least 1.
    """
    if pace_s == 0:
        return 0.0
    return max(1.0, pace_s * plain.tokens_per_second)


def scenes(take: Take, factor: float, show: Callable[[Step], str]) -> Iterator[tuple[float, str]]:
    """Yield (seconds after the first step, text to show) for each step, slowed down by `factor`."""
    first = take.steps[0][0]
    for at, step in take.steps:
        yield (at - first) * factor, show(step)


def first_difference(takes: Sequence[Take]) -> int | None:
    """Return the index of the first token in which the takes differ; None if they are equal."""
    texts = [take.token_ids for take in takes]
    for index, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return index
    lengths = {len(text) for text in texts}
    return min(lengths) if len(lengths) > 1 else None


def verdict(plain: Take, drafted: Take, difference: int | None) -> str:
    """Return the last line: the speed-up, and whether the texts are identical."""
    speed = f"{drafted.tokens_per_second / plain.tokens_per_second:.1f} x plain"
    if difference is None:
        return f"{speed}, text identical"
    return f"{speed}, but the text DIFFERS from token {difference + 1} on"


# -- command ---------------------------------------------------------------------------------------

# The toy writes plausible code here; this prompt was chosen among a few hundred. The figures that
# the demo shows are measured on the user's machine.
PROMPT = '''def parse_header(line):
    """Return the name and the value of a header."""
    if'''
OF_TOY = {"temperature": 0.5, "seed": 19, "max_tokens": 97}
QUESTION = "Write a class in Python for a bank account, and show how to use it."
OF_CHAT = {"temperature": 0.0, "seed": 0, "max_tokens": 160}
PACE_S = 0.08
NUM_WARM, NUM_TAKES = 1, 3  # takes of each: to warm up, and at most to count
ENOUGH_S = 6.0  # after this time of measuring, no further round is begun
EXIT_DIFFERS = 1
BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"

Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT", help="A question, or a text to continue. Default: one of our own."
    ),
]
Fetch = Annotated[
    bool,
    typer.Option(
        "--fetch",
        help="Fetch the chat model smollm2 first (93 MB, once). `make demo` does. If it cannot be "
        "had, the toy is shown.",
    ),
]
Pace = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="How long each pass of the target alone is shown. The text with drafts is slowed down "
        f"by the same factor. 0: nothing is slowed down. Default: {PACE_S} on a terminal, else 0.",
        min=0.0,
        max=10.0,
    ),
]


@with_settings
def demo(
    *,
    prompt: Prompt = None,
    pair: Annotated[
        PairConfig,
        Flags(
            *("target", "drafter", "target_device", "drafter_device", "dtype", "backend"),
            max_num_seqs=1,
        ),
    ],
    params: Annotated[
        SamplingParams,
        Flags(
            *("temperature", "seed", "max_tokens"),
            **dict.fromkeys(OF_TOY),
        ),
    ],
    pace: Pace = None,
    fetch: Fetch = False,
) -> None:
    """Show a text with and without drafts, and what they bring."""
    if fetch and os.environ.get(CHOICE) != TOY and (pair.chosen or pair.target == located(TOY)):
        pair = _with_fetched(pair)
    device = pair.target_device or default_devices()[0]
    if pair.dtype == "auto" and not device.startswith("cpu"):
        # There passes of different numbers of rows round differently in other types.
        pair = pair.model_copy(update={"dtype": "float32"})
    given = params.model_fields_set
    speculation = SpeculationConfig()
    speculation.check(pair)
    with Progress(Console(stderr=True), models_of(pair)) as progress:
        started = Pair(pair, say=progress.say)
    with started as running:
        text, ids, usual = _asked(running, prompt)
        running.check(ids)
        missing = {name: value for name, value in usual.items() if name not in given}
        params = params.model_copy(update=missing)
        typer.echo("measuring both, in alternation", err=True)
        load = Load()
        takes = _measured(running, text, ids, params, (ALONE, speculation))
        others = load.cores()
        about = ran_on(running)
    plain, drafted = (middle(found[NUM_WARM:]) for found in takes)
    difference = first_difference([take for found in takes for take in found])
    only = pair.has_draft_process and not pair.heads
    screen = _screen(text, plain, pace)
    _show_both(screen, plain, drafted, view_of(running.decoder(ids)), drafter_only=only)
    screen.end(verdict(plain, drafted, difference))
    for line in (*about, *doubts(drafted.metrics, others)):
        typer.echo(for_stderr(line), err=True)
    if difference is not None:
        raise typer.Exit(EXIT_DIFFERS)


def _with_fetched(pair: PairConfig) -> PairConfig:
    """Return the pair with smollm2, if it can be had; a line says where it is, or why not."""
    if not is_there():
        typer.echo(for_stderr(f"fetching the chat model {NAME} (93 MB, once)"), err=True)
    try:
        file = fetch_smollm2()
    except ModelError as error:
        typer.echo(for_stderr(f"{NAME} cannot be had ({error}); the toy is shown"), err=True)
        return pair
    typer.echo(for_stderr(f"{NAME} is kept in {file}"), err=True)
    models = ("target", "drafter", "heads")
    others = {name: getattr(pair, name) for name in pair.model_fields_set if name not in models}
    return PairConfig(target=SMOLLM2, **others)


def _asked(pair: Pair, prompt: str | None) -> tuple[str, tuple[int, ...], dict[str, float]]:
    """Return the text that is shown as the prompt, its token ids, and the usual settings.

    A target with a chat template of its own answers it. Raises ConfigurationError, ModelError.
    """
    given = None if prompt is None else prompts.from_argument(prompt)
    if pair.chat_template.is_plain:
        text = PROMPT if given is None else given
        return text, pair.encode(text), OF_TOY
    text = QUESTION if given is None else given
    return f"{text}\n\n", pair.encode_chat([{"role": "user", "content": text}])[1], OF_CHAT


def _screen(text: str, plain: Take, pace: float | None) -> "Screen":
    """Return what shows texts after this prompt, at this pace or at the usual one."""
    if pace is None:
        pace = PACE_S if sys.stdout.isatty() else 0.0
    return Screen(text, slowdown(plain, pace), in_colour=wants_colour(sys.stdout))


def _show_both(
    screen: "Screen", plain: Take, drafted: Take, view: SpeculationView, *, drafter_only: bool
) -> None:
    """Show both texts; `drafter_only` is as for `legend`."""
    screen.show("The target alone", "", plain, lambda step: for_reader(step.part.outputs[0].text))
    explained = legend(in_colour=screen.in_colour, drafter_only=drafter_only)
    screen.show("The same with drafts", explained, drafted, _shown_by(view))


def _measured(
    pair: Pair,
    text: str,
    ids: tuple[int, ...],
    params: SamplingParams,
    ways: Sequence[SpeculationConfig],
) -> list[list[Take]]:
    """Return takes of each setting in `ways`, made in turn; the first NUM_WARM of each warm up.

    Raises NodeError, ConfigurationError.
    """
    takes: list[list[Take]] = [[] for _ in ways]
    until = time.monotonic() + ENOUGH_S
    for number in range(NUM_WARM + NUM_TAKES):
        if number > NUM_WARM and time.monotonic() > until:
            break
        for way, found in zip(ways, takes, strict=True):
            found.append(_take(pair, way, text, ids, params))
    return takes


def _take(
    pair: Pair, way: SpeculationConfig, text: str, ids: tuple[int, ...], params: SamplingParams
) -> Take:
    """Generate the text once; return its steps, each with its time, and its metrics."""
    request = Request(pair, way, text, ids, params)
    steps = []
    since = time.monotonic()
    with closing(Batch(pair, [request]).steps()) as coming:
        for step in coming:
            steps.append((time.monotonic() - since, step))
    made = request.whole().outputs[0]
    if made.metrics is None:
        raise TextError(made.error or "")
    return Take(tuple(steps), made.metrics)


def _shown_by(view: SpeculationView) -> Callable[[Step], str]:
    def shown(step: Step) -> str:
        text = step.part.outputs[0].text
        return view.finish(text) if step.emit is None else view.push(step.emit, text)

    return shown


class Screen:
    """Shows takes, one below the other, on standard output."""

    def __init__(self, prompt: str, factor: float, *, in_colour: bool) -> None:
        self.in_colour = in_colour
        self._prompt = prompt
        self._factor = factor

    def show(self, title: str, explained: str, take: Take, shown: Callable[[Step], str]) -> None:
        """Write the prompt and the text at the speed at which it came, then its figures.

        Raises OutputError if it cannot be written.
        """
        slow = f", shown {rounded(self._factor)} times slower" if self._factor > 1 else ""
        write_out(f"\n{self._styled(title + slow, BOLD)}\n")
        write_out(f"{explained}\n\n" if explained else "\n")
        write_out(self._styled(for_reader(self._prompt), DIM))
        since = time.monotonic()
        for at, text in scenes(take, self._factor, shown):
            if text:
                time.sleep(max(0.0, since + at - time.monotonic()))
                write_out(text)
        write_out(f"\n\n{self._styled(_figures(take.metrics), DIM)}\n")

    def end(self, line: str) -> None:
        """Write `line` as the last line, in bold.

        Raises OutputError if it cannot be written.
        """
        write_out(f"\n{self._styled(line, BOLD)}\n")

    def _styled(self, text: str, style: str) -> str:
        if not self.in_colour:
            return text
        return "\n".join(f"{style}{line}{RESET}" if line else "" for line in text.split("\n"))


def _figures(m: Metrics) -> str:
    words = [
        f"{m.num_tokens} tokens in {shown_time(m.elapsed_s)}",
        f"{rounded(m.tokens_per_second)} tokens/s",
    ]
    if m.num_draft_tokens:
        words.append(f"{m.num_target_passes} passes")
        words.append(f"{m.num_accepted_tokens} of {m.num_draft_tokens} drafts accepted")
    line = ", ".join(words)
    return line if m.simulated is None else f"{line}\n{simulation(m.simulated)}"
