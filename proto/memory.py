"""By which words one knows that a process has had too little memory, whoever says them.

Imports nothing: read where there is no memory to import with, and by Pythons too old for the rest.
"""

_WORDS = (
    *("failed to map segment", "annot allocate memory"),  # the loader of a library, the system
    *("can't start new thread", "src/thread.cpp", "pthread_create failed"),  # Python, zmq, OpenBLAS
    *("Memory allocation still failed", "MemoryError", "out of memory", "can't allocate memory"),
    "returned NULL without setting an exception",  # Python, in the middle of an import
)


def is_lack_of_memory(text: str) -> bool:
    """Whether a line of a library or of the system says that there was too little."""
    return any(words in text for words in _WORDS)
