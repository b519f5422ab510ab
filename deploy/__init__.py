"""Machines: where node processes run, and how they are brought up there."""
