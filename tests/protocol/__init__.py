"""The protocol: codec, tree, machines and transport, each alone."""
