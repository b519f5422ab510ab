"""`python -m coordinator demo`: speculation to watch, measured first and then replayed."""
