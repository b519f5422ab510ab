"""Measurements, as far as they can be checked without measuring."""
