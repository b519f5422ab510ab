"""Recognises, by the words of an error message, that a process ran out of memory.

Imports next to nothing: it is also loaded where there is no memory left for imports, and by Pythons
that are too old for the rest.
"""

import resource

_WORDS = (
    *("failed to map segment", "annot allocate memory"),  # the dynamic loader, the system
    *("can't start new thread", "src/thread.cpp", "pthread_create failed"),  # Python, zmq, OpenBLAS
    *("Memory allocation still failed", "MemoryError", "out of memory", "can't allocate memory"),
    # Python, in the middle of an import.
    *("returned NULL without setting an exception", "error return without exception set"),
)


def is_lack_of_memory(text: str) -> bool:
    """True if this line, printed by a library or the system, says that memory ran out."""
    return any(words in text for words in _WORDS)


def is_limited() -> bool:
    """True if the memory of this process and its children is limited (`ulimit -v`)."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
