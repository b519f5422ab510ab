"""Trains draft heads for a target: what is behind the command `train-head`."""
