"""Starts the node processes: on which host and device, with which logs, and when again."""
