"""Waiting for what becomes true in its own time."""

import time


def wait_for(condition: object, limit_s: float) -> bool:
    """Poll until the callable is true; whether it was in time."""
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
