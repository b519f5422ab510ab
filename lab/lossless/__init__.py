"""The proof that a pair writes what its target alone would write."""
