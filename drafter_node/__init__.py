"""The draft model's process. Knows one model and its texts; never sees the target."""
