"""The texts that the engine writes for a head are the target's own, with their ends."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lab.training import writing
from lab.training.teacher import ENDED, load_teacher
from lab.training.writing import node_that_writes
from proto.head_kinds import HeadKind
from tests.tiny_models import make_model
from tests.tiny_tokenizer import VOCAB_SIZE, save_bytewise_tokenizer

pytestmark = pytest.mark.process
LENGTH = 40


def test_every_second_text_is_the_targets_greedy_one_and_the_same_seeds_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path, vocab=VOCAB_SIZE, scale=0.5)
    save_bytewise_tokenizer(tmp_path)
    monkeypatch.setattr(writing, "AT_ONCE", 4)
    prompts = [np.array([5, 6, 7]), np.array([8, 9]), np.array([5, 6, 8, 9]), np.array([7])]
    with node_that_writes(str(tmp_path), None, dtype="float32", length=LENGTH) as write:
        made = write(prompts, LENGTH, 3)
        assert torch.equal(write(prompts, LENGTH, 3), made)
        assert not torch.equal(write(prompts, LENGTH, 9), made)
    teacher = load_teacher(str(tmp_path), None, HeadKind.EAGLE, dtype="float32", device="cpu")
    greedy = teacher.write(prompts, LENGTH, teacher.noise([0.0] * 4, 1))
    assert torch.equal(made[::2], greedy[::2])
    assert not torch.equal(made[1], greedy[1])
    for row, prompt in zip(made, prompts, strict=True):
        assert row[: len(prompt)].tolist() == prompt.tolist()
        is_ended = (row == ENDED).tolist()
        assert is_ended == sorted(is_ended), "nothing follows an end"
