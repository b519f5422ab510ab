"""A synthetic pair: the real processes, sockets and state machines, with models that cost nothing.

`python -m lab.synthetic` uses it to measure what the host costs beside a GPU.
"""
