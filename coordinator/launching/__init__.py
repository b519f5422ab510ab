"""Who starts the node processes, where, and when again."""
