"""Runs the real state machines of all processes in virtual time: for `plan`, and for tests."""
