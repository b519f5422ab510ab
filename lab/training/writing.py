"""The target writes the texts that a head learns from as its users run it: many at once, in a node.

On two CPU cores that is three times as fast as transformers' own generation (docs/LOG.md), and a
quantised target writes what it writes for its users.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from coordinator.api.llm import LLM
from coordinator.api.params import SamplingParams
from lab.training.teacher import ENDED, Tokens
from proto.errors import ModelError

AT_ONCE = 32  # texts


class EngineWriter:
    """Continues prompts with the target in a node, which is started for the first of them.

    target, revision, dtype, device  as `train-head` is told
    """

    def __init__(self, target: str, revision: str | None, *, dtype: str, device: str) -> None:
        self._target, self._revision = target, revision
        self._dtype, self._device = dtype, device
        self._llm: LLM | None = None

    def __enter__(self) -> "EngineWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the node."""
        if self._llm is not None:
            self._llm.close()

    def write(self, prompts: Sequence[Tokens], length: int, seed: int) -> Tensor:
        """Return int64 [B, length]: the prompts continued; ENDED after an end of text.

        Every second text is greedy, the others are sampled at temperature 1, from seeds that follow
        from `seed`.

        Raises ModelError, NodeError.
        """
        if self._llm is None:
            self._llm = self._started()
        params = [
            SamplingParams(
                temperature=float(at % 2), seed=seed + at, max_tokens=length - len(prompt)
            )
            for at, prompt in enumerate(prompts)
        ]
        asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        text = torch.full((len(prompts), length), ENDED)
        for row, output in enumerate(self._llm.generate(asked, params)):
            answer = output.outputs[0]
            if answer.error:
                raise ModelError(f"{self._target}: it could not write a text: {answer.error}")
            whole = [*prompts[row].tolist(), *answer.token_ids]
            text[row, : len(whole)] = torch.tensor(whole)
        return text

    def _started(self) -> LLM:
        where: dict[str, Any] = {"target_device": self._device} if self._device != "cpu" else {}
        return LLM(
            self._target,
            revision=self._revision,
            dtype=self._dtype,
            max_num_seqs=AT_ONCE,
            speculative_config={"policy": "ar"},
            **where,
        )
