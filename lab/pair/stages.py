"""The stages of `measure`, in order: check, start, write texts, chances, plan, save."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path

from rich.console import Console

from coordinator.api.config import PairConfig
from coordinator.api.models.preflight import known_limits
from coordinator.api.pair import Pair, Say
from coordinator.api.prompts import Tokenization
from lab.experiments.prompt_sets import read
from lab.experiments.surroundings import machine
from lab.pair import advising, files, measuring, words
from lab.pair.intervals import chances_of
from lab.pair.measuring import Run
from lab.pair.record import FORMAT, VERSION, Measured, SeenText
from lab.pair.requests import Request
from lab.plan.settings import MIN_TOKENS
from proto.errors import ConfigurationError, NodeError
from proto.messages import Role
from proto.system import check_writable
from rehearsal.lossless.command import how_long

PAGE = ".md"
MAX_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Written:
    """The texts, what they tell of costs, and what is to be computed of them.

    measured  without chances and advice
    """

    run: Run
    measured: Measured
    request: Request


def check(config: PairConfig, out: Path) -> None:
    """Raise ConfigurationError if the pair cannot be measured, or a file cannot be written.

    Alpha compares the chances that both models give to the same token ids. So the drafter needs the
    target's vocabulary.
    """
    if not config.has_draft_process or config.drafter_is_head:
        raise ConfigurationError(
            "--drafter: `measure` needs a draft model with a vocabulary; heads and ngram have none"
        )
    target = Tokenization.of_model(config.target, config.target_revision)
    drafter = Tokenization.of_model(config.drafter, config.drafter_revision)
    if target is None:
        raise ConfigurationError(
            f"{config.target} has no tokenizer.json, and prompts are texts; add it"
        )
    if drafter is not None and not drafter.digests() & target.digests():
        raise ConfigurationError(
            "--drafter: it has another vocabulary: alpha has no meaning; take one with the target's"
        )
    if out.suffix == PAGE:
        raise ConfigurationError(f"--out: {out} would be the page; give the file another ending")
    check_writable(out, "--out")
    check_writable(out.with_suffix(PAGE), "--out")


def turns_of(path: Path, num_prompts: int) -> list[str]:
    """Return so many prompts of a file, or all if it has fewer. Raises ConfigurationError."""
    return [prompt.turns[0] for prompt in read(path, num_prompts)]


def start(config: PairConfig, turns: Sequence[str], max_tokens: int, say: Say) -> Pair:
    """Return the running pair; prompts that it cannot continue are refused before it starts.

    Raises ConfigurationError and other SlipstreamErrors.
    """
    return Pair(config, say=say, check=partial(_check_prompts, turns, max_tokens), traced=True)


def _check_prompts(turns: Sequence[str], max_tokens: int, pair: Pair) -> None:
    """Raise ConfigurationError if a model has no room for a prompt and its continuation."""
    prompts = [_ids(pair, turn) for turn in turns]
    for prompt in prompts:
        pair.check(prompt)
    room, role = min(_rooms(pair.config), key=itemgetter(0))
    longest = max(map(len, prompts))
    if longest + max_tokens > room:
        raise ConfigurationError(
            f"the {role} takes {room} tokens, and a prompt has {longest}: give a --max-tokens of "
            f"at most {room - longest}"
        )


def _rooms(config: PairConfig) -> Iterator[tuple[int, Role]]:
    """Yield how many tokens of a text each model takes, by its config.json."""
    yield known_limits(config)[0], Role.TARGET
    drafter = {"target": config.drafter, "target_revision": config.drafter_revision}
    yield known_limits(config.model_copy(update=drafter))[0], Role.DRAFTER


def _ids(pair: Pair, turn: str) -> tuple[int, ...]:
    """Return the tokens of a prompt, at most MAX_PROMPT_TOKENS."""
    return pair.encode(turn)[:MAX_PROMPT_TOKENS]


def write_texts(pair: Pair, turns: Sequence[str], max_tokens: int, console: Console) -> Written:
    """Let the pair write the texts; return what they tell. Raises NodeError.

    console  is told how long everything will take, and what is left
    """
    prompts = [_ids(pair, turn) for turn in turns]
    plain_s = measuring.pass_s(pair, prompts[0])
    jobs = measuring.jobs_of(prompts, plain_s)
    expected = how_long(measuring.expected_s(jobs, max_tokens, plain_s))
    console.print(
        f"a target pass takes {plain_s * 1e3:.3g} ms: this will take about {expected}\n"
        "(--num-prompts and --max-tokens decide)"
    )
    with console.status("writing texts") as status:

        def say(number: int, left_s: float) -> None:
            left = how_long(left_s + measuring.AFTERWARDS_S)
            status.update(f"wrote {number} of {len(jobs)} texts; about {left} left")

        run = measuring.run(pair, jobs, max_tokens, say)
    check_lengths(run)
    target, drafter = (measuring.node_of(pair, role, run) for role in (Role.TARGET, Role.DRAFTER))
    way_ms = round(run.way_s * 1e3, 4)
    measured = Measured(FORMAT, VERSION, machine(), target, drafter, way_ms, ())
    return Written(run, measured, measuring.request_of(pair, run.said))


def check_lengths(run: Run) -> None:
    """Raise NodeError if there is too little text of a temperature to rehearse."""
    for temperature in measuring.TEMPERATURES:
        texts = [len(text.said) for text in run.said if text.temperature == temperature]
        if sum(texts) < MIN_TOKENS:
            raise NodeError(
                f"the target ended its texts after {sum(texts)} tokens together, "
                f"{MIN_TOKENS} are needed; give prompts with longer answers"
            )


def with_chances(written: Written, say: Callable[[str], None]) -> Measured:
    """Return what was measured with the chances at each temperature. Raises NodeError."""
    by_temperature: dict[float, list[SeenText]] = {}
    texts = written.request.texts
    for number, text in enumerate(measuring.judged(written.request)):
        by_temperature.setdefault(texts[number].temperature, []).append(text)
        say(f"read {number + 1} of {len(texts)} texts with both models")
    found = [chances_of(value, by_temperature[value]) for value in sorted(by_temperature)]
    return replace(written.measured, chances=tuple(found))


def with_plan(
    measured: Measured, run: Run, config: PairConfig, say: Callable[[str], None]
) -> Measured:
    """Return what was measured with what `plan` makes of it, and how well it foretold speeds."""
    speeds = [
        speed
        for one in measured.chances
        for speed in advising.speeds_of(measured, one, run.metrics, config)
    ]
    advice = advising.advice_of(measured, lambda what: say(f"rehearsing: {what}"))
    return replace(measured, speeds=tuple(speeds), advice=advice)


def as_json(measured: Measured) -> str:
    """Return the content of the file, one line."""
    return json.dumps(asdict(measured))


def save(measured: Measured, out: Path) -> Path:
    """Write the file and the page; return the page's path. Raises OutputError."""
    page = out.with_suffix(PAGE)
    files.write(out, as_json(measured) + "\n")
    files.write(page, words.as_page(measured))
    return page
