"""A target whose choice depends on how many rows a pass has, for tests that must see it."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from node.starting import start
from target_node.__main__ import load_serve


def load_inexact() -> Any:
    """Import the target's worker, and let it choose another token at the last of several rows."""
    serve = load_serve()
    from target_node import worker

    choose: Any = worker.choose  # type: ignore[attr-defined]

    def by_rows(logits: Any, *how: Any) -> Callable[[], Sequence[int]]:
        *first, last = choose(logits, *how)
        return lambda: [*first, last if not first else (last + 1) % logits.shape[1]]

    worker.choose_later = by_rows  # type: ignore[attr-defined]
    return serve


if __name__ == "__main__":
    sys.exit(start("target", load_inexact))
