"""The target alone, by transformers' own `generate`: what every policy must reproduce."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from coordinator.api.config import ALONE, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from proto.policies import TABLE

# A difference at a smaller margin than this (of float32 logits) is a near tie; DESIGN: counted.
NEAR_TIE = 1e-4

EVERY_POLICY = (
    *(SpeculationConfig(policy=row.name) for row in TABLE),
    SpeculationConfig(policy="sync", num_speculative_tokens=1, adaptive=False),
    SpeculationConfig(policy="sync", num_speculative_tokens=8, adaptive=False),
    SpeculationConfig(policy="tree", num_speculative_tokens=12, policy_option={"width": 8}),
)

PROMPTS = (
    "def read_lines(path, encoding='utf-8'):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "    def test_empty(self):\n        self.assertEqual(",
    "for name, value in sorted(items.items()):\n",
    "try:\n    import threading\nexcept ImportError:\n",
    '"""A parser for configuration files.\n\n',
    "    if not isinstance(other, type(self)):\n        return NotImplemented\n",
    "_cache = {}\n\ndef lookup(key):\n",
    "with open(filename, 'rb') as f:\n    data = f.read(",
    "async def fetch(reader, limit):\n",
    "    raise ValueError('invalid literal",
    "def __repr__(self):\n    return '%s(",
    "# Copyright",
    "while True:\n    line = file.readline()\n    if not line:\n",
    "from collections import OrderedDict, ",
    "@property\ndef name(self):\n",
    "return [x for x in ",
    "    elif opt in ('-h', '--help'):\n",
    "x = 0\ny = 1\nz = x + y\nprint(",
)


class Reference:
    """A model in this process."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32, **more: Any) -> None:
        made: Any = hf.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **more)
        self.model: Any = made.eval()

    def greedy(self, prompt: tuple[int, ...], num_tokens: int, **more: Any) -> list[int]:
        """Exactly `num_tokens` tokens, end-of-text tokens or not; `more` are given to generate."""
        with torch.inference_mode():
            text = self.model.generate(
                torch.tensor([prompt]),
                # Otherwise it is guessed, and a prompt with a token 0 is read as if that were none.
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **more,
            )
        return [int(token) for token in text[0, len(prompt) :]]

    def agreement(self, text: list[int], num_prompt: int) -> float:
        """Share of the tokens after the prompt that this model would choose too, given the text."""
        with torch.inference_mode():
            choices = self.model(torch.tensor([text])).logits[0, num_prompt - 1 : -1].argmax(-1)
        return float((choices == torch.tensor(text[num_prompt:])).float().mean())

    def margin(self, text: list[int]) -> float:
        """The difference of the two largest logits after `text`."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([text])).logits[0, -1].float()
        best = logits.topk(2).values
        return float(best[0] - best[1])


@dataclass(frozen=True, slots=True)
class Generated:
    """What a pair made."""

    tokens: list[int]
    metrics: Metrics
    reason: str


def generate(
    pair: Pair,
    prompt: tuple[int, ...],
    speculation: SpeculationConfig,
    request: SamplingParams,
) -> Generated:
    """Run one request to its end."""
    stream, _ = pair.generate(prompt, speculation, request)
    tokens = [token for chunk in stream for token in chunk.tokens]
    assert stream.result is not None
    return Generated(tokens, stream.result.metrics, str(stream.result.reason))


def assert_drafts_are_accepted(
    pair: Pair, prompt: tuple[int, ...], params: SamplingParams, least: dict[str, float]
) -> None:
    """Every policy writes the target's text, and more than `least` of its drafts are accepted."""
    want = generate(pair, prompt, ALONE, params)
    for policy, num_accepted in least.items():
        # On a busy machine drafts are soon measured to be of no use, and then there are none.
        speculation = SpeculationConfig(policy=policy, adaptive=policy == "auto")
        got = generate(pair, prompt, speculation, params)
        assert got.tokens == want.tokens, policy
        assert got.metrics.num_accepted_tokens > num_accepted, policy


def assert_same_but_for_near_ties(
    reference: Reference, prompt: tuple[int, ...], want: list[int], got: list[int], what: str
) -> bool:
    """True if equal, False if they part at a near tie; else fails and says the margin."""
    if got == want:
        return True
    assert len(got) == len(want), f"{what}: {len(got)} tokens instead of {len(want)}"
    at = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
    margin = reference.margin([*prompt, *want[:at]])
    assert margin < NEAR_TIE, (
        f"{what}: token {at} is {got[at]} instead of {want[at]}; top-2 margin {margin:.3g}"
    )
    return False
