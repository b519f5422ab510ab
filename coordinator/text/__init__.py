"""The state of one text: its committed tokens, its metrics, and the stream that returns its
tokens.
"""
