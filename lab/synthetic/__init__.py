"""A synthetic pair: the real processes, sockets and machines, with models that cost nothing.

`python -m lab.synthetic` measures with it what the host costs beside a GPU.
"""
