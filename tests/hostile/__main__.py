"""`python -m tests.hostile [SESSIONS] [SEED]`: hostile sessions at a coordinator on 127.0.0.1.

Prints what became of the coordinator, and of an honest node that asked it all the while. Status 1:
the coordinator ended, kept the node waiting for PAUSE_S, or kept more than GROWTH_KIB of memory.
"""

import sys
import time

from tests.hostile.campaign import besiege

WARM_UP = 10_000  # until as many connections are known as may be
LIMIT_S = 3600.0
PAUSE_S = 0.5
GROWTH_KIB = 4 << 10


def main(num_sessions: int = 20_000, seed: int = 1) -> int:
    """Run the campaign; returns the exit status."""
    warm_up = min(WARM_UP, num_sessions)
    began = time.monotonic()
    outcome = besiege(num_sessions, seed=seed, warm_up=warm_up, limit_s=LIMIT_S)
    before, after = outcome.kib
    number, took_s = sum(outcome.kinds.values()), time.monotonic() - began
    lines = [
        f"{number} sessions after {warm_up} to warm up, in {took_s:.0f} s, seed {seed}",
        *(f"  {kind:20} {number}" for kind, number in sorted(outcome.kinds.items())),
        f"{outcome.num_refused} connections were refused",
        f"the coordinator's memory: {before} KiB before, {after} KiB after",
        f"an honest node: {outcome.num_answers} answers, at most {outcome.longest_s:.3f} s apart",
        f"the coordinator ended with status {outcome.status} {outcome.errors[-4000:]}".rstrip(),
    ]
    is_well = outcome.status == 0 and outcome.longest_s < PAUSE_S and after - before < GROWTH_KIB
    lines.append("as it should be" if is_well else "NOT as it should be")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
