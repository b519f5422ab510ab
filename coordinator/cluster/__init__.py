"""Keeps track of the nodes, passes messages between them, and runs the queue of texts."""
