"""`python -m coordinator chat`: a conversation with the target."""
