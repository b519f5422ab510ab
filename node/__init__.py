"""Shared by both nodes: the process, its loop, where messages enter, and the measured costs."""
