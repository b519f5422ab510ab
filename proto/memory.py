"""By which words one knows that a process has had too little memory, whoever says them.

Imports next to nothing: read where there is no memory to import with, and by Pythons too old for
the rest.
"""

import resource

_WORDS = (
    *("failed to map segment", "annot allocate memory"),  # the loader of a library, the system
    *("can't start new thread", "src/thread.cpp", "pthread_create failed"),  # Python, zmq, OpenBLAS
    *("Memory allocation still failed", "MemoryError", "out of memory", "can't allocate memory"),
    # Python, in the middle of an import.
    *("returned NULL without setting an exception", "error return without exception set"),
)


def is_lack_of_memory(text: str) -> bool:
    """Whether a line of a library or of the system says that there was too little."""
    return any(words in text for words in _WORDS)


def is_limited() -> bool:
    """Whether this process, and so each that it starts, may have just so much (`ulimit -v`)."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
