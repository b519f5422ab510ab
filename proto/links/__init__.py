"""Sockets between processes, and who may speak over them."""
