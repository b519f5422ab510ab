"""`python -m tests.hostile [SESSIONS] [SEED]`: hostile sessions at a coordinator on 127.0.0.1."""

import sys
import time

from tests.hostile.campaign import besiege

WARM_UP = 2000
LIMIT_S = 3600.0


def main(num_sessions: int = 20_000, seed: int = 1) -> int:
    """Print what became of the coordinator; 0: nothing bad."""
    began = time.monotonic()
    outcome = besiege(num_sessions, seed=seed, warm_up=min(WARM_UP, num_sessions), limit_s=LIMIT_S)
    before, after = outcome.kib
    number, took_s = sum(outcome.kinds.values()), time.monotonic() - began
    lines = [
        f"{number} sessions in {took_s:.0f} s, seed {seed}",
        *(f"  {kind:20} {number}" for kind, number in sorted(outcome.kinds.items())),
        f"{outcome.num_refused} connections were refused",
        f"the coordinator's memory: {before} KiB before, {after} KiB after",
        f"an honest node: {outcome.num_answers} answers, at most {outcome.longest_s:.3f} s apart",
        f"the coordinator ended with status {outcome.status} {outcome.errors[-500:]}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(outcome.status != 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
