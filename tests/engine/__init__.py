"""The engine alone: one model, one cache, one choice at a time."""
