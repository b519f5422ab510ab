"""What crosses a process boundary: codec, tree, liveness and transport, each alone."""
