"""Tests of the experiments: what is made of their rows."""
