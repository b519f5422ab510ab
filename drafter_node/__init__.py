"""The drafter's process: proposes tokens with one draft model or head.

Never sees the target's model.
"""
