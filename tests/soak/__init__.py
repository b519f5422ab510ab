"""Long runs of a server with everything against it at once, by hand: `python -m tests.soak`."""
