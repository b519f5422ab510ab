"""The drafter's machine, alone."""
