"""The nodes and the texts, and the thread through which their messages go."""
