"""The theory of speculative decoding, in exact numbers."""
