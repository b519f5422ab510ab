"""How a drafter ranks what its target says, recorded, and computed in another way."""

import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer

from lab.measure import ranks
from rehearsal.acceptance import NUM_RANKS, Trace, read
from tests.lab.bytewise_pair import make_bytewise_pair

PROMPT = "def f(x):"
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_bytewise_pair(tmp_path_factory.mktemp("models"), 0.3)


def recorded(
    patch: pytest.MonkeyPatch, folder: Path, target: Path, drafter: Path, temperature: float
) -> Trace:
    """What the command writes for one prompt."""
    prompts, out = folder / "prompts.txt", folder / "ranks.jsonl"
    prompts.write_text(PROMPT + "\n")
    words = [str(prompts), "--out", str(out), "--target", str(target), "--drafter", str(drafter)]
    numbers = ["--max-tokens", str(NUM_TOKENS), "--temperature", str(temperature)]
    patch.setattr(sys, "argv", ["ranks", *words, *numbers])
    assert ranks.main() == 0
    return read(out.read_text().splitlines())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_drafts_for_itself_is_always_right(
    temperature: float,
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, _ = models
    (text,) = recorded(monkeypatch, tmp_path, target, target, temperature)
    assert [position.rank for position in text] == [0] * NUM_TOKENS
    assert all(position.scores[0] >= position.scores[1] for position in text)


def test_ranks_are_those_of_the_drafters_own_logits_behind_the_targets_text(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = models
    (text,) = recorded(monkeypatch, tmp_path, target, drafter, 0.0)
    prompt = Tokenizer.from_file(str(target / "tokenizer.json")).encode(PROMPT).ids
    said = hf.AutoModelForCausalLM.from_pretrained(target).generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
    )
    logits = hf.AutoModelForCausalLM.from_pretrained(drafter)(said).logits[0, len(prompt) - 1 : -1]
    chosen = said[0, len(prompt) :, None]
    wanted = (logits > logits.gather(1, chosen)).sum(1).tolist()
    assert len(set(wanted)) > 2
    assert [position.rank for position in text] == [
        rank if rank < NUM_RANKS else None for rank in wanted
    ]
