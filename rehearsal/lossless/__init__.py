"""The command `verify-lossless`: checks that a pair writes what its target alone would write."""
