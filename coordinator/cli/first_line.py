"""The first line on a terminal: it comes before the imports, which take a second or more.

Like `process`, this file is loaded before all others, also by Pythons that are too old for them.
"""

import contextlib
import os
import sys

# The commands that load models. Others answer soon enough.
SLOW = (
    *("demo", "generate", "chat", "serve", "tune", "verify-lossless"),
    *("experiment", "profile", "measure", "train-head"),
)
LINE = "starting Slipstream ..."
HELP = ("--help", "-h", "--help-all")


def show(words: "list[str]") -> None:
    """Write the line to stderr, if that is a terminal and a command of these words loads models."""
    if is_slow(words) and sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(OSError):  # a terminal that is gone
            os.write(2, (LINE + "\n").encode())


def is_slow(words: "list[str]") -> bool:
    """Return whether the command of these words loads models."""
    return words[:1] != [] and words[0] in SLOW and not any(word in HELP for word in words)
