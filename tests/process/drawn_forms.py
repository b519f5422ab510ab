"""Schemas and patterns of several kinds, drawn from a seed, and whether a pair answers them well.

Their answers are short. Each is answered greedily and sampled, with drafts and by the target alone:
an answer must fit (as the package jsonschema and Python's `re` see it) and have the tokens of the
target alone.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from coordinator.api.asking import Asking
from coordinator.api.config import ALONE, SpeculationConfig
from coordinator.api.outputs import CompletionOutput
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch
from coordinator.api.structured import StructuredOutputsParams
from proto.errors import ConfigurationError

PROMPTS = ("Once upon a time", "def main(argv):\n    ", "The answer is: ", '{"question": "')
MAX_TOKENS = 400

# -- what is asked for -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like: a schema or a pattern, and its name in a message."""

    name: str
    schema: Any = None
    pattern: str = ""
    is_compact: bool = False

    @property
    def params(self) -> StructuredOutputsParams:
        """The form as a request has it. Raises ConfigurationError."""
        if self.pattern:
            return StructuredOutputsParams(regex=self.pattern)
        text = json.dumps(self.schema)
        return StructuredOutputsParams(json=text, disable_any_whitespace=self.is_compact)

    def fits(self, text: str) -> bool:
        """Whether a whole answer fits."""
        if self.pattern:
            return re.fullmatch(self.pattern, text) is not None
        from jsonschema.validators import validator_for

        checker = validator_for(self.schema)(self.schema)
        return bool(checker.is_valid(json.loads(text)))


def forms(count: int) -> Iterator[Form]:
    """Draw so many forms, four schemas for each pattern."""
    for seed in range(count):
        if seed % 5 == 4:
            yield Form(f"pattern {seed}", pattern=pattern_of(seed))
        else:
            yield Form(f"schema {seed}", schema_of(seed), is_compact=seed % 2 == 0)


# -- what is answered ------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """The counts of all answers.

    num_whole     answers that ended by themselves
    num_accepted  drafts in all answers that were accepted
    refused       forms that the grammars' library does not take, with its reasons
    wrong         answers that do not fit, or differ from those of the target alone
    """

    num_answers: int = 0
    num_whole: int = 0
    num_accepted: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def answered(pair: Pair, wanted: Iterable[Form]) -> Tally:
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
                made = _written(pair, prompt, SpeculationConfig(), params)
            except ConfigurationError as error:
                tally.refused.append(f"{form.name}: {error}")
                break
            _count(tally, form, made, _written(pair, prompt, ALONE, params))
    return tally


def _count(tally: Tally, form: Form, made: CompletionOutput, alone: CompletionOutput) -> None:
    tally.num_answers += 1
    if made.error is not None or alone.error is not None:
        tally.wrong.append(f"{form.name}: {made.error or alone.error}")
        return
    assert made.metrics is not None
    if made.metrics.speculative_decoding is not None:
        tally.num_accepted += made.metrics.speculative_decoding.num_accepted_draft_tokens
    if made.token_ids != alone.token_ids:
        tally.wrong.append(f"{form.name}: {made.text!r} is not {alone.text!r}")
    if made.finish_reason == "stop":
        tally.num_whole += 1
        if not form.fits(made.text):
            tally.wrong.append(f"{form.name}: {made.text!r} does not fit")


def _written(
    pair: Pair, prompt: str, way: SpeculationConfig, params: SamplingParams
) -> CompletionOutput:
    """The text of one request. Raises ConfigurationError."""
    (request,) = Asking(pair, way).requests(prompt, params)
    for _ in Batch(pair, [request]).steps():
        pass
    return request.whole().outputs[0]


# -- how it is drawn -------------------------------------------------------------------------------

Schema = dict[str, Any]
WORDS = ("name", "age", "city", "tags", "id", "size", "is_open", "next", "unit", "note")


def schema_of(seed: int) -> Schema:
    """Return a schema whose answers have at most a few dozen tokens."""
    rng = random.Random(seed)
    kinds = (_object, _list, _union, _references, _tree)
    return kinds[seed % len(kinds)](rng)


def pattern_of(seed: int) -> str:
    """Return a regular expression, read alike by Python and by llguidance."""
    rng = random.Random(seed)
    parts: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(WORDS),
        lambda: f"[a-z]{{{rng.randint(1, 3)},{rng.randint(3, 6)}}}",
        lambda: f"[0-9]{{{rng.randint(1, 4)}}}",
        lambda: f"({'|'.join(rng.sample(WORDS, 3))})",
        lambda: f"({rng.choice('xyz')}[A-F]?){{0,{rng.randint(1, 3)}}}",
        lambda: rng.choice((r"\.", ", ", "-", "é", r"\+", " ")),
        lambda: f"(?:{rng.choice(WORDS)}-)?",
    )
    return "".join(rng.choice(parts)() for _ in range(rng.randint(2, 6)))


def _simple(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
            {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 10)},
            {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"enum": rng.sample(WORDS, rng.randint(1, 4))},
            {"const": rng.choice((1, "one", None, True, {"a": [1]}))},
            {"type": "string", "format": rng.choice(("date", "uuid", "ipv4", "time"))},
            {"type": "number", "minimum": 0, "maximum": 1},
        )
    )


def _object(rng: random.Random) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _simple(rng) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _list(rng: random.Random) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": rng.choice((_simple, _object))(rng),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _union(rng: random.Random) -> Schema:
    return {"anyOf": [_object(rng), _simple(rng), {"allOf": [_object(rng)]}]}


def _references(rng: random.Random) -> Schema:
    return {
        "$defs": {"part": _object(rng), "kind": _simple(rng)},
        "type": "object",
        "properties": {"part": {"$ref": "#/$defs/part"}, "kind": {"$ref": "#/$defs/kind"}},
        "required": ["part", "kind"],
        "additionalProperties": False,
    }


def _tree(rng: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": _simple(rng),
            "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
