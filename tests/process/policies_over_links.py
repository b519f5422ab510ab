"""Every policy with nodes that are there, over links that are slow and lose messages; as JSON.

python -m tests.process.policies_over_links tcp://ADDRESS:PORT KEYS MODEL DELAY_MS
"""

import json
import sys
from functools import partial
from pathlib import Path

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching.remote import RemoteNodes
from proto.messages import Role
from proto.policies import TABLE
from tests.process.reference import generate

PROMPT = (5, 6, 7)
NUM_TOKENS = 60
TEMPERATURES = (0.0, 0.8)
SEED = 11


def main(endpoint: str, keys: str, model: str, delay_ms: str) -> None:
    """By policy and temperature: the tokens, and how many drafts were accepted."""
    links = tuple(f"{role}:delay={delay_ms}ms,loss=1%" for role in ("target", "drafter"))
    config = PairConfig(target=model, drafter=model, dtype="float32", link=links)
    nodes = partial(RemoteNodes, endpoint, Path(keys), (Role.TARGET, Role.DRAFTER))
    found = []
    with Pair(config, make_launcher=nodes) as pair:
        for row in TABLE:
            for temperature in TEMPERATURES:
                request = SamplingParams(
                    max_tokens=NUM_TOKENS, ignore_eos=True, temperature=temperature, seed=SEED
                )
                got = generate(pair, PROMPT, SpeculationConfig(policy=row.name), request)
                found.append((row.name, temperature, got.tokens, got.metrics.num_accepted_tokens))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
