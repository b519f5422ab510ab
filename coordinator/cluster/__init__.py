"""The nodes: started, watched and ended, and the thread through which their messages go."""
