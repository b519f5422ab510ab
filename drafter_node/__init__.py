"""The draft model's process. Knows one model and one session at a time; never sees the target."""
