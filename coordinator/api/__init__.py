"""The Python API and every setting that a user can make."""
