"""What a trace says: the critical path of its texts, and a picture."""
