"""Rows that nobody measured."""

from typing import Any

from lab.experiments.rows import Row


def row(arm: str, prompt: int, repetition: int = 0, *, speed: float = 100.0, **more: Any) -> Row:
    """A row of so many tokens a second."""
    values: dict[str, Any] = {
        "stage": "main",
        "num_rows": 1,
        "number": 0,
        "turn": 0,
        "text": 0,
        "prompt_id": f"p{prompt}",
        "category": "",
        "at": "2026-01-01T00:00:00.000+00:00",
        "seed": 1000 + prompt,
        "num_prompt_tokens": 5,
        "tokens": (1, 2, 3),
        "num_cell_tokens": 3,
        "wall_s": 3 / speed,
        "tokens_per_second": speed,
        "ttft_s": 0.01,
        "itl_p50_ms": 5.0,
        "itl_p99_ms": 9.0,
        "accept_lengths": (1, 2),
    }
    return Row(arm, prompt, repetition, **values | more)
