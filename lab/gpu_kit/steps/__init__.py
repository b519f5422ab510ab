"""The steps of the GPU kit: each runs as a process and writes its rows as they are measured."""
