"""A peer that answers its first request, and every other one with the line that it was started for.

Where the target is called "early", that line comes before it says that it is ready.
"""

import json
import sys

ANSWER = {"tokens": [7], "times": [0.5], "counts": [1]}


def main() -> None:
    """Write the lines as bytes, for they need not be UTF-8."""
    target, line = sys.argv[1:3]
    lines = [bytes.fromhex(line), json.dumps({"ready": "here"}).encode()]
    out = sys.stdout.buffer
    out.write(lines[target != "early"] + b"\n")
    out.flush()
    for number, _ in enumerate(sys.stdin):
        out.write((json.dumps(ANSWER).encode() if number == 0 else lines[0]) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
