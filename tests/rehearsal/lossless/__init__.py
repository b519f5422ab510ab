"""What `verify-lossless` compares, and what it says of it."""
