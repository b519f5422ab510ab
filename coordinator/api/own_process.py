"""Starts the processes that the coordinator keeps for itself: for grammars and for long prompts."""

import subprocess
import sys

from proto.errors import ConfigurationError
from proto.installation import ROOT


def start(module: str, what: str) -> "subprocess.Popen[bytes]":
    """Start `python -m module` with pipes to its standard input and output; return it.

    what  begins the message of the ConfigurationError that is raised where it cannot be started
    """
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal is for the coordinator alone
        )
    except OSError as error:
        raise not_started(what, error) from error


def not_started(what: str, error: OSError) -> ConfigurationError:
    """Return the error for a process that cannot be started, or not be spoken to."""
    return ConfigurationError(f"{what} ({error.strerror}); free memory or end others")
