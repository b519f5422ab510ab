"""One model on one device: weights, KV cache, sampling.

Knows tokens and tensors, no session and no message.
"""
