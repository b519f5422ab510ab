"""The page at `/`, driven in a browser."""
