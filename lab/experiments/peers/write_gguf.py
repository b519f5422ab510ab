"""Writes a model as a GGUF file, whole or quantised, and prints the path of the file.

    python -m lab.experiments.peers.write_gguf MODEL DTYPE [KIND]

MODEL is a folder or a name on the hub, DTYPE a number type or auto, KIND one of llama-quantize's
(Q8_0, Q4_K_M ...). The file is the one that the peer llamacpp would run; it stays in our cache.
"""

import sys

from lab.experiments.peers.gguf_file import CannotWrite
from lab.experiments.peers.llamacpp import folder_of, target_file
from lab.experiments.peers.llamacpp_programs import ProgramError


def main() -> int:
    """Write the file and print its path; return the exit status."""
    if len(sys.argv) not in (3, 4):
        print("usage: python -m lab.experiments.peers.write_gguf MODEL DTYPE [KIND]")
        return 2
    model, dtype, *kind = sys.argv[1:]
    try:
        print(target_file(folder_of(model), dtype, *kind))
    except (CannotWrite, ProgramError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
