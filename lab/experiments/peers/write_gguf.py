"""Writes a model as a GGUF file, whole or quantised, and prints the path of the file.

    python -m lab.experiments.peers.write_gguf MODEL DTYPE [KIND]

MODEL is a folder or a name on the hub, DTYPE a number type or auto, KIND one of llama-quantize's
(Q8_0, Q4_K_M ...). The file is the one that the peer llamacpp would run; it stays in our cache.
"""

import argparse
import sys

from engine.checkpoint.checkpoint import find_checkpoint
from engine.errors import ModelError
from lab.experiments.peers.gguf_file import CannotWrite
from lab.experiments.peers.llamacpp import target_file
from lab.experiments.peers.llamacpp_programs import ProgramError
from lab.help import Paragraphs

DTYPES = ("float32", "bfloat16", "float16")


def main() -> int:
    """Write the file and print its path; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.peers.write_gguf",
        description=__doc__,
        formatter_class=Paragraphs,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("dtype", metavar="DTYPE", choices=("auto", *DTYPES))
    parser.add_argument("kind", metavar="KIND", nargs="?", default="")
    given = parser.parse_args()
    try:
        print(target_file(find_checkpoint(given.model, None), given.dtype, given.kind))
    except (CannotWrite, ModelError, ProgramError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
