"""Which prompts of a file are measured."""

from pathlib import Path

from coordinator.api import prompts


def spread(path: Path, count: int) -> list[str]:
    """`count` prompts from all over a file, or all that it has. Raises ConfigurationError."""
    texts = prompts.from_file(path)
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]
