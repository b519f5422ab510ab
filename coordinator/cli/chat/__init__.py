"""`python -m coordinator chat`."""
