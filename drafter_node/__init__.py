"""The drafter's process: proposes tokens with a draft model or a head.

Never sees the target model.
"""
