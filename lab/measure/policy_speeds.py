"""`python -m lab.measure.policy_speeds [FAMILY ...]`: how fast models with running states write
with drafts, beside a dense model of the same size.

The models are those of `row_costs`, random in float32. Random models agree with nobody, so what
their later layers add is made small, and the drafter is the target's first four layers with its
embeddings and output matrix. All policies write the same sampled texts, one policy after another in
each round, in an order that is drawn. A row of the table has tokens/s without drafts (median) and,
of each policy, the median and the quartiles of its speed over that of plain decoding in the same
round, and the tokens of a pass. Under `sync` it is counted how many first drafts are right.
"""

import argparse
import gc
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from lab.measure.row_costs import VOCAB, random_model, write

POLICIES = ("ar", "sync", "tree", "auto")
NUM_FIRST = 4  # layers of the drafter
SPREAD = 2.5  # of the target's logits: their standard deviation
# Family -> by how much the output of layers that the drafter lacks is multiplied. So chosen that
# about four of five first drafts are right.
SHARES: Mapping[str, float] = {"llama": 0.09, "olmo": 0.09, "qwen3_5_text": 0.1, "bamba": 0.11}
_LEAVING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
_PROMPT, _TOKENS = 24, 96


@dataclass(slots=True)
class Speeds:
    """What one policy has written: speeds over plain decoding, by round, and its metrics."""

    ratios: list[float] = field(default_factory=list)
    texts: list[Metrics] = field(default_factory=list)

    @property
    def cell(self) -> str:
        """Return the cell of the table."""
        low, _, high = quantiles(self.ratios, n=4)
        passes = sum(one.num_target_passes for one in self.texts)
        a_pass = sum(one.num_tokens for one in self.texts) / passes
        return f"{median(self.ratios):.2f} ({low:.2f}-{high:.2f}), {a_pass:.1f}"


def save_pair(kind: str, folder: Path, share: float) -> tuple[Path, Path, float]:
    """Save a target and a drafter that knows its first layers; return both and millions of weights.

    share  by how much the output of the other layers is multiplied
    """
    model: Any = random_model(kind)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=SPREAD / model.config.hidden_size**0.5)
        for name, one in model.named_parameters():
            if name.endswith(_LEAVING) and _layer(name) >= NUM_FIRST:
                one.mul_(share)
    target, drafter = folder / "target", folder / "drafter"
    model.save_pretrained(target)
    first: Any = random_model(kind, NUM_FIRST)
    mine = first.state_dict()
    first.load_state_dict({name: model.state_dict()[name] for name in mine})
    first.save_pretrained(drafter)
    return target, drafter, model.num_parameters() / 1e6


def _layer(name: str) -> int:
    """Return the number of a parameter's layer."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def measure(pair: Pair, num_rounds: int) -> tuple[list[float], dict[str, Speeds]]:
    """Return tokens/s without drafts, by round, and what each policy with drafts made."""
    draws, plain = random.Random(0), list[float]()
    found = {policy: Speeds() for policy in POLICIES[1:]}
    for number in range(-1, num_rounds):  # the first round is not counted
        prompt = tuple(draws.randrange(VOCAB) for _ in range(_PROMPT))
        params = SamplingParams(temperature=1, seed=number + 1, max_tokens=_TOKENS, ignore_eos=True)
        texts = {}
        for policy in draws.sample(POLICIES, len(POLICIES)):
            speculation = SpeculationConfig(policy=policy)  # type: ignore[arg-type]
            texts[policy] = _text(pair, prompt, speculation, params)
        if number < 0:
            continue
        plain.append(texts["ar"].writing_tokens_per_second)
        for policy, one in found.items():
            one.texts.append(texts[policy])
            one.ratios.append(texts[policy].writing_tokens_per_second / plain[-1])
    return plain, found


def _text(
    pair: Pair, prompt: tuple[int, ...], speculation: SpeculationConfig, params: SamplingParams
) -> Metrics:
    """Write a text; return its metrics."""
    stream, _ = pair.generate(prompt, speculation, params)
    for _ in stream:
        pass
    assert stream.result is not None
    return stream.result.metrics


def first_drafts(texts: Sequence[Metrics]) -> float:
    """Return the share of passes with drafts whose first draft was right."""
    counts = [one.speculative_decoding for one in texts if one.speculative_decoding]
    num_steps = sum(one.num_spec_steps for one in counts)
    num_wrong = sum(one.acceptance_histogram[0] for one in counts)
    return 1 - num_wrong / num_steps if num_steps else 0.0


def main() -> None:
    """Write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(SHARES))
    parser.add_argument("--rounds", type=int, default=7, help="how many texts of each policy")
    parser.add_argument("--share", type=float, help="of the later layers; default: by family")
    parser.add_argument("--config", default="{}", help="more fields of PairConfig, as JSON")
    asked = parser.parse_args()
    write(
        f"| family | millions | plain, tokens/s | {' | '.join(POLICIES[1:])} | first drafts right |"
    )
    write("|---|---|---|---|---|---|---|")
    for kind in asked.families or SHARES:
        with TemporaryDirectory() as folder:
            share = SHARES[kind] if asked.share is None else asked.share
            target, drafter, millions = save_pair(kind, Path(folder), share)
            gc.collect()
            more: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 1, "dtype": "float32"}
            more |= {"drafter_dtype": "float32", **json.loads(asked.config)}
            with Pair(PairConfig(target=str(target), drafter=str(drafter), **more)) as pair:
                plain, found = measure(pair, asked.rounds)
        cells = [one.cell for one in found.values()]
        first = first_drafts(found["sync"].texts)
        write(
            f"| {kind} | {millions:.0f} | {median(plain):.1f} | {' | '.join(cells)} | {first:.0%} |"
        )


if __name__ == "__main__":
    main()
