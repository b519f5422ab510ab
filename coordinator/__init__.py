"""Owns sessions: the committed text, the processes and the person in front. Never imports torch."""
