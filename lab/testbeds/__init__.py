"""Models in the shape of large ones."""
