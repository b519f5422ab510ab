"""The command line: commands and their options, and what a person sees of a text."""
