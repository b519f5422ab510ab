"""Eight texts at once with nodes that are there; says when all have begun, and the tokens as JSON.

python -m tests.process.eight_texts tcp://ADDRESS:PORT KEYS MODEL
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

PROMPTS = tuple((5, 6 + number, 7) for number in range(8))
REQUEST = SamplingParams(max_tokens=150, ignore_eos=True)
SYNC = SpeculationConfig(policy="sync", adaptive=False)


def main(endpoint: str, keys: str, model: str) -> None:
    """Print the tokens, and how many drafts were accepted."""
    config = PairConfig(target=model, drafter=model, dtype="float32", max_num_seqs=8)
    nodes = partial(RemoteNodes, endpoint, Path(keys), (Role.TARGET, Role.DRAFTER))
    with Pair(config, make_launcher=nodes) as pair:
        streams = [pair.generate(prompt, SYNC, REQUEST)[0] for prompt in PROMPTS]
        chunks = list(map(iter, streams))
        texts = [list(next(some).tokens) for some in chunks]
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        for text, some in zip(texts, chunks, strict=True):
            for chunk in some:
                text += chunk.tokens
        results = [stream.result for stream in streams]
        accepted = sum(one.metrics.num_accepted_tokens for one in results if one is not None)
    sys.stdout.write(json.dumps([texts, accepted]))


if __name__ == "__main__":
    main(*sys.argv[1:])
