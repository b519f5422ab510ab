"""N-gram drafts and copies of earlier texts in real processes: fewer passes, the same text.

The embedded target is too small to copy from its prompt as a large model does; asked to go on after
an edited function it repeats a few words of its own. Both are what n-gram drafts are for.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.api.config import (
    NGRAM,
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import origins
from proto.errors import ConfigurationError
from tests.process.reference import Generated, generate

pytestmark = [pytest.mark.process, pytest.mark.long]

FUNCTION = '''\
def monthrange(year, month):
    """Return weekday (0-6 ~ Mon-Sun) and number of days (28-31) for
       year, month."""
    if not 1 <= month <= 12:
        raise IllegalMonthError(month)
    day1 = weekday(year, month, 1)
    ndays = mdays[month] + (month == February and isleap(year))
    return day1, ndays
'''
EDITING = FUNCTION + "\n\n" + FUNCTION.replace("monthrange", "monthrange_x")
FLOAT32 = PairConfig(dtype="float32", drafter_dtype="float32")
GREEDY = SamplingParams(max_tokens=120, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.3, seed=7, max_tokens=120, ignore_eos=True)
HOT = SamplingParams(temperature=0.9, seed=7, max_tokens=96, ignore_eos=True)
PLAIN = SpeculationConfig(policy="ar")
COPYING = SpeculationConfig(policy="pipelined", num_speculative_tokens=8)


@pytest.fixture(scope="module")
def alone() -> Iterator[Pair]:
    with Pair(FLOAT32.model_copy(update={"drafter": NGRAM})) as pair:
        yield pair


def passes_saved(plain: Generated, copied: Generated) -> float:
    """How many times fewer passes the same text took."""
    assert copied.tokens == plain.tokens
    return plain.metrics.num_target_passes / copied.metrics.num_target_passes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_edited_function_takes_half_the_passes_and_has_the_same_text(
    alone: Pair, params: SamplingParams
) -> None:
    prompt = alone.encode(EDITING)
    plain = generate(alone, prompt, PLAIN, params)
    copied = generate(alone, prompt, COPYING, params)
    assert passes_saved(plain, copied) >= 2.0
    assert copied.metrics.fallbacks == {}, "there is nobody to wait for"


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_reference_with_one_name_changed_is_copied(
    alone: Pair, params: SamplingParams, tmp_path: Path
) -> None:
    prompt = alone.encode("def read_lines(path, encoding='utf-8'):\n")
    plain = generate(alone, prompt, PLAIN, params)
    decoder = alone.decoder(prompt)
    text = "".join([*decoder.pieces(plain.tokens), decoder.finish()])
    name = max(text.split(), key=lambda word: (text.count(word), word))
    file = tmp_path / "reference.py"
    file.write_text(text.replace(name, "another_name", 1), encoding="utf-8")
    copying = COPYING.model_copy(update={"reference": str(file)})
    assert passes_saved(plain, generate(alone, prompt, copying, params)) >= 2.0


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_text_that_is_written_again_is_copied_from_memory(
    alone: Pair, params: SamplingParams
) -> None:
    prompt = alone.encode("class Queue:\n" if params is GREEDY else "class Stack:\n")
    plain = generate(alone, prompt, PLAIN, params)
    remembering = COPYING.model_copy(update={"remember": True})
    first = generate(alone, prompt, remembering, params)
    assert first.tokens == plain.tokens
    assert passes_saved(plain, generate(alone, prompt, remembering, params)) >= 3.0
    stream, _ = alone.generate(prompt, remembering, params)
    assert "draft:earlier" in {origin for emit in stream for origin in origins(emit)}


@pytest.mark.parametrize("verify", ["token", "block"])
def test_the_classical_rules_judge_copies_too(alone: Pair, verify: str) -> None:
    speculation = COPYING.model_copy(update={"verify": verify})
    got = generate(alone, alone.encode(EDITING), speculation, SAMPLED)
    assert got.metrics.num_accepted_tokens > 20


def test_a_draft_model_and_ngrams_feed_one_tree(embedded: Pair) -> None:
    speculation = COPYING.model_copy(update={"also_ngram": True})
    prompt = embedded.encode(EDITING)
    for request in (GREEDY, SAMPLED):
        plain = generate(embedded, prompt, PLAIN, request)
        both = generate(embedded, prompt, speculation, request)
        assert passes_saved(plain, both) >= 2.0
    stream, _ = embedded.generate(prompt, speculation, GREEDY)
    drafters = {origin for emit in stream for origin in origins(emit)}
    assert {"draft:model", "draft:ngram"} <= drafters


def test_a_reference_that_cannot_be_read_is_one_line(alone: Pair, tmp_path: Path) -> None:
    missing = COPYING.model_copy(update={"reference": str(tmp_path / "missing")})
    with pytest.raises(ConfigurationError, match=r"cannot read .*missing: No such file"):
        alone.generate((1, 2), missing, GREEDY)
