"""Machines: where node processes run, how they are brought up there, and what is measured."""
