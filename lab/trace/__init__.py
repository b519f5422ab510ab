"""The command `trace-summary`: the critical path of the texts in a trace, and a picture of it."""
