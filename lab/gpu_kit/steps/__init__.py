"""The steps of the kit: a process each, which writes its rows as they come."""
