"""What each verification rule accepts, at several temperatures, on real prompts.

    python -m deploy.experiments.acceptance PROMPTS.jsonl [NUM_PROMPTS]

`sync` with four drafts, so that timing plays no part; the embedded pair in float32. Counts, not
times: it may run on a busy machine.
"""

import sys
from pathlib import Path

from coordinator.api.config import (
    PairConfig,
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from deploy.experiments.arms import spread

RULES = ("coupled", "token", "block")
TEMPERATURES = (0.0, 0.7, 1.0)
K, NUM_TOKENS, PROMPT_TOKENS = 4, 96, 128


def measure(pair: Pair, texts: list[str], verify: str, temperature: float) -> tuple[float, float]:
    """Tokens per target pass with drafts, and how often the first draft is accepted."""
    speculation = SpeculationConfig.model_validate(
        {"policy": "sync", "num_speculative_tokens": K, "verify": verify}
    )
    histogram = [0] * (K + 1)
    for seed, text in enumerate(texts):
        ids = pair.encode(text)[:PROMPT_TOKENS]
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        stream, _ = pair.generate(ids, speculation, params)
        for _ in stream:
            pass
        assert stream.result is not None
        figures = stream.result.metrics.speculative_decoding
        assert figures is not None
        # The last passes of a text have fewer drafts than K, so they are left out.
        for accepted, count in enumerate(figures.acceptance_histogram_by_draft_length.get(K, [])):
            histogram[accepted] += count
    steps = sum(histogram)
    length = 1 + sum(accepted * count for accepted, count in enumerate(histogram)) / steps
    return length, 1 - histogram[0] / steps


def main() -> None:
    """Print the table."""
    texts = spread(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
    print(f"{len(texts)} prompts, {NUM_TOKENS} tokens each, sync K = {K}, float32")
    print("rule      " + "".join(f"      T = {t:<8g}" for t in TEMPERATURES))
    with Pair(PairConfig(dtype="float32", max_num_seqs=1)) as pair:
        for verify in RULES:
            cells = [measure(pair, texts, verify, t) for t in TEMPERATURES]
            print(
                f"{verify:10}"
                + "".join(f"{length:8.2f} ({first:4.0%}) " for length, first in cells),
                flush=True,
            )


if __name__ == "__main__":
    main()
