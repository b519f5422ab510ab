"""Texts of the embedded pair under every policy, and the target by transformers to hold them to."""

from collections.abc import Generator

import torch

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.outputs import CompletionOutput, RequestOutput
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request, Step
from tests.process.reference import Reference

MAX_MODEL_LEN = 384
CONFIG = PairConfig(dtype="float32", drafter_dtype="float32", max_model_len=MAX_MODEL_LEN)
PROMPT = "def read_lines(path, encoding='utf-8'):\n"
AR = SpeculationConfig(policy="ar")
# On a busy machine the drafter may be measured to be of no use, and rest.
SYNC = SpeculationConfig(policy="sync", adaptive=False)
PIPELINED = SpeculationConfig(policy="pipelined", adaptive=False)
POLICIES = (AR, SYNC, PIPELINED)


def request(
    pair: Pair, params: SamplingParams, policy: SpeculationConfig = SYNC, prompt: str = PROMPT
) -> Request:
    """A prompt to be continued."""
    return Request(pair, policy, prompt, pair.encode(prompt), params)


def steps_of(
    pair: Pair, params: SamplingParams, policy: SpeculationConfig = SYNC
) -> Generator[Step, None, None]:
    """What comes of PROMPT, as it comes."""
    return Batch(pair, [request(pair, params, policy)]).steps()


def answered(
    pair: Pair, params: SamplingParams, policy: SpeculationConfig = SYNC, prompt: str = PROMPT
) -> RequestOutput:
    """What comes of it."""
    made = request(pair, params, policy, prompt)
    for _ in Batch(pair, [made]).steps():
        pass
    return made.whole()


def checked_text(pair: Pair, params: SamplingParams, prompt: str = PROMPT) -> CompletionOutput:
    """The text, the same under every policy, with drafts accepted where there were any."""
    texts = [answered(pair, params, policy, prompt).outputs[0] for policy in POLICIES]
    first = texts[0]
    for text in texts[1:]:
        assert (text.text, text.token_ids) == (first.text, first.token_ids)
        assert (text.finish_reason, text.stop_reason) == (first.finish_reason, first.stop_reason)
    assert sum(num_accepted(text) for text in texts) > 0, "speculation is dead"
    return texts[1]


def num_accepted(text: CompletionOutput) -> int:
    """Drafts that are in the text."""
    assert text.metrics is not None
    assert text.metrics.num_accepted_tokens == text.token_origins.count("draft:model")
    return text.metrics.num_accepted_tokens


def logits_of(target: Reference, ids: list[int]) -> torch.Tensor:
    """Logits [n, V] after each of `ids`, by one plain forward."""
    with torch.inference_mode():
        logits: torch.Tensor = target.model(torch.tensor([ids])).logits[0].float()
    return logits
