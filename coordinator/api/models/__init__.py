"""The models of a pair: their settings, checks before the start, and the configs of their nodes."""
