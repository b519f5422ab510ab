"""Starts node processes on a Ray cluster."""
