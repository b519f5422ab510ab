"""One text: its committed tokens, its metrics, its decoding, and the stream of its tokens."""
