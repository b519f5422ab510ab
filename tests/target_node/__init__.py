"""The target's machine and what it decides with, alone."""
