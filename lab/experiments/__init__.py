"""Measurements: each says first how it is run, and prints what it found."""
