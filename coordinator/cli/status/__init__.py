"""`status`: how the coordinators of this user are, asked through their sockets."""
