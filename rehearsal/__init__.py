"""Runs the real state machines of all processes in virtual time: for `plan`, and for tests.

`lossless` is apart from that: it checks a running pair.
"""
