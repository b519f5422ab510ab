"""One forward signature, and every way to run it."""
