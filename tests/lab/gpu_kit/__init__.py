"""The kit for a GPU machine, without one."""
