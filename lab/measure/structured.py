"""Structured output on a running pair: are answers valid, exact, and what do the masks cost?

    python -m lab.measure.structured --forms 200
    python -m lab.measure.structured --forms 0 --schemas FOLDER --limit 100

Every schema or pattern is answered greedily and sampled, with drafts and by the target alone. An
answer must fit (as the package jsonschema and Python's `re` see it) and have the tokens of the
target alone. Then texts of the same lengths are written without a mask. `--schemas` takes a folder
of JSON schemas, one in each file, such as `data` of the suite JSONSchemaBench.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.api.asking import Asking
from coordinator.api.config import ALONE, PairConfig, SpeculationConfig
from coordinator.api.outputs import CompletionOutput
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch
from coordinator.api.structured import StructuredOutputsParams
from lab.measure.forms import pattern_of, schema_of
from proto.errors import ConfigurationError

PROMPTS = ("Once upon a time", "def main(argv):\n    ", "The answer is: ", '{"question": "')
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like: a schema or a pattern, and its name in the output."""

    name: str
    schema: Any = None
    pattern: str = ""
    is_compact: bool = False

    @property
    def params(self) -> StructuredOutputsParams:
        """Return the form as a request has it. Raises ConfigurationError."""
        if self.pattern:
            return StructuredOutputsParams(regex=self.pattern)
        text = json.dumps(self.schema)
        return StructuredOutputsParams(json=text, disable_any_whitespace=self.is_compact)

    def fits(self, text: str) -> bool:
        """True if a whole answer fits."""
        if self.pattern:
            return re.fullmatch(self.pattern, text) is not None
        from jsonschema.validators import validator_for

        checker = validator_for(self.schema)(self.schema)
        return bool(checker.is_valid(json.loads(text)))


@dataclass(slots=True)
class Sums:
    """What the texts of one way of writing took together."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_drafts: int = 0
    num_accepted: int = 0

    def add(self, made: CompletionOutput) -> None:
        """Add a text. Its first token counts, its prompt does not."""
        metrics = made.metrics
        assert metrics is not None
        self.num_tokens += len(made.token_ids)
        self.seconds += metrics.elapsed_s
        if metrics.speculative_decoding is not None:
            self.num_drafts += metrics.speculative_decoding.num_draft_tokens
            self.num_accepted += metrics.speculative_decoding.num_accepted_draft_tokens

    @property
    def line(self) -> str:
        """Return the figures for people."""
        rate = self.num_accepted / self.num_drafts if self.num_drafts else 0.0
        a_token = 1e3 * self.seconds / max(1, self.num_tokens)
        return f"{self.num_tokens} tokens, {a_token:.2f} ms a token, {100 * rate:.1f} % accepted"


@dataclass(slots=True)
class Tally:
    """The counts and sums of all answers.

    refused  forms that the grammars' library does not take, with its reasons
    wrong    answers that do not fit, or differ from those of the target alone
    """

    num_answers: int = 0
    num_whole: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    sums: dict[str, Sums] = field(default_factory=dict)

    def add(self, way: str, made: CompletionOutput) -> None:
        """Add a text that was written in one of the ways."""
        self.sums.setdefault(way, Sums()).add(made)

    def __str__(self) -> str:
        lines = [
            f"{self.num_answers} answers, {self.num_whole} of them ended by themselves, "
            f"{len(self.wrong)} wrong; {len(self.refused)} forms refused",
            *(f"  {way:24} {sums.line}" for way, sums in self.sums.items()),
            *(f"  refused: {line}" for line in self.refused[:8]),
            *(f"  WRONG: {line}" for line in self.wrong[:8]),
        ]
        return "\n".join(lines)


def forms(count: int, folder: Path | None, limit: int) -> Iterator[Form]:
    """Yield `count` drawn forms, four schemas for each pattern, and `limit` schemas of a folder."""
    for seed in range(count):
        if seed % 5 == 4:
            yield Form(f"pattern {seed}", pattern=pattern_of(seed))
        else:
            yield Form(f"schema {seed}", schema_of(seed), is_compact=seed % 2 == 0)
    files = sorted(folder.rglob("*.json")) if folder is not None else []
    for path in random.Random(0).sample(files, min(limit, len(files))):
        yield Form(path.name, json.loads(path.read_text(encoding="utf-8")), is_compact=True)


def measure(pair: Pair, wanted: Iterator[Form], *, without_mask: bool = True) -> Tally:
    """Answer every form greedily and sampled; return what came out."""
    tally = Tally()
    for number, form in enumerate(wanted):
        prompt = PROMPTS[number % len(PROMPTS)]
        for temperature in (0.0, 1.0):
            try:
                params = SamplingParams(
                    structured_outputs=form.params,
                    temperature=temperature,
                    seed=number,
                    max_tokens=MAX_TOKENS,
                )
                made = written(pair, prompt, SpeculationConfig(), params)
            except ConfigurationError as error:
                tally.refused.append(f"{form.name}: {error}")
                break
            alone = written(pair, prompt, ALONE, params)
            tally.num_answers += 1
            if made.error is not None or alone.error is not None:
                tally.wrong.append(f"{form.name}: {made.error or alone.error}")
                continue
            tally.add("mask, drafts", made)
            tally.add("mask, target alone", alone)
            if made.token_ids != alone.token_ids:
                tally.wrong.append(f"{form.name}: {made.text!r} is not {alone.text!r}")
            if made.finish_reason == "stop":
                tally.num_whole += 1
                if not form.fits(made.text):
                    tally.wrong.append(f"{form.name}: {made.text!r} does not fit")
            if without_mask:
                free = SamplingParams(
                    temperature=temperature,
                    seed=number,
                    max_tokens=len(made.token_ids),
                    ignore_eos=True,
                )
                tally.add("no mask, drafts", written(pair, prompt, SpeculationConfig(), free))
                tally.add("no mask, target alone", written(pair, prompt, ALONE, free))
    return tally


def written(
    pair: Pair, prompt: str, way: SpeculationConfig, params: SamplingParams
) -> CompletionOutput:
    """Return the text of one request. Raises ConfigurationError."""
    (request,) = Asking(pair, way).requests(prompt, params)
    for _ in Batch(pair, [request]).steps():
        pass
    return request.whole().outputs[0]


def main() -> int:
    """Measure as the flags say; return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--forms", type=int, default=200, help="drawn schemas and patterns")
    parser.add_argument("--schemas", type=Path, default=None, help="folder of schemas")
    parser.add_argument("--limit", type=int, default=100, help="most schemas of that folder")
    given = parser.parse_args()
    with Pair(PairConfig(dtype="float32")) as pair:
        tally = measure(pair, forms(given.forms, given.schemas, given.limit))
    print(tally)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
