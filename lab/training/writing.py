"""The target writes the texts that a head learns from as its users run it: many at once, in a node.

On two CPU cores that is three times as fast as transformers' own generation (docs/LOG.md), and a
quantised target writes what it writes for its users.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from coordinator.api.llm import LLM
from coordinator.api.params import SamplingParams
from lab.training.teacher import ENDED, Tokens
from lab.training.train_heads import SAMPLED_AT, Write
from proto.errors import ModelError

AT_ONCE = 32  # texts


@contextmanager
def node_that_writes(
    target: str, revision: str | None, *, dtype: str, length: int
) -> Iterator[Write]:
    """Yield what continues prompts to `length` tokens at most, on a CPU; the node ends afterwards.

    target, revision, dtype  as `train-head` is told

    Raises ModelError, NodeError, ConfigurationError.
    """
    plain = {"policy": "ar"}
    with LLM(
        target,
        revision=revision,
        dtype=dtype,
        target_device="cpu",
        max_num_seqs=AT_ONCE,
        max_model_len=length,
        speculative_config=plain,
    ) as llm:
        yield partial(_written, llm, target)


def _written(llm: LLM, target: str, prompts: Sequence[Tokens], length: int, seed: int) -> Tensor:
    """Return the texts as `Write` says; ENDED after an end of text. Raises ModelError."""
    params = [
        SamplingParams(
            temperature=SAMPLED_AT * (at % 2), seed=seed + at, max_tokens=length - len(prompt)
        )
        for at, prompt in enumerate(prompts)
    ]
    asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
    text = torch.full((len(prompts), length), ENDED)
    for row, output in enumerate(llm.generate(asked, params)):
        answer = output.outputs[0]
        if answer.error:
            raise ModelError(f"{target}: it could not write a text: {answer.error}")
        whole = [*prompts[row].tolist(), *answer.token_ids]
        text[row, : len(whole)] = torch.tensor(whole)
    return text
