"""Run once, at load, what only some texts ask of a GPU's logits.

A GPU loads a kernel at its first use, which takes milliseconds: the first text that asks for
log-probabilities, penalties or a classical rule would wait for them in its middle.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.choice.classical_rules import MAX_CANDIDATES, Distribution, token_trial
from engine.choice.grammar import WORD, masked_there
from engine.choice.judging_on_gpu import candidates_there, judge_there
from engine.choice.logprobs import report_there
from engine.choice.processors import Path, Processors
from engine.choice.sampling import Sampling

_NUM_TOP = 20  # alternatives whose log-probabilities are reported
_SAMPLINGS = (Sampling(1.0), Sampling(1.0, top_k=20, top_p=0.9, min_p=0.01))


@dataclass(frozen=True, slots=True)
class _Everything:
    """Settings that switch on every processor (`processors.Settings`)."""

    repetition_penalty: float = 1.1
    presence_penalty: float = 0.1
    frequency_penalty: float = 0.1
    bias_ids: tuple[int, ...] = (1,)
    bias_values: tuple[float, ...] = (1.0,)
    banned: tuple[tuple[int, ...], ...] = ((0,), (0, 1))
    min_tokens: int = 64
    late_ids: tuple[int, ...] = (1,)
    grammar: str = ""  # its kernels are used without one
    end_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] = (0, 1)


def use_once(num_rows: int, vocab_size: int, device: torch.device) -> None:
    """Process, report and judge logits [n, V] of zeros, for one row and for `num_rows` rows."""
    for count in sorted({1, num_rows}):
        logits = torch.zeros(count, vocab_size, device=device)
        processors = Processors(_Everything(), (0, 0), 1, vocab_size)
        paths = [Path((0, 0), 1, (0,) * row) for row in range(count)]
        masked_there(np.full((count, -(-vocab_size // WORD)), -1, dtype=np.int32), logits)
        report_there(processors.apply_there(logits, paths), (1,) * count, _NUM_TOP)
        certain, num_drafts = Distribution.of([0], [1.0]), count - 1
        for sampling in _SAMPLINGS:
            candidates_there(logits[:1], sampling, MAX_CANDIDATES, vocab_size)
            judge_there(  # rejects the first draft
                logits,
                sampling,
                token_trial,
                (0,) * num_drafts,
                (certain,) * num_drafts,
                luck=(1.0,) * num_drafts,
                last_luck=0.5,
            )
