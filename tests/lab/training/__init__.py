"""The training of the embedded models, and the heads that came of it."""
