"""Experiments: what their files may say, the order of their cells, and what survives a crash."""
