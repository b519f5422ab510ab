"""Experiments: run every arm (one combination of settings) on every prompt and compare the arms."""
