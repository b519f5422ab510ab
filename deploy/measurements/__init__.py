"""Measurements of one thing each, besides the experiments."""
