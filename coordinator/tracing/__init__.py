"""Traces: what every process did and when, on one clock, as a file for trace viewers."""
